"""Does prefill in another cluster pay? Public models on NVIDIA's kernel measurements.

``--measure`` writes study_profiles.json (needs ``pip install "prfaas[profiles]"``); without it the
study is computed from that file alone. ``--write`` renews docs/study.md and its plots.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from _common import parser
from _study import PROFILES, load
from _study_cases import CASES, LAWS, law_mean
from _study_plots import draw
from _study_report import report
from _study_results import results

DOCS = Path(__file__).parent.parent / "docs"
LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16_384, 32_000, 49_152, 65_536, 98_304, 130_000)
CACHED = (0, 32_000)
OUTPUT_TOKENS = 1024


def measure() -> dict[str, object]:
    """Ask the database for every instance of the study."""
    from prfaas.integrations.aiconfigurator import Instance

    rows = []
    for case in CASES:
        for system in case.systems:
            print(case.model, case.weights, system.name, file=sys.stderr, flush=True)
            instance = Instance(
                checkpoint=case.checkpoint,
                system=system.database,
                num_gpus=system.num_gpus,
                expert_parallel=system.expert_parallel,
                weights=case.weights,
                kv="bfloat16",
            ).pinned()
            contexts = {name: law_mean(name) + OUTPUT_TOKENS // 2 for name in LAWS}
            rows.append(
                {
                    "model": case.model,
                    "checkpoint": case.checkpoint,
                    "weights": case.weights or "as published",
                    "kv": "bfloat16",
                    "system": system.name,
                    "database": instance.system,
                    "backend": f"{instance.backend} {instance.version}",
                    "num_gpus": instance.num_gpus,
                    "expert_parallel": instance.expert_parallel or instance.num_gpus,
                    "prefill": _rounded(instance.prefill_rows(LENGTHS, CACHED)),
                    "decode": {
                        name: _rounded(instance.decode_steps(context).steps)
                        for name, context in contexts.items()
                    },
                }
            )
    return {
        "source": f"aiconfigurator {version('aiconfigurator')} (NVIDIA, Apache-2.0)",
        "command": "python benchmarks/study.py --measure",
        "prefill": "rows of new tokens, cached tokens, seconds; one request alone",
        "decode": "by law of lengths: rows of batch, seconds per step, at the mean context; "
        "only batches that fit the memory",
        "instances": rows,
    }


def _rounded(rows: tuple[tuple[float, ...], ...]) -> list[list[float]]:
    return [[*map(int, row[:-1]), round(row[-1], 6)] for row in rows]


def _as_text(measured: dict[str, object]) -> str:
    """JSON with one instance per line, so that a new measurement reads as a diff."""
    *head, last = (f" {json.dumps(k)}: {json.dumps(v)}" for k, v in measured.items())
    return "{\n" + ",\n".join([*head, last.replace('{"model"', '\n  {"model"')]) + "\n}\n"


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--measure", action="store_true", help="renew study_profiles.json")
    arguments.add_argument("--write", action="store_true", help="renew docs/study.md and its plots")
    arguments.add_argument("--png", metavar="DIR", type=Path, help="draw the plots into DIR")
    args = arguments.parse_args()
    if args.measure:
        PROFILES.write_text(_as_text(measure()), encoding="utf-8")
        return
    found = results(load(), quick=args.quick)
    if args.write:
        (DOCS / "study.md").write_text(report(found), encoding="utf-8")
        draw(found, DOCS / "study")
    if args.png is not None:
        draw(found, args.png)
    if args.json:
        json.dump(found.as_json(), sys.stdout)
        print()
    elif not args.write:
        print(report(found))


if __name__ == "__main__":
    main()
