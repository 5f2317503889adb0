"""The throughput model against the figures of arXiv 2604.15039 and what follows from them."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.capacity import (
    DecodeProfile,
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
    mixed_capacity,
    stage_rates,
    time_slicing_loss,
)
from prfaas.capacity.load import LoadCurves
from prfaas.errors import ConfigError
from prfaas.paper.profiles import (
    CASE_STUDY,
    H20,
    H200,
    HOMOGENEOUS,
    LENGTHS,
    NAIVE,
    THRESHOLD_TOKENS,
)
from prfaas.spec import preset

T = THRESHOLD_TOKENS
ALL_REMOTE = 0
ALL_LOCAL = math.inf
PRFAAS_PD = CASE_STUDY


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
        {"num_prefill": math.inf},
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


def test_in_the_mean_form_the_best_threshold_need_not_be_a_crossing():
    """Half short, half very long: the mean of all is cheaper than half of the long ones."""
    lengths = EmpiricalLengths((100,) * 50 + (100_000,) * 50)
    square = PrefillProfile.sampled(lambda n: 1e-9 * n * n, range(10, 100_011, 10))
    deployment = attrs.evolve(PRFAAS_PD, remote_profile=square, local_profile=square)
    assert best_threshold(deployment, lengths).rates.offload_fraction == 1
    truth = best_threshold(deployment, lengths, RateForm.EXPECTATION)
    assert truth.rates.offload_fraction == 0.5


@pytest.mark.parametrize("distance", [1e-7, 1e-6, 1e-5])
def test_the_mean_of_a_tiny_share_stays_on_its_side_of_the_threshold(distance):
    loads = LoadCurves(LENGTHS, RateForm.MEAN)
    seen = []

    def function(num_tokens):
        seen.append(num_tokens)
        return 1.0

    high, low = 131_072 - distance, 128 + distance
    assert loads.above(function)(high) == LENGTHS.share_above(high)
    assert high <= seen.pop() <= 131_072
    assert loads.below(function)(low) == 1 - LENGTHS.share_above(low)
    assert 128 <= seen.pop() <= low


def test_a_narrow_peak_beside_a_plateau_almost_as_high_is_found():
    """Three local prefill instances are decode-bound at 1.786 over a wide range of t."""
    start = attrs.evolve(
        PRFAAS_PD,
        num_prfaas=3,
        num_prefill=3,
        num_decode=1,
        egress_bps=6.5e9,
        decode_step_s=0.025 * 0.4375,
    )
    split, point = best_split(start, LENGTHS)
    assert split.num_prefill == 2
    assert point.max_rate.requests_per_s == percent(1.8193, 0.01)


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


def test_a_cached_prefix_is_still_attended_over():
    profile = PrefillProfile(((0, 1.0), (100, 2.0), (200, 4.0)))
    assert profile.prefill_s(100, 0) == profile.prefill_s(100) == 2.0
    assert profile.prefill_s(100, 100) == 1.0 + 4.0 - 2.0
    assert profile.prefill_s(50, 100) == 1.0 + 3.0 - 2.0
    assert profile.prefill_s(0, 150) == 1.0
    below_zero = PrefillProfile(((100, 1.0), (200, 3.0)))  # its overhead would be negative
    assert below_zero.prefill_s(100, 100) == 0.0 + 3.0 - 1.0


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=6),
    st.floats(0, 500),
    st.floats(0, 500),
    st.floats(0, 50),
)
def test_a_convex_curve_is_monotone_in_new_and_cached_tokens(slopes, new, cached, more):
    knots, seconds = [(0, 0.5)], 0.5
    for i, slope in enumerate(sorted(slopes), 1):
        seconds += slope
        knots.append((100 * i, seconds))
    profile = PrefillProfile(tuple(knots))
    here = profile.prefill_s(new, cached)
    assert here >= 0.5 - 1e-9
    assert here >= profile.prefill_s(new) - 1e-9
    assert profile.prefill_s(new + more, cached) >= here - 1e-9
    assert profile.prefill_s(new, cached + more) >= here - 1e-9


@pytest.mark.parametrize("form", RateForm)
def test_fractions_of_an_instance_fill_both_prefill_and_decode(form):
    mean = form is RateForm.MEAN
    whole, at_whole = best_split(PRFAAS_PD, LENGTHS, form)
    assert whole.num_prefill == 3
    assert at_whole.max_rate.requests_per_s == percent(3.223 if mean else 3.174, 0.3)
    shared, point = best_split(PRFAAS_PD, LENGTHS, form, granularity=0.05)
    assert 3.65 <= shared.num_prefill <= 3.7
    assert shared.num_prefill + shared.num_decode == 8
    assert point.max_rate.requests_per_s == percent(3.380 if mean else 3.340, 0.3)
    twelve, point = best_split(HOMOGENEOUS, LENGTHS, form)
    assert (twelve.num_prefill, twelve.num_decode) == (9, 3)
    assert point.max_rate.requests_per_s == percent(2.110 if mean else 2.026, 0.3)
    _, point = best_split(HOMOGENEOUS, LENGTHS, form, granularity=0.05)
    assert point.max_rate.requests_per_s == percent(2.157 if mean else 2.094, 0.3)


def test_a_split_reads_as_whole_numbers_where_it_is_whole():
    split, _ = best_split(PRFAAS_PD, LENGTHS)
    assert (repr(split.num_prefill), repr(split.num_decode)) == ("3", "5")
    split, _ = best_split(PRFAAS_PD, LENGTHS, granularity=0.05)
    assert repr(split.num_prefill) == "3.65"


@pytest.mark.parametrize("granularity", [0, -1, math.inf, math.nan])
def test_a_granularity_is_checked(granularity):
    with pytest.raises(ConfigError, match="granularity"):
        best_split(PRFAAS_PD, LENGTHS, granularity=granularity)


@settings(max_examples=25)
@given(
    st.floats(0.1, 8),
    st.floats(0.05, 2),
    st.sampled_from([1, 3, 40]),
    st.sampled_from(RateForm),
)
def test_the_one_search_over_splits_against_every_split(gbps, step_scale, num_prfaas, form):
    start = attrs.evolve(
        PRFAAS_PD,
        num_prfaas=num_prfaas,
        num_prefill=2,
        num_decode=2,
        egress_bps=gbps * 1e9,
        decode_step_s=0.025 * step_scale,
    )
    every = [
        best_threshold(attrs.evolve(start, num_prefill=n, num_decode=4 - n), LENGTHS, form)
        for n in range(5)
    ]
    _, found = best_split(start, LENGTHS, form)
    best = max(point.max_rate.requests_per_s for point in every)
    assert found.max_rate.requests_per_s == percent(best, 0.001)


def test_a_quantile_inverts_the_share():
    for share in (0.001, 0.1, 0.5, 0.9, 0.999):
        assert 1 - LENGTHS.share_above(LENGTHS.quantile(share)) == pytest.approx(share, abs=1e-9)
    assert LENGTHS.quantile(0.5) == percent(19_199, 0.01)
    assert LENGTHS.quantile(0.9) == percent(62_410, 0.01)
    assert (LENGTHS.quantile(0), LENGTHS.quantile(1)) == (128, 131_072)
    far = LogNormalLengths(mu=9.9, sigma=0.1, min_tokens=10, max_tokens=1e9)
    assert (far.quantile(0), far.quantile(1)) == (10, 1e9)  # the plain law has no such quantiles
    assert far.quantile(1 - 2**-53) < 1e5


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40).map(tuple), st.floats(0, 1))
def test_an_observed_quantile_is_the_shortest_with_that_share_below(lengths, share):
    law = EmpiricalLengths(lengths)
    at = law.quantile(share)
    ordered = sorted(lengths)
    enough = [n for i, n in enumerate(ordered, 1) if i / len(lengths) >= share]
    assert at == enough[0]


def test_an_observed_quantile_is_not_pushed_up_by_rounding():
    law = EmpiricalLengths(tuple(range(1, 101)))
    assert law.quantile(0.07) == 7  # 0.07 * 100 is a little more than 7
    assert (law.quantile(0), law.quantile(0.9), law.quantile(1)) == (1, 90, 100)


@pytest.mark.parametrize("law", [LENGTHS, EmpiricalLengths((5, 6))])
@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_outside_0_to_1_has_no_quantile(law, share):
    with pytest.raises(ConfigError, match="from 0 to 1"):
        law.quantile(share)


@given(st.floats(100, 140_000))
def test_the_cumulative_part_agrees_with_the_conditional_mean(threshold):
    up_to = LENGTHS.cumulative(H200.prefill_s)
    below = LENGTHS.expect_below(H200.prefill_s, threshold) or 0.0
    share = 1 - LENGTHS.share_above(threshold)
    assert up_to(threshold) == pytest.approx(share * below, rel=1e-4, abs=1e-9)
    assert up_to(threshold) <= up_to(math.inf)


def test_a_median_in_tokens_is_not_its_logarithm():
    with pytest.raises(ConfigError, match="mu is the logarithm of the median"):
        LogNormalLengths(mu=27_000, sigma=1.0, min_tokens=128, max_tokens=131_072)


def test_the_cumulative_part_of_observed_lengths_counts_the_threshold_in():
    up_to = EmpiricalLengths((1, 2, 2, 5)).cumulative(lambda n: n * n)
    assert [up_to(t) for t in (0, 1, 1.5, 2, 5, math.inf)] == [0, 0.25, 0.25, 2.25, 8.5, 8.5]


def test_a_decode_step_within_the_slo():
    profile = DecodeProfile(base_s=0.010, per_request_s=0.00075)
    assert profile.step_s(20) == pytest.approx(0.025)
    assert profile.batch_within(0.025) == 20
    assert profile.batch_within(0.0249) == 19
    assert profile.batch_within(0.009) == 0
    assert DecodeProfile(base_s=0.1, per_request_s=0.1).batch_within(0.3) == 2  # 0.3 - 0.1 < 0.2
    constant = DecodeProfile.constant(0.025)
    assert (constant.step_s(1), constant.step_s(99)) == (0.025, 0.025)
    assert constant.batch_within(0.025) is None
    assert constant.batch_within(0.024) == 0


def test_a_mixed_node_pays_the_base_of_every_step():
    decode = DecodeProfile(base_s=0.010, per_request_s=0.00075)  # a = 0.4 of a step of 25 ms
    assert mixed_capacity(decode, 0.025, 0.0) == 1
    assert mixed_capacity(decode, 0.025, 0.3) == pytest.approx(0.5)  # X = 0.5 gains 0.5 * 0.6
    assert mixed_capacity(decode, 0.025, 0.6) == pytest.approx(0)
    assert mixed_capacity(decode, 0.025, 0.7) == 0
    # The same by counting: 0.3 of the step leaves 17.5 ms, of which 7.5 ms for requests.
    assert decode.batch_within(0.0175) == 10
    constant = DecodeProfile.constant(0.025)
    assert mixed_capacity(constant, 0.025, 0) == 1
    assert mixed_capacity(constant, 0.025, 0.01) == 0
    assert mixed_capacity(constant, 0.050, 0.25) == 1


@pytest.mark.parametrize(("step_s", "share"), [(0.009, 0.1), (0, 0.1), (0.025, -0.1), (0.025, 2)])
def test_a_mixed_node_is_checked(step_s, share):
    with pytest.raises(ConfigError):
        mixed_capacity(DecodeProfile(base_s=0.010, per_request_s=0.001), step_s, share)


def test_time_slicing_loses_half_a_batch_for_the_length_of_a_drain():
    drain_s = 1024 * 0.025
    loss = time_slicing_loss(period_s=600, drain_s=drain_s, num_nodes=8)
    assert loss == pytest.approx(25.6 / 2 / 4800)
    assert time_slicing_loss(period_s=60, drain_s=0, num_nodes=1) == 0


@pytest.mark.parametrize(
    "change", [{"drain_s": 61}, {"drain_s": -1}, {"num_nodes": 0}, {"period_s": math.inf}]
)
def test_time_slicing_is_checked(change):
    with pytest.raises(ConfigError):
        time_slicing_loss(**{"period_s": 60, "drain_s": 20, "num_nodes": 8} | change)
    with pytest.raises(ConfigError):
        time_slicing_loss(period_s=0, drain_s=0, num_nodes=1)


@pytest.mark.parametrize(
    "change", [{"base_s": 0}, {"base_s": math.nan}, {"per_request_s": -1}, {"base_s": math.inf}]
)
def test_a_decode_profile_is_checked_at_the_door(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        DecodeProfile(**{"base_s": 0.01, "per_request_s": 0.001} | change)
