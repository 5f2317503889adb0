"""How the maximum rate moves with the threshold, with the split and with each input."""

from __future__ import annotations

import math

import attrs

from prfaas.capacity.fleet import Change, Fleet, Split
from prfaas.capacity.plan import Elasticity, SplitPoint, ThresholdPoint

_STEP = 0.1
_NUM_THRESHOLDS = 80
_PLOTTED_SHARE = 0.95
_MOST_SPLITS = 32


def sensitivity(fleet: Fleet) -> tuple[Elasticity, ...]:
    """Elasticity of Λ_max in every input, from the inputs 10 % lower and 10 % higher."""
    return tuple(_elasticity(fleet, field.name) for field in attrs.fields(Change))


def _elasticity(fleet: Fleet, parameter: str) -> Elasticity:
    low, high = (
        attrs.evolve(fleet, change=Change(**{parameter: factor})).best_rate()
        for factor in (1 - _STEP, 1 + _STEP)
    )
    known = low > 0 and high > 0
    width = math.log((1 + _STEP) / (1 - _STEP))
    return Elasticity(
        parameter=parameter,
        low_rps=low,
        high_rps=high,
        elasticity=math.log(high / low) / width if known else None,
    )


def by_threshold(fleet: Fleet, best: float, split: Split) -> tuple[ThresholdPoint, ...]:
    """The bounds at evenly spaced thresholds up to the 95 % quantile, and at the best one."""
    last = max(best, fleet.table.lengths.quantile(_PLOTTED_SHARE))
    thresholds = sorted({best, *(last * i / _NUM_THRESHOLDS for i in range(_NUM_THRESHOLDS + 1))})
    return tuple(_threshold_point(fleet, threshold, split) for threshold in thresholds)


def _threshold_point(fleet: Fleet, threshold: float, split: Split) -> ThresholdPoint:
    remote = fleet.remote_rps(threshold)
    local = fleet.local_limits(threshold, split)
    prefill = sum(limit for limit, _ in local)
    return ThresholdPoint(
        threshold_tokens=threshold,
        prfaas_rps=remote if remote < math.inf else None,
        prefill_rps=prefill if prefill < math.inf else None,
        decode_rps=sum(limit for _, limit in local),
        requests_per_s=fleet.rate(threshold, split),
    )


def by_split(fleet: Fleet, split: Split) -> tuple[SplitPoint, ...]:
    """Λ_max over N_p of each PD cluster; at most about 32 evenly spaced N_p per cluster."""
    points = []
    for place, cluster in enumerate(fleet.problem.pd):
        most = math.floor(cluster.num_nodes)
        counts = {*range(0, most + 1, max(1, math.ceil(most / _MOST_SPLITS))), split[place]}
        for num_prefill in sorted(counts):
            changed = (*split[:place], num_prefill, *split[place + 1 :])
            threshold = fleet.best_threshold(changed)
            points.append(
                SplitPoint(
                    cluster_id=cluster.cluster_id,
                    num_prefill=num_prefill,
                    threshold_tokens=threshold,
                    requests_per_s=fleet.rate(threshold, changed),
                )
            )
    return tuple(points)
