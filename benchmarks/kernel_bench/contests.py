"""One computation, done by us and by others, timed in turns on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import attrs
import torch

from kernel_bench.timers import HostTimer, pair_ratio

TOLERANCE = 1e-4
"""Largest relative difference of float32 results that compute the same."""

Compute = Callable[[], torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Contest:
    """Ours and theirs.

    Attributes:
        name: ratios are called ``{name}_vs_{other}``.
        what: sizes, for people.
        unit, count: what a call makes, and how many of them.
        ours: our call.
        others: theirs by name; None for one that is not installed.
        inner: calls per sample, for calls that take microseconds.
        compares: whether results must agree; not for a plain copy, say, that is only a floor.
    """

    name: str
    what: str
    unit: str
    count: int
    ours: Compute
    others: Mapping[str, Compute | None]
    inner: int = 1
    compares: bool = True


def run(
    contest: Contest, timer: HostTimer, threads: Iterable[int]
) -> tuple[list[dict[str, object]], dict[str, float]]:
    """Rows and ratios, for each number of threads."""
    present = {other: call for other, call in contest.others.items() if call is not None}
    first = contest.ours()
    for other, call in present.items():
        check(contest, other, first, call())
    rows: list[dict[str, object]] = []
    ratios: dict[str, float] = {}
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        calls = [contest.ours, *present.values()]
        _start_threads()
        made = timer.rounds(calls, inner=contest.inner)
        suffix = {1: "_1thread", 2: ""}.get(num_threads, f"_{num_threads}threads")
        for by, samples in zip(("prfaas", *present), made, strict=True):
            row: dict[str, object] = {"op": contest.name, "what": contest.what, "by": by}
            row |= {
                "threads": num_threads,
                f"{contest.unit}_per_s": contest.count / samples.median_s,
                "median_ms": samples.median_s * 1e3,
                "min_ms": min(samples.seconds) * 1e3,
                "num_samples": len(samples.seconds),
            }
            rows.append(row)
            if by != "prfaas":
                ratios[f"{contest.name}_vs_{by}{suffix}"] = pair_ratio(made[0], samples)
    for other in contest.others:
        if other not in present:
            row = {"op": contest.name, "what": contest.what, "by": other}
            rows.append({**row, "skipped": "not installed"})
    return rows, ratios


def _start_threads() -> None:
    """The first parallel region after a change of their number is slow; the calls themselves were
    warmed up by the check."""
    matrix = torch.ones(512, 512)
    for _ in range(3):
        matrix = (matrix @ matrix).clamp_max_(1.0)


def check(contest: Contest, other: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Stops the run if two results differ: their times would mean nothing."""
    if not contest.compares:
        return
    difference = relative(ours, theirs)
    if not difference <= TOLERANCE:
        raise SystemExit(
            f"{contest.name}: our result differs from that of {other} by {difference:.2g} "
            f"(relative); at most {TOLERANCE:.0e} is rounding"
        )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``b``; NaN if any element is."""
    x, y = a.reshape(-1).double(), b.reshape(-1).double()
    return float((x - y).norm() / y.norm().clamp_min(1e-300))
