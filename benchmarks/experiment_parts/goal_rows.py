"""The runs behind the goals as values, so that they can be spread over processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from experiment_parts import fractions, goals
from experiment_parts.deployments import EQUAL_COST, EQUAL_GPUS, HETERO, optimum
from experiment_parts.measures import Window
from experiment_parts.runs import Outcome
from prfaas.core import NodeId
from prfaas.policy import ThroughputBalancer

HARDWARE = {"hetero": HETERO, "homogeneous": EQUAL_GPUS, "homogeneous_cost": EQUAL_COST}
STEP_OUTPUTS = (512, 1536)
FRACTION_WINDOW = Window(from_s=600.0, until_s=2600.0)


@attrs.frozen(kw_only=True)
class Job:
    """One run: the name of its kind, and what that takes."""

    kind: str
    label: str
    options: Mapping[str, Any] = attrs.field(factory=dict)


def _whole(hardware: str, num_prefill: int, base_share: float = 1.0) -> Outcome:
    return fractions.whole(HARDWARE[hardware], num_prefill, FRACTION_WINDOW, base_share)


def _balanced(hardware: str, mode: str, base_share: float = 1.0) -> Outcome:
    return fractions.balanced(HARDWARE[hardware], mode, FRACTION_WINDOW, base_share=base_share)


def _shared(hardware: str, split: fractions.SharedSplit, base_share: float) -> Outcome:
    return fractions.shared(HARDWARE[hardware], split, FRACTION_WINDOW, base_share)


KINDS: Mapping[str, Callable[..., Outcome]] = {
    "t_only": goals.link_drop_t_only,
    "full": goals.link_drop_full,
    "constant": goals.constant_load,
    "step": goals.mix_step,
    "whole": _whole,
    "balanced": _balanced,
    "shared": _shared,
}


def jobs() -> list[Job]:
    """Everything that the goals need, but for the caches."""
    found = [
        *(_job("t_only", p, name=p) for p in ("fixed", "least_finish", "adaptive", "max_weight")),
        *(_job("full", p, name=p) for p in ("balancer", "max_weight_balancer", "slices")),
    ]
    for name in ("balancer", "max_weight_balancer"):
        for poisson in (False, True):
            label = f"{name}, {'Poisson' if poisson else 'even'}"
            found.append(_job("constant", label, name=name, poisson=poisson))
        for out in STEP_OUTPUTS:
            label = f"{name}, 1024 to {out}"
            found.append(_job("step", label, name=name, output_tokens=out))
    for out in STEP_OUTPUTS:
        best = round(optimum(HETERO, output_tokens=out).num_prefill)
        options = {"name": "adaptive", "output_tokens": out, "num_prefill": best, "step": False}
        found.append(_job("step", f"best roles from the start, {out}", **options))
    for name in HARDWARE:
        found += _fraction_jobs(name)
    return found


def _fraction_jobs(name: str) -> list[Job]:
    hardware = HARDWARE[name]
    best = round(optimum(hardware).num_prefill)
    found = [
        _job("whole", f"{name}, N_p = {n}", hardware=name, num_prefill=n) for n in (best, best + 1)
    ]
    found.append(_job("balanced", f"{name}, slices", hardware=name, mode="slices"))
    for share in fractions.BASE_SHARES:
        label = f"{name}, mixed, a = {share:g}"
        found.append(_job("balanced", label, hardware=name, mode="mixed", base_share=share))
        if name != "homogeneous_cost":
            found += [
                _job(
                    "shared",
                    f"{name}, a = {share:g}, N_p = {split.num_prefill} + one with "
                    f"{split.num_slots} slots",
                    hardware=name,
                    split=split,
                    base_share=share,
                )
                for split in fractions.shared_splits(hardware, share)
            ]
    return found


def _job(kind: str, label: str, **options: object) -> Job:
    return Job(kind=kind, label=label, options=options)


def run(job: Job) -> dict[str, object]:
    """The line of a job."""
    start = time.process_time()
    outcome = KINDS[job.kind](**job.options)
    balancer = outcome.parts.balancer
    is_throughput = isinstance(balancer, ThroughputBalancer)
    line: dict[str, object] = {
        "goal": job.kind,
        "run": job.label,
        "throughput_rps": outcome.throughput_rps,
        "conversions": balancer.num_conversions if is_throughput else 0,
        "slices": balancer.num_slices if is_throughput else 0,
        "rolled_back": balancer.num_rolled_back if is_throughput else 0,
        "conversions_per_200_periods": goals.conversions_per_200(outcome),
        "lost": outcome.result.num_lost,
        "timed_out": outcome.result.num_timed_out,
        "cpu_s": time.process_time() - start,
    }
    if job.kind == "shared":
        node_id = NodeId(f"local{job.options['split'].num_prefill}")
        line["token_ms"] = 1000 * fractions.token_s_of(outcome, node_id)
    return line


def rate(rows: Sequence[Mapping[str, Any]], kind: str, label: str) -> float:
    """Throughput of one run."""
    return float(next(r["throughput_rps"] for r in rows if (r["goal"], r["run"]) == (kind, label)))
