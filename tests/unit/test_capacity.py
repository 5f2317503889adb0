"""The throughput model against the figures of arXiv 2604.15039 and what follows from them."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.capacity import (
    Deployment,
    EmpiricalLengths,
    LogNormalLengths,
    PrefillProfile,
    RateForm,
    Stage,
    best_split,
    best_threshold,
    kv_throughput_bps,
    least_egress_bps,
    max_request_rate,
    stage_rates,
)
from prfaas.errors import ConfigError
from prfaas.spec import preset

# Table 5 of the paper, with two further H200 points and the H20 curve fitted to its Table 6.
H200_KNOTS = (
    (1024, 0.44),
    (8192, 0.72),
    (16_000, 1.10),
    (32_000, 1.84),
    (64_000, 3.48),
    (130_000, 7.40),
)
H200 = PrefillProfile(H200_KNOTS)
H20 = PrefillProfile.sampled(
    lambda n: 0.460 + 1.306e-4 * n + 2.855e-10 * n * n, range(0, 131_073, 512)
)
LENGTHS = LogNormalLengths(mu=9.90, sigma=1.00, min_tokens=128, max_tokens=131_072)
T = 19_400
ALL_REMOTE = 0
ALL_LOCAL = math.inf
PRFAAS_PD = Deployment(
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
HOMOGENEOUS = attrs.evolve(PRFAAS_PD, num_prfaas=0, num_prefill=9, num_decode=3)
NAIVE = attrs.evolve(PRFAAS_PD, num_prefill=0, num_decode=8)


def rate(deployment, threshold_tokens, form=RateForm.MEAN):
    return max_request_rate(stage_rates(deployment, LENGTHS, threshold_tokens, form))


def percent(expected, tolerance=1.0):
    return pytest.approx(expected, rel=tolerance / 100)


def test_the_case_studys_length_distribution():
    assert LENGTHS.mean_below(ALL_LOCAL) == percent(27_486, 0.01)
    assert LENGTHS.share_above(T) == pytest.approx(0.4957, abs=5e-5)
    assert LENGTHS.mean_above(T) == percent(45_046, 0.01)
    assert LENGTHS.mean_below(T) == percent(10_224, 0.01)


def test_table_6_stage_rates():
    rates = stage_rates(PRFAAS_PD, LENGTHS, T)
    assert rates.prfaas_rps == percent(1.61)
    assert rates.prefill_rps == percent(1.64)
    assert rates.decode_rps == percent(3.91)
    homogeneous = stage_rates(HOMOGENEOUS, LENGTHS, ALL_LOCAL)
    assert homogeneous.prefill_rps == percent(2.11)
    assert homogeneous.decode_rps == percent(2.35)
    naive = stage_rates(NAIVE, LENGTHS, ALL_REMOTE)
    assert naive.prfaas_rps == percent(2.45)
    assert naive.decode_rps == percent(6.25)


def test_table_6_maximum_rates_and_what_binds():
    best, homogeneous, naive = (
        rate(PRFAAS_PD, T),
        rate(HOMOGENEOUS, ALL_LOCAL),
        rate(NAIVE, ALL_REMOTE),
    )
    assert best.requests_per_s == percent(3.24)
    assert homogeneous.requests_per_s == percent(2.11)
    assert naive.requests_per_s == percent(2.45)
    assert best.binding is Stage.PRFAAS_COMPUTE
    assert homogeneous.binding is Stage.PREFILL
    assert naive.binding is Stage.PRFAAS_COMPUTE
    assert 12e9 < best.egress_bps < 13e9
    assert homogeneous.egress_bps == 0


def mean_ttft_s(deployment, threshold_tokens):
    def ttft_s(num_tokens):
        return deployment.service_ttft_s(num_tokens, threshold_tokens)

    p = LENGTHS.share_above(threshold_tokens)
    above = LENGTHS.expect_above(ttft_s, threshold_tokens) or 0
    below = LENGTHS.expect_below(ttft_s, threshold_tokens) or 0
    return p * above + (1 - p) * below


@pytest.mark.parametrize(
    ("deployment", "threshold_tokens", "mean_s", "p90_s"),
    [
        (PRFAAS_PD, T, 2.22, 3.51),
        (HOMOGENEOUS, ALL_LOCAL, 4.44, 9.73),
        (NAIVE, ALL_REMOTE, 1.74, 3.51),
    ],
)
def test_table_6_times_to_first_token(deployment, threshold_tokens, mean_s, p90_s):
    assert mean_ttft_s(deployment, threshold_tokens) == percent(mean_s)
    p90_tokens = 62_410  # no local request takes longer than the remote one of this length
    assert deployment.service_ttft_s(T, T) < deployment.service_ttft_s(p90_tokens, T)
    assert LENGTHS.share_above(p90_tokens) == pytest.approx(0.1, abs=1e-4)
    assert deployment.service_ttft_s(p90_tokens, threshold_tokens) == percent(p90_s)


def test_a_request_as_long_as_the_threshold_stays_local():
    assert PRFAAS_PD.service_ttft_s(T, T) == H20.prefill_s(T)
    shipping_s = preset("paper-1t").kv_bytes(T + 1) * 8 / 100e9
    remote_s = H200.prefill_s(T + 1) + shipping_s
    assert PRFAAS_PD.service_ttft_s(T + 1, T) == pytest.approx(remote_s)


def test_the_best_threshold_equalises_the_prefill_stages():
    point = best_threshold(PRFAAS_PD, LENGTHS)
    assert point.threshold_tokens == pytest.approx(19_547, abs=3)
    assert point.max_rate.requests_per_s == pytest.approx(3.226, abs=5e-4)
    limits = point.rates.limits_rps()
    assert limits[Stage.PRFAAS_COMPUTE] == percent(limits[Stage.PREFILL], 0.02)


@pytest.mark.parametrize(
    ("num_prefill", "best", "at_t"),
    [
        (1, 2.74, 1.09),
        (2, 2.98, 2.17),
        (3, 3.226, 3.22),
        (4, 3.125, 3.125),
        (5, 2.34, 2.34),
        (6, 1.56, 1.56),
        (7, 0.78, 0.78),
    ],
)
def test_sweep_of_the_local_split(num_prefill, best, at_t):
    split = attrs.evolve(PRFAAS_PD, num_prefill=num_prefill, num_decode=8 - num_prefill)
    assert best_threshold(split, LENGTHS).max_rate.requests_per_s == pytest.approx(best, abs=0.005)
    assert rate(split, T).requests_per_s == pytest.approx(at_t, abs=0.005)


def test_the_best_split_of_the_case_study_has_three_prefill_instances():
    for start in (1, 6):
        split, point = best_split(
            attrs.evolve(PRFAAS_PD, num_prefill=start, num_decode=8 - start), LENGTHS
        )
        assert (split.num_prefill, split.num_decode) == (3, 5)
        assert point == best_threshold(PRFAAS_PD, LENGTHS)


@pytest.mark.parametrize(
    ("threshold_tokens", "remote", "local"),
    [(5_000, 2.52, 38.6), (15_000, 2.95, 4.74), (30_000, 4.03, 1.90), (60_000, 7.84, 1.03)],
)
def test_sweep_of_the_threshold(threshold_tokens, remote, local):
    limits = stage_rates(PRFAAS_PD, LENGTHS, threshold_tokens).limits_rps()
    assert limits[Stage.PRFAAS_COMPUTE] == pytest.approx(remote, abs=0.005)
    assert limits[Stage.PREFILL] == percent(local, 0.3)


@pytest.mark.parametrize(
    ("gbps", "best", "num_prefill", "naive"),
    [(2, 1.62, 5, 0.38), (5, 2.26, 5, 0.95), (10, 3.04, 4, 1.90), (100, 3.226, 3, 2.452)],
)
def test_sweep_of_the_egress_bandwidth(gbps, best, num_prefill, naive):
    split, point = best_split(attrs.evolve(PRFAAS_PD, egress_bps=gbps * 1e9), LENGTHS)
    assert point.max_rate.requests_per_s == pytest.approx(best, abs=0.005)
    assert split.num_prefill == num_prefill
    all_remote = rate(attrs.evolve(NAIVE, egress_bps=gbps * 1e9), ALL_REMOTE)
    assert all_remote.requests_per_s == pytest.approx(naive, abs=0.005)
    assert all_remote.binding is (Stage.EGRESS if gbps < 12 else Stage.PRFAAS_COMPUTE)


def test_the_expectation_form_is_lower_because_prefill_time_is_convex():
    def true_rate(deployment, threshold_tokens):
        return rate(deployment, threshold_tokens, RateForm.EXPECTATION).requests_per_s

    assert true_rate(HOMOGENEOUS, ALL_LOCAL) == pytest.approx(2.026, abs=0.002)
    assert true_rate(NAIVE, ALL_REMOTE) == pytest.approx(2.371, abs=0.002)
    assert true_rate(PRFAAS_PD, T) == pytest.approx(3.153, abs=0.002)


def test_with_nothing_remote_the_remote_terms_are_absent():
    rates = stage_rates(PRFAAS_PD, LENGTHS, 131_072)
    assert (rates.offload_fraction, rates.offloaded_kv_bits) == (0, 0)
    assert rates.prfaas_rps is rates.prfaas_compute_rps is rates.egress_rps is None
    assert set(rates.limits_rps()) == {Stage.PREFILL, Stage.DECODE}


def test_with_nothing_local_the_local_term_is_absent():
    rates = stage_rates(PRFAAS_PD, LENGTHS, 127)
    assert rates.offload_fraction == 1
    assert rates.prefill_rps is None
    assert Stage.PREFILL not in rates.limits_rps()


@pytest.mark.parametrize("form", RateForm)
def test_a_share_lost_to_rounding_counts_as_absent(form):
    below_max = math.nextafter(131_072.0, 0)
    above_min = math.nextafter(128.0, 129)
    assert max_request_rate(stage_rates(PRFAAS_PD, LENGTHS, below_max, form)).requests_per_s > 0
    assert max_request_rate(stage_rates(PRFAAS_PD, LENGTHS, above_min, form)).requests_per_s > 0


def test_a_missing_stage_pushes_the_threshold_to_the_other():
    assert best_threshold(HOMOGENEOUS, LENGTHS).rates.offload_fraction == 0
    assert best_threshold(NAIVE, LENGTHS).rates.offload_fraction == 1
    observed = EmpiricalLengths((100, 200))
    assert best_threshold(HOMOGENEOUS, observed).rates.offload_fraction == 0
    assert best_threshold(NAIVE, observed).rates.offload_fraction == 1
    empty = attrs.evolve(PRFAAS_PD, num_prfaas=0, num_prefill=0)
    assert best_threshold(empty, LENGTHS).max_rate.requests_per_s == 0


def test_a_decode_bound_deployment_still_gets_the_balanced_threshold():
    plenty = attrs.evolve(PRFAAS_PD, num_decode=50)
    starved = attrs.evolve(PRFAAS_PD, num_decode=1)
    best = best_threshold(starved, LENGTHS)
    assert best.max_rate.binding is Stage.DECODE
    assert best.threshold_tokens == best_threshold(plenty, LENGTHS).threshold_tokens


def test_the_slow_truth_of_the_threshold_search():
    fine = max(
        rate(PRFAAS_PD, threshold, RateForm.EXPECTATION).requests_per_s
        for threshold in range(15_000, 25_000, 100)
    )
    found = best_threshold(PRFAAS_PD, LENGTHS, RateForm.EXPECTATION).max_rate.requests_per_s
    assert found == percent(fine, 0.3)
    assert found >= fine


def test_kv_throughput_of_table_5():
    for num_tokens, gbps in ((1024, 3.61), (8192, 3.59), (32_000, 3.19), (130_000, 2.62)):
        assert kv_throughput_bps(preset("paper-1t"), H200, num_tokens) / 1e9 == percent(gbps, 0.9)


def test_least_egress_is_the_offloaded_bits_per_prefill_second():
    bits, seconds = (
        LENGTHS.expect_above(PRFAAS_PD.kv_bits, T),
        LENGTHS.expect_above(H200.prefill_s, T),
    )
    assert least_egress_bps(PRFAAS_PD, LENGTHS, T) == percent(4 * bits / seconds, 1e-6)
    assert least_egress_bps(PRFAAS_PD, LENGTHS, ALL_LOCAL) == 0


def test_a_profile_interpolates_and_extends_its_end_segments():
    profile = PrefillProfile(((100, 1.0), (200, 2.0), (400, 8.0)))
    assert [profile.prefill_s(n) for n in (100, 150, 200, 300, 400)] == [1.0, 1.5, 2.0, 5.0, 8.0]
    assert profile.prefill_s(500) == 11.0
    assert profile.prefill_s(50) == 0.5
    assert PrefillProfile(((100, 1.0), (200, 3.0))).prefill_s(0) == 0.0


@pytest.mark.parametrize(
    "knots",
    [
        ((100, 1.0),),
        ((100, 1.0), (100, 2.0)),
        ((200, 1.0), (100, 2.0)),
        ((100, 2.0), (200, 1.0)),
        ((100, 0.0), (200, 1.0)),
        ((-1, 1.0), (200, 1.0)),
        ((0, 1.0), (200, math.nan)),
    ],
)
def test_knots_out_of_order_are_refused(knots):
    with pytest.raises(ConfigError):
        PrefillProfile(knots)


@pytest.mark.parametrize(
    "change",
    [
        {"num_prfaas": -1},
        {"num_prefill": 1.5},
        {"num_decode": True},
        {"egress_bps": 0},
        {"batch_size": 0},
        {"decode_step_s": -1},
        {"output_tokens": math.nan},
    ],
)
def test_a_deployment_is_checked_at_the_door(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        attrs.evolve(PRFAAS_PD, **change)


@pytest.mark.parametrize(
    "change", [{"sigma": 0}, {"min_tokens": 0}, {"max_tokens": 128}, {"min_tokens": 200_000}]
)
def test_a_length_law_is_checked_at_the_door(change):
    with pytest.raises(ConfigError):
        attrs.evolve(LENGTHS, **change)


def test_observed_lengths_are_checked_at_the_door():
    for lengths in ((), (0, 5)):
        with pytest.raises(ConfigError, match="at least 1"):
            EmpiricalLengths(lengths)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40).map(tuple),
    st.integers(0, 31) | st.floats(0, 31),
)
def test_observed_lengths_against_a_scan(lengths, threshold):
    law = EmpiricalLengths(lengths)
    above = [n for n in lengths if n > threshold]
    below = [n for n in lengths if n <= threshold]

    def mean(values):
        return pytest.approx(sum(values) / len(values)) if values else None

    assert law.share_above(threshold) == pytest.approx(len(above) / len(lengths))
    assert law.mean_above(threshold) == mean(above)
    assert law.mean_below(threshold) == mean(below)
    assert law.expect_above(lambda n: n * n, threshold) == mean([n * n for n in above])
    assert law.expect_below(lambda n: n * n, threshold) == mean([n * n for n in below])
    assert (law.min_tokens, law.max_tokens) == (min(lengths), max(lengths))


def test_a_quantile_sample_of_the_law_gives_the_laws_rates():
    """The two distributions meet: 4,000 lengths at equal steps of the log-normal's quantiles."""
    edges = [math.exp(math.log(128) + i * math.log(1024) / 20_000) for i in range(20_001)]
    shares = [1 - LENGTHS.share_above(edge) for edge in edges]
    sample, at = [], 0
    for i in range(4_000):
        while shares[at] < (i + 0.5) / 4_000:
            at += 1
        sample.append(round(edges[at]))
    law = EmpiricalLengths(tuple(sample))
    assert max_request_rate(stage_rates(PRFAAS_PD, law, T)).requests_per_s == percent(3.2166, 0.2)
    assert best_threshold(PRFAAS_PD, law).max_rate.requests_per_s == percent(3.226, 0.2)


@given(
    st.floats(1e8, 1e12),
    st.integers(0, 8),
    st.integers(0, 8),
    st.sampled_from(RateForm),
)
def test_more_bandwidth_or_instances_never_sustain_less(egress_bps, num_prfaas, num_prefill, form):
    base = attrs.evolve(
        PRFAAS_PD, egress_bps=egress_bps, num_prfaas=num_prfaas, num_prefill=num_prefill
    )
    rates = [
        rate(deployment, T, form).requests_per_s
        for deployment in (
            base,
            attrs.evolve(base, egress_bps=2 * egress_bps),
            attrs.evolve(base, num_prfaas=num_prfaas + 1),
            attrs.evolve(base, num_prefill=num_prefill + 1),
        )
    ]
    assert all(more >= rates[0] for more in rates[1:])
    assert rate(base, T, form).egress_bps <= egress_bps * (1 + 1e-9)
