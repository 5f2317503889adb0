"""Checks every case at a small size, then times it: on a GPU, or interpreted at toy sizes."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence

import attrs
import torch

from kernel_bench import attention_cases, packing_cases, recurrent_cases, step_cases
from kernel_bench.cases import Build, Case, Peer, Results, Sizes
from kernel_bench.contests import relative
from kernel_bench.rates import Rates, measure_rates
from kernel_bench.timers import CudaTimer, HostTimer, Samples, Timer, pair_ratio
from prfaas.kernels.arch import arch_of

CASES: dict[str, Build] = {
    **recurrent_cases.CASES,
    **step_cases.CASES,
    **attention_cases.CASES,
    **packing_cases.CASES,
}

FULL = Sizes(num_tokens=32_768)
QUICK = Sizes(num_tokens=8192)
CHECK = Sizes(num_tokens=300, new_tokens=100, requests=5, divide_heads=8)
TOY = Sizes(
    num_tokens=70,
    new_tokens=20,
    requests=3,
    divide_heads=16,
    divide_dims=8,
    page_size=16,
    dtype=torch.float32,  # the interpreter's own bfloat16 is wrong
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
"""Largest relative difference from the float64 reference, by the dtype of the inputs."""

PEER_TOLERANCE = 5e-2
"""Largest relative difference from somebody else's result that still is rounding, in bfloat16."""

DISTRIBUTIONS = {"fla": "fla-core", "flashinfer": "flashinfer-python"}
"""Where a package's name on the index is another one."""

Row = dict[str, object]


@attrs.frozen(kw_only=True)
class Setting:
    """Where and how large: the only things in which a GPU and the interpreter differ.

    ``rates`` is None where times mean nothing.
    """

    device: torch.device
    sizes: Sizes
    check_sizes: Sizes
    timer: Timer
    rates: Rates | None


def setting(kind: str, *, is_quick: bool) -> Setting:
    """Of ``"cuda"`` or ``"interpreter"``."""
    if kind == "interpreter":
        timer = HostTimer(min_rounds=1, max_rounds=1, budget_s=0.0)
        cpu = torch.device("cpu")
        return Setting(device=cpu, sizes=TOY, check_sizes=TOY, timer=timer, rates=None)
    device = torch.device("cuda", torch.cuda.current_device())
    cuda_timer = CudaTimer(device, num_rounds=10 if is_quick else 40)
    return Setting(
        device=device,
        sizes=QUICK if is_quick else FULL,
        check_sizes=CHECK,
        timer=cuda_timer,
        rates=measure_rates(cuda_timer, device),
    )


def run(kind: str, *, is_quick: bool, only: str) -> tuple[list[Row], dict[str, float], list[str]]:
    """Rows, ratios, and what of ours failed: the other cases run all the same, since a GPU may be
    hard to come by."""
    where = setting(kind, is_quick=is_quick)
    rows: list[Row] = [] if where.rates is None else [where.rates.row(where.device)]
    ratios: dict[str, float] = {}
    failures: list[str] = []
    with torch.inference_mode():
        for name, build in CASES.items():
            if only not in name or (name.endswith("_fp8") and not _has_fp8(where)):
                continue
            try:
                made = bench(name, build, where)
            except Exception as error:
                failures.append(f"{name}: {_first_line(error)}")
                rows.append({"case": name, "by": "prfaas", "error": _first_line(error)})
                continue
            finally:
                _release(where.device)
            rows += made[0]
            ratios |= made[1]
    return rows, ratios, failures


def bench(name: str, build: Build, where: Setting) -> tuple[list[Row], dict[str, float]]:
    """Rows and ratios of one case."""
    sizes, small, device = where.sizes, where.check_sizes, where.device
    truth = [result.clone() for result in build(small, device).run("reference")]
    if small != sizes:
        check(build(small, device).run("triton"), truth, small.dtype)
    case = build(sizes, device)
    made = case.run("triton")
    if small == sizes:
        check(made, truth, sizes.dtype)
    first = made[0].clone()
    del made

    def ours() -> torch.Tensor:
        return case.run("triton")[0]

    where.timer.finish()
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    peer_rows: dict[str, Row] = {}
    for peer in case.peers:
        row, call = prepare(peer, first, where)
        peer_rows[peer.name] = {"case": name, **row}
        if call is not None:
            calls[peer.name] = call
    del first
    samples, *others = where.timer.rounds([ours, *calls.values()])
    rows = [{"case": name, "op": case.op, "by": "prfaas", **figures(samples, case, where.rates)}]
    ratios = {}
    for other, theirs in zip(calls, others, strict=True):
        ratios[f"{name}_vs_{other}"] = ratio = pair_ratio(samples, theirs)
        peer_rows[other] |= {**figures(theirs, case, where.rates), "ours_vs_it": ratio}
    return [*rows, *peer_rows.values()], ratios


def check(results: Results, truth: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Raises AssertionError if ours, from inputs of ``dtype``, differ from those of the reference
    path; whole numbers may not differ at all."""
    for index, (got, wanted) in enumerate(zip(results, truth, strict=True)):
        limit = TOLERANCE[dtype] if got.is_floating_point() else 0.0
        difference = relative(got, wanted)
        if not difference <= limit:
            raise AssertionError(
                f"result {index} differs from the reference by {difference:.2g}, relative; at "
                f"most {limit:.0e} is rounding"
            )


def prepare(
    peer: Peer, ours: torch.Tensor, where: Setting
) -> tuple[Row, Callable[[], torch.Tensor] | None]:
    """A row that says who it is, and its call if it can be timed."""
    if peer.package != "torch" and where.rates is None:
        return {"by": peer.name, "skipped": "needs a GPU"}, None
    if importlib.util.find_spec(peer.package) is None:
        return {"by": peer.name, "skipped": "not installed"}, None
    row: Row = {"by": peer.name, "version": version(peer.package)}
    try:  # of somebody else's code any error may come: it is a row, and no reason to stop
        call = peer.build()
        result = call()
        where.timer.finish()
    except Exception as error:
        return {**row, "error": _first_line(error)}, None
    if peer.compares:
        difference = relative(result, ours)
        row["difference"] = difference
        if not difference <= PEER_TOLERANCE:
            return {**row, "error": "its result is another one, so its time says nothing"}, None
    return row, call


def figures(samples: Samples, case: Case, rates: Rates | None) -> Row:
    """Times, and what they mean against the floor where there is one."""
    seconds = samples.median_s
    row: Row = {"ms": seconds * 1e3, "host_ms": samples.median_host_s * 1e3}
    row["num_samples"] = len(samples.seconds)
    if rates is None:
        return row
    bytes_s = case.work.num_bytes / rates.bytes_per_s
    flops_s = case.work.flops / rates.flops_per_s
    floor = max(bytes_s, flops_s)
    return row | {
        "floor_ms": floor * 1e3,
        "bound": "bytes" if bytes_s >= flops_s else "flops",
        "share_of_floor": floor / seconds,
        "gbytes_per_s": case.work.num_bytes / seconds / 1e9,
        "tflops_per_s": case.work.flops / seconds / 1e12,
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _has_fp8(where: Setting) -> bool:
    """Not in the interpreter, whose own float8 is wrong."""
    return where.device.type == "cuda" and arch_of(where.device).has_fp8


def _release(device: torch.device) -> None:
    """Gives a case's gigabytes back before the next one takes its own."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
