"""Speed of the kernels: on a CPU against others' torch code, on a GPU against measured floors.

--device cpu (the default) times our torch paths, and whole small models, in turns with the code
that transformers and fla-core run there, with 1 and 2 threads; outputs must agree. Threads that
wait sleep (OMP_WAIT_POLICY=PASSIVE unless it is set): where other processes want the cores too,
threads that spin make every parallel region wait for the scheduler, and times mean nothing.

--device cuda times our Triton kernels at the sizes of large models, beside the time that their
bytes or operations take at the copy and matmul rates that the same run measures, and beside other
libraries where they are installed. --device interpreter is the same code at toy sizes on CPU
tensors, with TRITON_INTERPRET=1 set: it shows that every case runs, its times mean nothing.

Ratios are others' seconds over ours, the median over rounds in which all take turns.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from _common import emit, parser

DEVICES = ("cpu", "cuda", "interpreter")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    given = parser(__doc__ or "")
    given.formatter_class = argparse.RawDescriptionHelpFormatter
    given.add_argument("--device", choices=DEVICES, default="cpu", help="where to run")
    given.add_argument("--only", metavar="TEXT", default="", help="cases whose name has this in it")
    args = given.parse_args(argv)
    is_interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if args.device == "interpreter" and not is_interpreting:
        given.error("--device interpreter: set TRITON_INTERPRET=1 before Python starts")
    if args.device == "cuda" and is_interpreting:
        given.error("--device cuda: TRITON_INTERPRET=1 is set; unset it to run compiled kernels")
    if args.device == "cuda" and not _has_gpu():
        given.error("--device cuda: torch sees no GPU here; use --device cpu or interpreter")
    if args.device == "cpu" and os.environ.get("OMP_NUM_THREADS") == "1":
        given.error("--device cpu: OMP_NUM_THREADS=1 leaves no second thread; unset it")
    return args


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _require_match(only: str, names: Sequence[str]) -> None:
    if not any(only in name for name in names):
        print(
            f"--only {only}: no case has this in its name; cases: {', '.join(names)}",
            file=sys.stderr,
        )
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.device == "cpu":
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
        from kernel_bench import cpu_run

        _require_match(args.only, cpu_run.names())
        emit(args, *cpu_run.run(is_quick=args.quick, only=args.only))
        return
    from kernel_bench import device_run

    _require_match(args.only, list(device_run.CASES))
    rows, ratios, failures = device_run.run(args.device, is_quick=args.quick, only=args.only)
    emit(args, rows, ratios)
    if failures:
        raise SystemExit("failed: " + "; ".join(failures))


if __name__ == "__main__":
    main()
