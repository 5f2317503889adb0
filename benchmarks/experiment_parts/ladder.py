"""All rows of the ablation ladder, and the rows that say what their noise is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing import Pool
from typing import Any, TypeVar

from experiment_parts.policies import POLICIES
from experiment_parts.runs import Task, row
from experiment_parts.scenarios import LOADS

NOISE_POLICIES = ("homogeneous_cost", "static", "adaptive", "max_weight_balancer")
NOISE_SEEDS = (0, 1, 2, 3)
TRACE_LOAD = 0.75
Item = TypeVar("Item")
Made = TypeVar("Made")


def tasks(path: str | None) -> list[Task]:
    """Every policy in every scenario."""
    cases: list[tuple[str, dict[str, Any]]] = [
        *(("steady", {"load": load}) for load in LOADS),
        ("saturated", {}),
        ("bursts", {}),
        ("link drop", {}),
        ("diurnal", {}),
        ("failure", {}),
        ("trace", {"path": path, "load": TRACE_LOAD}),
    ]
    return [
        Task(scenario=scenario, policy=name, options=options)
        for scenario, options in cases
        for name in POLICIES
        # Where all is local there is no link.
        if not (scenario == "link drop" and name.startswith("homogeneous"))
    ]


def noise_tasks() -> list[Task]:
    """One scenario with other seeds."""
    return [
        Task(scenario="steady", policy=name, options={"load": 0.9, "seed": seed})
        for name in NOISE_POLICIES
        for seed in NOISE_SEEDS
    ]


def in_parallel(
    make: Callable[[Item], Made], items: Sequence[Item], num_processes: int
) -> list[Made]:
    """Results in the order of the items."""
    if num_processes == 1:
        return [make(item) for item in items]
    with Pool(num_processes) as pool:
        return pool.map(make, items, chunksize=1)


def rows(path: str | None, num_processes: int) -> list[dict[str, object]]:
    """The ladder."""
    return in_parallel(row, tasks(path), num_processes)


def spread(noise: Sequence[dict[str, object]]) -> list[tuple[str, str, float, float]]:
    """(policy, measure, mean, standard deviation) over the seeds."""
    found = []
    for name in NOISE_POLICIES:
        mine = [r for r in noise if r["policy"] == name]
        for key in ("throughput_rps", "goodput_10s_rps", "ttft_mean_s", "ttft_p90_s"):
            values = [float(str(r[key])) for r in mine]
            mean = sum(values) / len(values)
            variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
            found.append((name, key, mean, variance**0.5))
    return found
