"""The case study of arXiv 2604.15039 (section 4) as values that the capacity model takes.

Every constant says where it comes from: published (printed in the paper), fitted (chosen so that
printed figures come out) or derived (computed from printed figures). The paper prints neither its
H20 latencies nor its decode batch; the curves here are a reconstruction, not the authors' data.
"""

from __future__ import annotations

import math

import attrs

from prfaas.capacity import Deployment, LogNormalLengths, PrefillProfile
from prfaas.spec import preset

TABLE_5_KNOTS = ((1024, 0.44), (8192, 0.72), (32_000, 1.84), (130_000, 7.40))
"""Published (Table 5): T_prefill in seconds on 8 H200. The lengths are derived: the printed sizes
fit one affine law within 0.05 MiB only if 32K means 32,000 and 128K means 130,000 tokens."""

H200_FITTED_TOKENS = (16_000, 64_000)
"""Lengths of the two knots of ``H200`` that the paper does not print."""

H200_FITTED_S = (1.10, 3.48)
"""Fitted: seconds at ``H200_FITTED_TOKENS``, from the ten figures of Table 6 that depend on them
and on ``H20_COEFFICIENTS`` (see ``prfaas.paper.fit``), then rounded."""

H20_COEFFICIENTS = (0.460, 1.306e-4, 2.855e-10)
"""Fitted together with ``H200_FITTED_S``: T(l) = a + b l + c l^2 seconds on 8 H20."""


def h200_profile(fitted_s: tuple[float, float]) -> PrefillProfile:
    """T_prefill on 8 H200: Table 5, with two more knots at ``H200_FITTED_TOKENS``."""
    fitted = zip(H200_FITTED_TOKENS, fitted_s, strict=True)
    return PrefillProfile(tuple(sorted((*TABLE_5_KNOTS, *fitted))))


def h20_profile(coefficients: tuple[float, float, float]) -> PrefillProfile:
    """T_prefill on 8 H20: a + b l + c l^2 seconds, as a curve with a knot every 512 tokens."""
    a, b, c = coefficients
    return PrefillProfile.sampled(lambda n: a + b * n + c * n * n, range(0, 131_073, 512))


H200 = h200_profile(H200_FITTED_S)
"""Published at four lengths, fitted at two: T_prefill of one instance of 8 H200."""

H20 = h20_profile(H20_COEFFICIENTS)
"""Fitted: T_prefill of one instance of 8 H20. Eq. 4 turned round gives T(10,224) = 3/1.64 s and
T(27,486) = 9/2.11 s at the mean lengths of Table 6; the latencies there give the rest."""

LENGTHS = LogNormalLengths(mu=9.90, sigma=1.00, min_tokens=128, max_tokens=131_072)
"""Published (section 4.1). Derived: "128K" is 131,072, which gives the printed 49.6 % above t."""

THRESHOLD_TOKENS = 19_400
"""Published (Table 6) as 19.4K. Derived: K is 1000, since 19,866 would send 48.6 %, not 49.6 %."""

ALL_LOCAL_TOKENS = math.inf
"""The threshold of the homogeneous deployment: nothing is offloaded."""

ALL_REMOTE_TOKENS = 0.0
"""The threshold of the naive deployment: everything is offloaded."""

CASE_STUDY = Deployment(
    model=preset("paper-1t"),
    remote_profile=H200,
    local_profile=H20,
    num_prfaas=4,
    num_prefill=3,
    num_decode=5,
    egress_bps=100e9,
    batch_size=20,
    decode_step_s=0.025,
    output_tokens=1024,
)
"""PrfaaS-PD of Table 6: 32 H200 beside 64 H20.

Published: 4, 3 and 5 instances of 8 GPUs, about 100 Gbps, 1024 output tokens, 40 tokens/s.
Derived: ``decode_step_s`` = 1 / 40. Fitted: ``batch_size`` from the naive deployment's decode rate,
6.25 = 8 BS / (0.025 x 1024).
"""

HOMOGENEOUS = attrs.evolve(CASE_STUDY, num_prfaas=0, num_prefill=9, num_decode=3)
"""Published (Table 6): 96 H20 in one cluster."""

NAIVE = attrs.evolve(CASE_STUDY, num_prefill=0, num_decode=8)
"""Published (Table 6): every prefill on H200, every decode on H20."""

H20_PRICE = 1.0
"""The unit of cost: one H20."""

H200_PRICE = 2.0
"""Fitted: one H200 in units of one H20. "About 15 % at equal cost" with the rates of Table 6 is
1.15 = 3.24 / (2.11 (32 r + 64) / 96), so r = 2.0."""
