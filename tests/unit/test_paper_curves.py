"""Figure 5 of the paper, and sweeps of the case study that only our model gives."""

from __future__ import annotations

import pytest

from prfaas.paper import THRESHOLD_TOKENS
from prfaas.paper.curves import (
    bandwidth_sweep,
    homogeneous_sweep,
    local_split_sweep,
    remote_sweep,
    threshold_sweep,
)

SPLITS = [
    (1, 10_700, 2.74, 1.09),
    (2, 15_500, 2.98, 2.17),
    (3, 19_547, 3.226, 3.217),
    (4, None, 3.125, 3.125),
    (5, None, 2.34, 2.34),
    (6, None, 1.56, 1.56),
    (7, None, 0.78, 0.78),
]


def test_figure_5a():
    points = local_split_sweep()
    assert [p.num_prefill for p in points] == [n for n, *_ in SPLITS]
    for point, (_, threshold, best, at_t) in zip(points, SPLITS, strict=True):
        assert point.best_rps == pytest.approx(best, abs=0.005)
        assert point.at_published_threshold_rps == pytest.approx(at_t, abs=0.005)
        if threshold is not None:
            assert point.threshold_tokens == pytest.approx(threshold, abs=100)
    assert max(points, key=lambda p: p.best_rps).num_prefill == 3


BOUNDS = {
    5_000: (2.52, 38.6),
    10_000: (2.70, 9.36),
    15_000: (2.95, 4.74),
    19_400: (3.22, 3.26),
    25_000: (3.62, 2.35),
    30_000: (4.03, 1.90),
    40_000: (5.03, 1.43),
    60_000: (7.84, 1.03),
}


def test_figure_5b():
    points = threshold_sweep(BOUNDS)
    for point, (remote, local) in zip(points, BOUNDS.values(), strict=True):
        assert point.prfaas_rps == pytest.approx(remote, abs=0.006)
        assert point.prefill_rps == pytest.approx(local, abs=0.006, rel=2e-3)
        assert point.decode_rps == pytest.approx(3.906, abs=0.001)
        assert point.requests_per_s == min(point.prfaas_rps, point.prefill_rps, point.decode_rps)
    assert max(points, key=lambda p: p.requests_per_s).threshold_tokens == THRESHOLD_TOKENS
    ends = threshold_sweep((127, 131_072))
    assert (ends[0].prefill_rps, ends[1].prfaas_rps) == (None, None)


def test_homogeneous_splits():
    golden = {6: 1.41, 7: 1.64, 8: 1.88, 9: 2.11, 10: 1.56}
    assert homogeneous_sweep() == pytest.approx(golden, abs=0.005)


# Gbps, Lambda, N_p, t, tolerance of t, p, Lambda of a deployment that does not adapt, naive
LINKS = [
    (1, 1.56, 6, 89_000, 1_000, 0.04, 0.26, 0.19),
    (2, 1.62, 5, 65_800, 300, 0.09, 0.53, 0.38),
    (5, 2.26, 5, 42_300, 100, 0.20, 1.31, 0.95),
    (8, 2.63, 4, 29_000, 100, 0.33, 2.10, 1.52),
    (10, 3.04, 4, 25_600, 100, 0.38, 2.63, 1.90),
    (12.5, 3.226, 3, 19_547, 10, 0.49, 3.22, 2.38),
    (100, 3.226, 3, 19_547, 10, 0.49, 3.22, 2.45),
]


def test_bandwidth_sweep():
    for found, row in zip(bandwidth_sweep(), LINKS, strict=True):
        gbps, best, num_prefill, threshold, tolerance, share, fixed, naive = row
        assert found.egress_limit_bps == gbps * 1e9
        assert found.max_rate_rps == pytest.approx(best, abs=0.005)
        assert found.num_prefill == num_prefill
        assert found.threshold_tokens == pytest.approx(threshold, abs=tolerance)
        assert found.offload_fraction == pytest.approx(share, abs=0.005)
        assert found.fixed_rps == pytest.approx(fixed, abs=0.0085)
        assert found.naive_rps == pytest.approx(naive, abs=0.005)
        assert found.egress_bps <= gbps * 1e9 * (1 + 1e-9)


# N_prfaas, Lambda, N_p, t, tolerance of t (decode binds at 2: a plateau), egress Gbps
REMOTES = [
    (1, 1.80, 5, 56_000, 500, 2.8),
    (2, 2.34, 5, 38_000, 1_500, 5.8),
    (3, 2.84, 4, 27_000, 500, 9.0),
    (4, 3.226, 3, 19_500, 100, 12.3),
    (5, 3.85, 3, 17_250, 100, 15.4),
    (6, 4.23, 2, 12_500, 100, 18.8),
    (7, 4.69, 2, 11_500, 100, 21.3),
    (8, 5.22, 1, 7_500, 200, 25.6),
]


def test_prfaas_instance_sweep():
    for found, row in zip(remote_sweep(), REMOTES, strict=True):
        num_prfaas, best, num_prefill, threshold, tolerance, gbps = row
        assert found.num_prfaas == num_prfaas
        assert found.max_rate_rps == pytest.approx(best, abs=0.008)
        assert found.num_prefill == num_prefill
        assert found.threshold_tokens == pytest.approx(threshold, abs=tolerance)
        assert found.egress_bps / 1e9 == pytest.approx(gbps, abs=0.16)
