"""The meter of offered bytes, the steady clock, the watch on the link, and the probe's budget."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.policy.egress import EgressMeter, SteadyClock
from prfaas.policy.link_watch import LinkWatch
from prfaas.policy.probe import Probe

GBPS = 1e9


def test_a_steady_flow_reads_as_its_rate() -> None:
    meter = EgressMeter(tau_s=2.0)
    for step in range(3000):
        meter.observe(1_250_000, step * 0.01)
    assert meter.rate_bps(29.99) == pytest.approx(1 * GBPS, rel=0.01)


def test_a_burst_is_spread_and_silence_forgets_it() -> None:
    meter = EgressMeter(tau_s=5.0)
    assert meter.rate_bps(0.0) == 0.0
    meter.observe(10**9, 100.0)
    assert meter.rate_bps(100.0) == pytest.approx(8e9 / 5)
    assert meter.rate_bps(105.0) == pytest.approx(8e9 / 5 / math.e)
    assert meter.rate_bps(90.0) == meter.rate_bps(100.0)
    assert meter.rate_bps(1e9) == 0.0


@given(
    reports=st.lists(st.tuples(st.integers(0, 10**10), st.floats(0, 60)), min_size=1, max_size=20),
    data=st.data(),
)
def test_the_order_of_reports_does_not_matter(
    reports: list[tuple[int, float]], data: st.DataObject
) -> None:
    one, two = EgressMeter(), EgressMeter()
    for num_bytes, now in reports:
        one.observe(num_bytes, now)
    for num_bytes, now in data.draw(st.permutations(reports)):
        two.observe(num_bytes, now)
    expected = sum(8 * n * math.exp(-(60 - now) / 5) / 5 for n, now in reports)
    assert one.rate_bps(60.0) == pytest.approx(expected, rel=1e-9)
    assert two.rate_bps(60.0) == pytest.approx(expected, rel=1e-9)


def test_a_clock_that_starts_again_starts_the_meter_again() -> None:
    meter = EgressMeter(tau_s=1.0)
    meter.observe(10**9, 1e6)
    meter.observe(1000, 5.0)
    assert meter.rate_bps(5.0) == 8000.0


@pytest.mark.parametrize("bad", [-1, 1.5, True, None, 2**63 + 1, math.nan])
def test_offers_are_whole_numbers(bad: object) -> None:
    with pytest.raises(ConfigError, match="num_bytes is"):
        EgressMeter().observe(bad, 0.0)  # type: ignore[arg-type]


def test_the_meters_times_are_finite() -> None:
    with pytest.raises(ConfigError, match="now is"):
        EgressMeter().observe(1, math.nan)
    for tau_s in (0.0, math.inf):
        with pytest.raises(ConfigError, match="tau_s is"):
            EgressMeter(tau_s=tau_s)


def test_the_steady_clock_never_goes_back_and_never_stops_for_long() -> None:
    clock = SteadyClock(slack_s=1.0)
    assert clock.read(math.nan) == 0.0
    assert [clock.advance(now) for now in (10.0, 9.5, 10.0, 12.0)] == [10.0, 10.0, 10.0, 12.0]
    assert [clock.advance(now) for now in (3.0, 3.5, 5.0)] == [12.0, 12.5, 14.0]
    assert clock.read(6.0) == 15.0
    assert clock.advance(math.nan) == clock.advance(-math.inf) == clock.advance(5.0) == 14.0


def watch(rate_bps: float | None = 10 * GBPS) -> LinkWatch:
    return LinkWatch(rate_bps=rate_bps, link_change=0.2, down_after_s=20.0)


def test_a_rate_falls_at_once_and_rises_after_three_ticks() -> None:
    link = watch()
    assert not link.see(10 * GBPS, 0, 0.0)
    link.tick()
    assert link.see(7 * GBPS, 0, 1.0)
    assert link.rate_bps == 7 * GBPS
    assert not link.see(7 * GBPS, 0, 1.1)
    seen = []
    for second in range(2, 6):
        assert not link.see(10 * GBPS, 0, float(second))
        link.tick()
        seen.append(link.rate_bps)
    assert seen == [7 * GBPS, 7 * GBPS, 10 * GBPS, 10 * GBPS]


def test_noise_is_averaged() -> None:
    link = watch(None)
    for second in range(40):
        link.see((9 if second % 2 else 11) * GBPS, 0, float(second))
        link.tick()
    assert link.rate_bps == pytest.approx(10 * GBPS, rel=0.03)
    link.check()


def test_without_a_rate_nothing_is_known() -> None:
    link = watch(None)
    for rate in (None, 0.0, -1.0, math.nan, math.inf):
        assert not link.see(rate, 10, 0.0)
        link.tick()
    assert link.rate_bps is None
    assert link.utilisation(0.0) is None
    assert link.backlog_s == 0.0
    assert link.num_samples == 0


def test_utilisation_is_offered_over_the_rate() -> None:
    link = watch()
    for step in range(1000):
        link.offer(625_000_000, step * 1.0)
    assert link.utilisation(999.0) == pytest.approx(0.5, rel=0.12)


def test_what_leaves_the_backlog_was_delivered() -> None:
    link = watch()
    backlog = 0
    for second in range(100):
        link.offer(1_000_000_000, float(second))
        backlog += 600_000_000  # 400 MB land every second
        link.see(10 * GBPS, backlog, second + 0.5)
    assert link.delivered_bps(99.5) == pytest.approx(3.2 * GBPS, rel=0.12)
    assert link.backlog_s == pytest.approx(48.0)


def test_a_backlog_that_does_not_shrink_means_down() -> None:
    link = watch()
    link.see(10 * GBPS, 0, 0.0)
    link.see(10 * GBPS, 5000, 10.0)
    link.see(10 * GBPS, 9000, 29.9)
    assert not link.is_down(29.9)
    assert link.is_down(30.0)
    link.see(10 * GBPS, 8000, 29.95)
    assert not link.is_down(49.9), "it shrank"
    link.see(10 * GBPS, 8000, 50.0)
    link.see(10 * GBPS, 7000, 51.0)
    assert link.is_down(51.0), "only a sample ends it: requests that were given up shrink it too"
    link.see(9 * GBPS, 7000, 52.0)
    assert not link.is_down(52.0)
    assert link.is_down(72.0)


def test_offers_without_a_rate_mean_down_unless_they_are_too_few_to_measure() -> None:
    link = watch()
    link.see(10 * GBPS, 0, 0.0)
    for second in range(1, 31):
        link.offer(500_000_000, float(second))
        link.see(None, 0, float(second))
        assert link.is_down(float(second)) == (second >= 21)
    few = watch()
    few.see(10 * GBPS, 0, 0.0)
    for second in range(1, 100):
        few.offer(10_000, float(second))
        few.see(None, 0, float(second))
        assert not few.is_down(float(second))


def test_offers_that_landed_do_not_wait() -> None:
    link = watch()
    for second in range(100):
        link.offer(500_000_000, float(second))
        link.see(10 * GBPS, 0, float(second))
        assert not link.is_down(float(second))


def test_silence_ends_with_a_sample_or_an_offer() -> None:
    link = watch()
    assert link.silence_s(5.0) == 0.0
    link.see(None, 0, 0.0)
    assert link.silence_s(5.0) == 5.0
    link.see(1 * GBPS, 0, 6.0)
    link.see(1 * GBPS, 0, 8.0)
    assert link.silence_s(9.0) == 3.0, "the same estimate again is no sample"
    link.offer(1, 10.0)
    assert link.silence_s(10.0) == 0.0


def test_a_probes_budget_is_bounded_in_requests_bytes_and_time() -> None:
    probe = Probe(after_s=10.0, num_requests=2, num_bytes=100)
    assert not probe.is_open(0.0)
    assert probe.is_due(10.0, 0.0)
    assert not probe.is_due(9.0, 0.0)
    probe.start(0.0)
    assert not probe.is_due(10.0, 0.0)
    probe.spend(10)
    assert probe.is_open(1.0)
    probe.spend(10)
    assert not probe.is_open(1.0)
    assert not probe.is_due(math.inf, 19.9), "one after the other"
    assert probe.is_due(math.inf, 20.0)
    probe.start(20.0)
    probe.spend(1000)
    assert not probe.is_open(20.0)
    probe.start(40.0)
    assert probe.is_open(49.9)
    assert not probe.is_open(50.0)
    probe.start(60.0)
    probe.stop(61.0)
    assert not probe.is_open(61.0)
    assert probe.is_due(math.inf, 71.0)
    probe.check()
