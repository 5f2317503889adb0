"""The case study swept over what the paper sweeps (figure 5), and over what it leaves out."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from prfaas.capacity import (
    Deployment,
    RateForm,
    Stage,
    ThresholdPoint,
    best_split,
    best_threshold,
    max_request_rate,
    stage_rates,
)
from prfaas.paper.profiles import (
    ALL_LOCAL_TOKENS,
    ALL_REMOTE_TOKENS,
    CASE_STUDY,
    HOMOGENEOUS,
    LENGTHS,
    NAIVE,
    THRESHOLD_TOKENS,
)


@attrs.frozen(kw_only=True)
class LocalSplit:
    """Figure 5a at one N_p: the rate with the best threshold, and with the published one."""

    num_prefill: float
    threshold_tokens: float
    best_rps: float
    at_published_threshold_rps: float


def local_split_sweep(
    nums_prefill: Iterable[float] = range(1, 8), form: RateForm = RateForm.MEAN
) -> list[LocalSplit]:
    """Figure 5a: the 8 local instances split in every way."""
    points = []
    num_local = CASE_STUDY.num_prefill + CASE_STUDY.num_decode
    for num_prefill in nums_prefill:
        split = attrs.evolve(
            CASE_STUDY, num_prefill=num_prefill, num_decode=num_local - num_prefill
        )
        best = best_threshold(split, LENGTHS, form)
        fixed = max_request_rate(stage_rates(split, LENGTHS, THRESHOLD_TOKENS, form))
        points.append(
            LocalSplit(
                num_prefill=num_prefill,
                threshold_tokens=best.threshold_tokens,
                best_rps=best.max_rate.requests_per_s,
                at_published_threshold_rps=fixed.requests_per_s,
            )
        )
    return points


def threshold_sweep(
    thresholds_tokens: Iterable[float], form: RateForm = RateForm.MEAN
) -> list[ThresholdPoint]:
    """Figure 5b: where each stage of the case study's split saturates, by threshold."""
    points = []
    for threshold in thresholds_tokens:
        rates = stage_rates(CASE_STUDY, LENGTHS, threshold, form)
        limits = rates.limits_rps()
        remote = [limits[s] for s in (Stage.PRFAAS_COMPUTE, Stage.EGRESS) if s in limits]
        points.append(
            ThresholdPoint(
                threshold_tokens=threshold,
                prfaas_rps=min(remote, default=None),
                prefill_rps=limits.get(Stage.PREFILL),
                decode_rps=limits[Stage.DECODE],
                requests_per_s=max_request_rate(rates).requests_per_s,
            )
        )
    return points


def homogeneous_sweep(
    nums_prefill: Iterable[float] = range(6, 11), form: RateForm = RateForm.MEAN
) -> dict[float, float]:
    """The rate of 12 H20 instances in one cluster by their N_p; 9 is the published one."""
    num_local = HOMOGENEOUS.num_prefill + HOMOGENEOUS.num_decode
    splits = {
        n: attrs.evolve(HOMOGENEOUS, num_prefill=n, num_decode=num_local - n) for n in nums_prefill
    }
    return {
        n: max_request_rate(stage_rates(split, LENGTHS, ALL_LOCAL_TOKENS, form)).requests_per_s
        for n, split in splits.items()
    }


@attrs.frozen(kw_only=True)
class Operation:
    """The best operating point of a changed case study, beside two that do not adapt.

    Attributes:
        fixed_rps: with the published split and threshold.
        naive_rps: with every prefill remote.
    """

    egress_limit_bps: float
    num_prfaas: float
    num_prefill: float
    threshold_tokens: float
    offload_fraction: float
    max_rate_rps: float
    egress_bps: float
    fixed_rps: float
    naive_rps: float


def _operation(egress_limit_bps: float, num_prfaas: float, form: RateForm) -> Operation:
    changed = attrs.evolve(CASE_STUDY, egress_bps=egress_limit_bps, num_prfaas=num_prfaas)
    naive = attrs.evolve(NAIVE, egress_bps=egress_limit_bps, num_prfaas=num_prfaas)
    split, point = best_split(changed, LENGTHS, form)

    def rate_rps(deployment: Deployment, threshold_tokens: float) -> float:
        return max_request_rate(
            stage_rates(deployment, LENGTHS, threshold_tokens, form)
        ).requests_per_s

    return Operation(
        egress_limit_bps=egress_limit_bps,
        num_prfaas=num_prfaas,
        num_prefill=split.num_prefill,
        threshold_tokens=point.threshold_tokens,
        offload_fraction=point.rates.offload_fraction,
        max_rate_rps=point.max_rate.requests_per_s,
        egress_bps=point.max_rate.egress_bps,
        fixed_rps=rate_rps(changed, THRESHOLD_TOKENS),
        naive_rps=rate_rps(naive, ALL_REMOTE_TOKENS),
    )


def bandwidth_sweep(
    limits_bps: Iterable[float] = (1e9, 2e9, 5e9, 8e9, 10e9, 12.5e9, 100e9),
    form: RateForm = RateForm.MEAN,
) -> list[Operation]:
    """The case study behind thinner links; not in the paper."""
    return [_operation(limit, CASE_STUDY.num_prfaas, form) for limit in limits_bps]


def remote_sweep(
    nums_prfaas: Iterable[float] = range(1, 9), form: RateForm = RateForm.MEAN
) -> list[Operation]:
    """The case study with fewer or more PRFAAS instances; not in the paper."""
    return [_operation(CASE_STUDY.egress_bps, num, form) for num in nums_prfaas]
