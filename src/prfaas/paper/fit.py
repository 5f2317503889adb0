"""What the joint fit of the two prefill profiles compares: five free numbers, ten figures.

Table 6 of arXiv 2604.15039 prints ten figures that depend on prefill time. The five numbers that
the paper leaves out (two H200 latencies, three coefficients of the H20 curve) are chosen so that
the sum of squared relative errors over those figures is least. This file is the model of that fit;
``prfaas.cli.fit`` solves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from prfaas.capacity import Deployment, PrefillProfile, stage_rates
from prfaas.paper.profiles import (
    ALL_LOCAL_TOKENS,
    ALL_REMOTE_TOKENS,
    CASE_STUDY,
    H20_COEFFICIENTS,
    H200_FITTED_S,
    H200_FITTED_TOKENS,
    HOMOGENEOUS,
    LENGTHS,
    NAIVE,
    TABLE_5_KNOTS,
    THRESHOLD_TOKENS,
    h20_profile,
    h200_profile,
)
from prfaas.paper.ttft import mean_ttft_s, p90_ttft_s

PARAMETERS = ("H200 T(16,000)", "H200 T(64,000)", "H20 a", "H20 b", "H20 c")
"""Names of the five free numbers; seconds, seconds, s, s/token, s/token^2."""

DERIVED = (*H200_FITTED_S, *H20_COEFFICIENTS)
"""The rounded solution that ``prfaas.paper.profiles`` uses."""

PUBLISHED = MappingProxyType(
    {
        "PrfaaS-PD rate of PrfaaS": 1.61,
        "PrfaaS-PD rate of PD-P": 1.64,
        "homogeneous rate of PD-P": 2.11,
        "naive rate of PrfaaS": 2.45,
        "PrfaaS-PD mean TTFT": 2.22,
        "PrfaaS-PD P90 TTFT": 3.51,
        "homogeneous mean TTFT": 4.44,
        "homogeneous P90 TTFT": 9.73,
        "naive mean TTFT": 1.74,
        "naive P90 TTFT": 3.51,
    }
)
"""The ten figures of Table 6; rates in requests/s, times in s."""

TWINS = frozenset({"PrfaaS-PD P90 TTFT", "naive P90 TTFT"})
"""One quantity printed twice: in both deployments a remote request of the same length. Whoever
predicts one of them must not look at the other."""

_FLAT_RATIO = 2.5


def start() -> tuple[float, ...]:
    """Parameters that know nothing of Table 6.

    The H200 knots lie on the straight lines of Table 5; the H20 curve is 2.5 times the H200 one at
    1K, 32K and 128K.
    """
    table_5 = PrefillProfile(TABLE_5_KNOTS)
    (x0, y0), (x1, y1), (x2, y2) = (TABLE_5_KNOTS[i] for i in (0, 2, 3))
    slope = (y1 - y0) / (x1 - x0)
    c = ((y2 - y0) / (x2 - x0) - slope) / (x2 - x1)
    b = slope - c * (x0 + x1)
    a = y0 - b * x0 - c * x0 * x0
    on_lines = (table_5.prefill_s(tokens) for tokens in H200_FITTED_TOKENS)
    return (*on_lines, _FLAT_RATIO * a, _FLAT_RATIO * b, _FLAT_RATIO * c)


def deployments(parameters: tuple[float, ...]) -> tuple[Deployment, Deployment, Deployment]:
    """PrfaaS-PD, homogeneous and naive with the profiles that the five numbers describe.

    Raises:
        ConfigError: the numbers make a profile that falls somewhere.
    """
    at_16k, at_64k, a, b, c = parameters
    remote, local = h200_profile((at_16k, at_64k)), h20_profile((a, b, c))

    def with_profiles(deployment: Deployment) -> Deployment:
        return attrs.evolve(deployment, remote_profile=remote, local_profile=local)

    return with_profiles(CASE_STUDY), with_profiles(HOMOGENEOUS), with_profiles(NAIVE)


def figures(parameters: tuple[float, ...]) -> Mapping[str, float]:
    """The model's values of ``PUBLISHED``, in the same order, units and words.

    Raises:
        ConfigError: the numbers make a profile that falls somewhere.
    """
    prfaas, homogeneous, naive = deployments(parameters)
    at_t = stage_rates(prfaas, LENGTHS, THRESHOLD_TOKENS)
    all_local = stage_rates(homogeneous, LENGTHS, ALL_LOCAL_TOKENS)
    all_remote = stage_rates(naive, LENGTHS, ALL_REMOTE_TOKENS)
    values = [at_t.prfaas_rps, at_t.prefill_rps, all_local.prefill_rps, all_remote.prfaas_rps]
    for deployment, threshold in (
        (prfaas, THRESHOLD_TOKENS),
        (homogeneous, ALL_LOCAL_TOKENS),
        (naive, ALL_REMOTE_TOKENS),
    ):
        values.append(mean_ttft_s(deployment, LENGTHS, threshold))
        values.append(p90_ttft_s(deployment, LENGTHS, threshold))
    return {
        name: value
        for name, value in zip(PUBLISHED, values, strict=True)
        if value is not None  # each stage here has instances, so every rate exists
    }
