"""What routing by caches is worth on conversations: goodput against the paper's rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from experiment_parts.deployments import HETERO
from experiment_parts.runs import Task
from experiment_parts.scenarios import trace_optimum

SLO_S = 10
ARMS = {
    "paper, best fixed t": "fixed",
    "paper, adaptive t": "adaptive",
    "least predicted finish": "least_finish",
    "adaptive t + prefix transfers": "abundant",
    "max-weight": "max_weight",
    "max-weight + prefix transfers": "max_weight_prefixes",
}
PAPER = "paper, best fixed t"
CACHE_AWARE = (
    "adaptive t + prefix transfers",
    "max-weight",
    "max-weight + prefix transfers",
)


@attrs.frozen(kw_only=True)
class Grid:
    """What is searched: N_p around the planned one, rates and t as shares of the planned ones."""

    num_requests: int
    extra_prefill: Sequence[int]
    rate_shares: Sequence[float]
    t_shares: Sequence[float]


FULL = Grid(
    num_requests=4000,
    extra_prefill=(0, 1),
    rate_shares=(0.75, 0.8, 0.85, 0.875, 0.9),
    t_shares=(1.0, 1.25, 1.5),
)
QUICK = Grid(
    num_requests=2000,
    extra_prefill=(0,),
    rate_shares=(0.7, 0.8, 0.85, 0.9),
    t_shares=(1.0, 1.25),
)


def tasks(path: str | None, grid: Grid) -> list[tuple[str, Task]]:
    """(arm, run): every arm with every N_p and rate; the fixed one with every t too.

    Shares of t are of the planned one at that N_p.
    """
    best = trace_optimum(HETERO, path, None, grid.num_requests)
    found = []
    for extra in grid.extra_prefill:
        num_prefill = round(best.num_prefill) + extra
        planned = trace_optimum(HETERO, path, num_prefill, grid.num_requests)
        for share in grid.rate_shares:
            options = {
                "path": path,
                "rate_rps": share * best.limit_rps,
                "num_prefill": num_prefill,
                "num_requests": grid.num_requests,
            }
            for arm, policy in ARMS.items():
                ts: Iterable[dict[str, int]] = [{}]
                if policy == "fixed":
                    ts = [{"threshold": round(s * planned.threshold_tokens)} for s in grid.t_shares]
                for changes in ts:
                    task = Task(scenario="trace", policy=policy, options=options, changes=changes)
                    found.append((arm, task))
    return found


@attrs.frozen(kw_only=True)
class Best:
    """The best that an arm did: good requests per second, and where."""

    arm: str
    goodput_rps: float
    rate_rps: float
    num_prefill: int
    threshold_tokens: int | None


def best_of(
    arms: Sequence[tuple[str, Task]],
    rows: Sequence[dict[str, object]],
    *,
    num_prefill: int | None = None,
    rate_rps: float | None = None,
) -> dict[str, Best]:
    """The best run of every arm, among those of one N_p and rate if they are given."""
    found: dict[str, Best] = {}
    for (arm, task), row in zip(arms, rows, strict=True):
        at = task.options
        if num_prefill is not None and at["num_prefill"] != num_prefill:
            continue
        if rate_rps is not None and at["rate_rps"] != rate_rps:
            continue
        goodput = row[f"goodput_{SLO_S}s_rps"]
        assert isinstance(goodput, float)
        if arm not in found or goodput > found[arm].goodput_rps:
            found[arm] = Best(
                arm=arm,
                goodput_rps=goodput,
                rate_rps=at["rate_rps"],
                num_prefill=at["num_prefill"],
                threshold_tokens=task.changes.get("threshold"),
            )
    return found


def gain(best: dict[str, Best], over: str = PAPER) -> float:
    """The better of the cache-aware arms over another one."""
    return max(best[arm].goodput_rps for arm in CACHE_AWARE if arm in best) / best[over].goodput_rps
