from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from prfaas.errors import ConfigError
from prfaas.policy import LinkEstimator
from prfaas.seams import Delivery

MBIT = 1_000_000
Rate = Callable[[float], float]


def simulate(
    rate: Rate, *, num_senders: int, until_s: float, rng: Random, step_s: float = 0.001
) -> list[Delivery]:
    """Senders that come and go and share a link equally; each reports what it got, in pieces."""
    deliveries: list[Delivery] = []
    open_since: list[float | None] = [None] * num_senders
    got = [0.0] * num_senders
    busy_until = [rng.uniform(0, 0.1) for _ in range(num_senders)]
    idle_until = [0.0] * num_senders

    def report(sender: int, now: float) -> None:
        start = open_since[sender]
        if start is not None and got[sender] >= 1:
            deliveries.append(Delivery(num_bytes=int(got[sender]), start_s=start, end_s=now))
            got[sender] -= int(got[sender])
        open_since[sender] = now

    for step in range(int(until_s / step_s)):
        now = step * step_s
        for sender in range(num_senders):
            if open_since[sender] is None and now >= idle_until[sender]:
                open_since[sender], got[sender] = now, 0.0
                busy_until[sender] = now + rng.expovariate(1 / 0.4)
            elif open_since[sender] is not None and now >= busy_until[sender]:
                report(sender, now)
                open_since[sender] = None
                idle_until[sender] = now + rng.expovariate(1 / 0.3)
            elif open_since[sender] is not None and rng.random() < 0.05:
                report(sender, now)
        active = [sender for sender in range(num_senders) if open_since[sender] is not None]
        for sender in active:
            got[sender] += rate(now) / 8 * step_s / len(active)
    return deliveries


def feed(estimator: LinkEstimator, deliveries: list[Delivery]) -> float:
    for delivery in deliveries:
        estimator.observe(delivery)
    estimator.check()
    return max(delivery.end_s for delivery in deliveries)


@pytest.mark.parametrize("num_senders", [1, 2, 5, 12])
@pytest.mark.parametrize("mbit", [20, 200, 10_000])
def test_parallel_senders_add_up_to_the_rate_of_the_link(num_senders: int, mbit: int) -> None:
    deliveries = simulate(
        lambda _: mbit * MBIT, num_senders=num_senders, until_s=6, rng=Random(num_senders)
    )
    estimator = LinkEstimator()
    now = feed(estimator, deliveries)
    assert estimator.rate_bps(now) == pytest.approx(mbit * MBIT, rel=0.05)


def test_a_halved_link_is_followed_within_the_window() -> None:
    def rate(now: float) -> float:
        return (200 if now < 5 else 100) * MBIT

    deliveries = simulate(rate, num_senders=4, until_s=10, rng=Random(1))
    estimator = LinkEstimator(window_s=2.0)
    feed(estimator, [d for d in deliveries if d.end_s <= 5])
    assert estimator.rate_bps(5) == pytest.approx(200 * MBIT, rel=0.05)
    feed(estimator, [d for d in deliveries if 5 < d.end_s <= 6])
    assert 105 * MBIT < (estimator.rate_bps(6) or 0) < 190 * MBIT
    # Four senders are together busy nearly all the time: 2.5 s hold 2 s of busy time.
    feed(estimator, [d for d in deliveries if 6 < d.end_s <= 7.5])
    assert estimator.rate_bps(7.5) == pytest.approx(100 * MBIT, rel=0.05)


def test_idle_time_does_not_count() -> None:
    estimator = LinkEstimator()
    for second in range(10):
        estimator.observe(
            Delivery(num_bytes=100_000, start_s=second * 5.0, end_s=second * 5 + 0.01)
        )
    assert estimator.rate_bps(50.0) == pytest.approx(80 * MBIT, rel=1e-3)


def test_the_same_time_counts_once() -> None:
    estimator = LinkEstimator()
    for start, end in ((0.0, 1.0), (0.0, 1.0), (0.5, 1.0), (0.2, 0.4)):
        estimator.observe(Delivery(num_bytes=1_000_000, start_s=start, end_s=end))
    estimator.check()
    assert estimator.rate_bps(1.0) == pytest.approx(32 * MBIT)


def test_order_does_not_matter() -> None:
    deliveries = simulate(lambda _: 50 * MBIT, num_senders=3, until_s=3, rng=Random(7))
    in_order, shuffled = LinkEstimator(), LinkEstimator()
    feed(in_order, deliveries)
    Random(3).shuffle(deliveries)
    feed(shuffled, deliveries)
    assert shuffled.rate_bps(3.0) == pytest.approx(in_order.rate_bps(3.0), rel=1e-6)


def test_one_long_delivery_weighs_only_with_its_newest_part() -> None:
    estimator = LinkEstimator(window_s=1.0)
    estimator.observe(Delivery(num_bytes=100_000_000, start_s=0.0, end_s=100.0))
    estimator.observe(Delivery(num_bytes=4_000_000, start_s=100.0, end_s=101.0))
    estimator.check()
    assert estimator.rate_bps(101.0) == pytest.approx(32 * MBIT, rel=0.05)


def test_a_long_delivery_that_comes_late_takes_no_more_room() -> None:
    estimator = LinkEstimator(window_s=1.0, max_age_s=10.0)
    estimator.observe(Delivery(num_bytes=1_000_000, start_s=99.0, end_s=100.0))
    estimator.observe(Delivery(num_bytes=99_000_000, start_s=0.0, end_s=99.0))
    estimator.check()
    assert estimator.rate_bps(100.0) == pytest.approx(8 * MBIT)


def test_nothing_is_estimated_from_too_little() -> None:
    estimator = LinkEstimator(min_bytes=1000, min_busy_s=0.1)
    assert estimator.rate_bps(0.0) is None
    estimator.observe(Delivery(num_bytes=999, start_s=0.0, end_s=0.2))
    assert estimator.rate_bps(0.2) is None
    estimator.observe(Delivery(num_bytes=1, start_s=0.0, end_s=0.2))
    assert estimator.rate_bps(0.2) == pytest.approx(8 * 1000 / 0.2)
    brief = LinkEstimator(min_bytes=1, min_busy_s=0.1)
    brief.observe(Delivery(num_bytes=10**9, start_s=0.0, end_s=0.0999))
    assert brief.rate_bps(0.1) is None


@pytest.mark.parametrize(
    ("num_bytes", "start_s", "end_s"),
    [
        (10**9, 1.0, 1.0),
        (10**9, 2.0, 1.0),
        (0, 0.0, 1.0),
        (-5, 0.0, 1.0),
        (10**9, math.nan, 1.0),
        (10**9, 0.0, math.nan),
        (10**9, 0.0, math.inf),
        (10**9, -math.inf, 1.0),
        (10**9, math.inf, math.inf),
        (10**9, 0.0, 1e300),
        (10**9, -1e300, 1.0),
        (math.nan, 0.0, 1.0),
    ],
)
def test_a_delivery_that_measures_nothing_is_counted_and_ignored(
    num_bytes: int, start_s: float, end_s: float
) -> None:
    estimator = LinkEstimator()
    estimator.observe(Delivery(num_bytes=1_000_000, start_s=0.0, end_s=1.0))
    estimator.observe(Delivery(num_bytes=num_bytes, start_s=start_s, end_s=end_s))
    estimator.check()
    assert estimator.num_refused == 1
    assert estimator.rate_bps(1.0) == pytest.approx(8 * MBIT)


def test_old_deliveries_and_long_silence_end_the_estimate() -> None:
    estimator = LinkEstimator(max_age_s=10.0)
    estimator.observe(Delivery(num_bytes=1_000_000, start_s=0.0, end_s=1.0))
    assert estimator.rate_bps(11.0) == pytest.approx(8 * MBIT)
    assert estimator.rate_bps(11.01) is None
    estimator.observe(Delivery(num_bytes=4_000_000, start_s=19.5, end_s=20.0))
    assert estimator.rate_bps(20.0) == pytest.approx(64 * MBIT)
    estimator.observe(Delivery(num_bytes=10**9, start_s=8.0, end_s=9.9))
    assert estimator.rate_bps(20.0) == pytest.approx(64 * MBIT)
    assert "64000000" in repr(estimator)


def test_memory_is_bounded_by_time_not_by_deliveries() -> None:
    estimator = LinkEstimator(window_s=1.0, max_age_s=4.0)
    times = [i / 500 for i in range(10_000)]
    for start, end in pairwise(times):
        estimator.observe(Delivery(num_bytes=10_000, start_s=start, end_s=end))
    estimator.check()
    assert estimator.rate_bps(20.0) == pytest.approx(40 * MBIT, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"window_s": 0.0},
        {"window_s": 5.0, "max_age_s": 4.0},
        {"max_age_s": math.inf},
        {"window_s": math.nan},
        {"min_bytes": 0},
        {"min_busy_s": 0.0},
        {"min_busy_s": 3.0},
    ],
)
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="|".join(options)):
        LinkEstimator(**options)  # type: ignore[arg-type]
