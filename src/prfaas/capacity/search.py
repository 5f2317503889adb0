"""Eq. 7 and 8 of arXiv 2604.15039: the best threshold, and the best split of the local instances.

The search over splits needs no enumeration. At a fixed threshold the remote stage does not depend
on the split, and of the local splits only the two around the balance of prefill and decode can be
best. So one search over the threshold finds both.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from prfaas.capacity.lengths import LengthDistribution
from prfaas.capacity.load import Curve, LoadCurves, rate_of
from prfaas.capacity.throughput import (
    Deployment,
    OperatingPoint,
    RateForm,
    max_request_rate,
    stage_rates,
)
from prfaas.errors import ConfigError

_GRID_POINTS = 32
_REFINE_POINTS = 16
_PRECISION = 1e-9


def search_threshold(
    rising: Curve, falling: Curve, lengths: LengthDistribution, form: RateForm
) -> float:
    """Return the threshold with the highest ``min(rising, falling)``, among equals the highest.

    In the expectation form the remote limit never falls with t and the local one never rises, so
    the best is at their crossing, found by bisection. In the mean form neither need be monotone:
    a grid looks for better, geometric over the lengths with 0 before it, then ever finer around
    its best point. The grid alone cannot see a peak beside a plateau that is almost as high.
    """

    def ranked(threshold: float) -> tuple[float, float]:
        return min(rising(threshold), falling(threshold)), threshold

    candidates = [*_crossing(rising, falling, lengths), float(lengths.max_tokens)]
    if form is RateForm.MEAN:
        candidates.append(_peak_of_grid(ranked, lengths))
    return max(candidates, key=ranked)


def _crossing(rising: Curve, falling: Curve, lengths: LengthDistribution) -> tuple[float, float]:
    """The last threshold seen below the crossing and the first one seen above it."""
    low, high = 0.0, float(lengths.max_tokens)
    if rising(low) >= falling(low):
        return low, low
    while high - low > _PRECISION * max(high, lengths.min_tokens):
        middle = (low + high) / 2
        if rising(middle) < falling(middle):
            low = middle
        else:
            high = middle
    return low, high


def _peak_of_grid(
    ranked: Callable[[float], tuple[float, float]], lengths: LengthDistribution
) -> float:
    ratio = math.pow(lengths.max_tokens / lengths.min_tokens, 1 / _GRID_POINTS)
    grid = [lengths.min_tokens * ratio**i for i in range(_GRID_POINTS)]
    candidates = [0.0, *grid, float(lengths.max_tokens)]
    while True:
        best = max(candidates, key=ranked)
        at = candidates.index(best)
        low, high = candidates[max(0, at - 1)], candidates[min(len(candidates) - 1, at + 1)]
        if high - low <= _PRECISION * high:
            return best
        step = (high - low) / _REFINE_POINTS
        candidates = sorted({best, *(low + i * step for i in range(_REFINE_POINTS)), high})


def split_local(
    num_local: float, prefill_load: float, decode_rps: float, granularity: float
) -> tuple[float, float]:
    """Return (rate, N_p): the best N_p among the multiples of ``granularity`` up to N_local.

    Args:
        prefill_load: seconds of local prefill per arriving request.
        decode_rps: requests per second that one decode instance takes.
    """
    if prefill_load == 0:
        return num_local * decode_rps, 0
    balance = num_local * decode_rps * prefill_load / (1 + decode_rps * prefill_load)
    below = math.floor(balance / granularity)
    most = math.floor(num_local / granularity)
    splits = {min(n, most) * granularity for n in (below, below + 1)}
    rates = [
        (
            min(num_prefill / prefill_load, max(0.0, num_local - num_prefill) * decode_rps),
            -num_prefill,
        )
        for num_prefill in splits
    ]
    rate, minus_num_prefill = max(rates)
    return rate, -minus_num_prefill


def best_threshold(
    deployment: Deployment, lengths: LengthDistribution, form: RateForm = RateForm.MEAN
) -> OperatingPoint:
    """Eq. 7: the threshold at which the prefill stages together carry most.

    Decode is left out of the comparison, so that a decode-bound deployment still gets the
    threshold with the most headroom. Among equals the highest wins, for it ships least.
    """
    loads = LoadCurves(lengths, form)
    remote = _remote_rps(deployment, loads)
    local_load = loads.below(deployment.local_profile.prefill_s)
    best = search_threshold(
        remote, lambda t: rate_of(deployment.num_prefill, local_load(t)), lengths, form
    )
    rates = stage_rates(deployment, lengths, best, form)
    return OperatingPoint(threshold_tokens=best, rates=rates, max_rate=max_request_rate(rates))


def best_split(
    deployment: Deployment,
    lengths: LengthDistribution,
    form: RateForm = RateForm.MEAN,
    *,
    granularity: float = 1.0,
) -> tuple[Deployment, OperatingPoint]:
    """Eq. 8: share the local instances between prefill and decode, with the best threshold.

    Args:
        granularity: the step of N_p in instances; below 1 an instance serves both roles, each
            for a share of its time. N_d gets what is left.

    Raises:
        ConfigError: ``granularity`` is not a positive, finite number.
    """
    if not 0 < granularity < math.inf:
        raise ConfigError(f"granularity is {granularity!r}; it must be positive and finite")
    loads = LoadCurves(lengths, form)
    remote = _remote_rps(deployment, loads)
    local_load = loads.below(deployment.local_profile.prefill_s)
    num_local = deployment.num_prefill + deployment.num_decode
    one_decode_rps = deployment.batch_size / (deployment.decode_step_s * deployment.output_tokens)

    def local(threshold: float) -> tuple[float, float]:
        return split_local(num_local, local_load(threshold), one_decode_rps, granularity)

    threshold = search_threshold(remote, lambda t: local(t)[0], lengths, form)
    num_prefill = whole_if_whole(local(threshold)[1])
    split = attrs.evolve(
        deployment,
        num_prefill=num_prefill,
        num_decode=whole_if_whole(max(0.0, num_local - num_prefill)),
    )
    return split, best_threshold(split, lengths, form)


def whole_if_whole(count: float) -> float:
    """Return 3 for 3.0 and 3.65 for 3.6500000000000004, so that a split reads well."""
    count = round(count, 9)
    return int(count) if float(count).is_integer() else count


def _remote_rps(deployment: Deployment, loads: LoadCurves) -> Curve:
    seconds = loads.above(deployment.remote_profile.prefill_s)
    bits = loads.above(deployment.kv_bits)
    return lambda t: min(
        rate_of(deployment.num_prfaas, seconds(t)), rate_of(deployment.egress_bps, bits(t))
    )
