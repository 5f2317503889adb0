"""Link-rate samples against links whose rate is known."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.seams.transport import Delivery
from prfaas.wire.busy import MAX_SAMPLES, SLICE_S, BusyMeter

KIB = 1024


class SimulatedLink:
    """Parallel connections that share a link fairly, chunk by chunk, over a fixed round trip.

    Each connection sends its chunks back to back; all of them progress at an equal share of the
    rate, so that acknowledgements come in clumps.
    """

    def __init__(
        self,
        *,
        rate: float,
        rtt_s: float,
        num_connections: int,
        chunk_bytes: int,
        jitter: float = 0,
    ) -> None:
        self.rate = rate
        self.rtt_s = rtt_s
        self.num_connections = num_connections
        self.chunk_bytes = chunk_bytes
        self.rng = random.Random(1)
        self.jitter = jitter
        self.now = 0.0

    def send(self, meter: BusyMeter, num_bytes: int) -> None:
        """Queues ``num_bytes`` and runs until all of them are acknowledged."""
        meter.queued(num_bytes, self.now)
        meter.check()
        acks: list[tuple[float, int]] = []
        lanes: list[tuple[float, int]] = []  # bytes left of the chunk, and its size
        unsent, elapsed_s = num_bytes, 0.0
        while unsent or lanes:
            while unsent and len(lanes) < self.num_connections:
                size = min(self.chunk_bytes, unsent)
                unsent -= size
                lanes.append((size, size))
            step = min(left for left, _ in lanes)
            elapsed_s += step * len(lanes) / self.rate
            for left, size in lanes:
                if left == step:
                    late_s = self.rtt_s + self.rng.random() * self.jitter
                    acks.append((self.now + elapsed_s + late_s, size))
            lanes = [(left - step, size) for left, size in lanes if left > step]
        for self.now, size in sorted(acks):
            meter.acknowledged(size, self.now)
            meter.check()


def rate_of(samples: tuple[Delivery, ...]) -> float:
    return sum(s.num_bytes for s in samples) / sum(s.end_s - s.start_s for s in samples)


@pytest.mark.parametrize("num_connections", [1, 4])
@pytest.mark.parametrize("chunk_bytes", [128 * KIB, 256 * KIB])
@pytest.mark.parametrize("rate_mbps", [50, 1_000, 10_000])
@pytest.mark.parametrize("rtt_s", [0.0002, 0.02])
def test_samples_of_a_known_link(
    num_connections: int, chunk_bytes: int, rate_mbps: int, rtt_s: float
) -> None:
    rate = rate_mbps * 1e6 / 8
    meter = BusyMeter(base_rtt_s=rtt_s)
    link = SimulatedLink(
        rate=rate, rtt_s=rtt_s, num_connections=num_connections, chunk_bytes=chunk_bytes
    )
    samples: tuple[Delivery, ...] = ()
    for seconds in (0.3, 1.1, 2.05):
        link.send(meter, round(rate * seconds))
        link.now += 0.5
        samples += meter.take()
    assert len(samples) >= 8
    assert rate_of(samples) == pytest.approx(rate, rel=0.05)


@given(
    st.integers(1, 8),
    st.floats(0.02, 3.0),
    st.sampled_from([0.0, 0.0005, 0.004]),
    st.sampled_from([0.0002, 0.005]),
)
def test_every_period_is_unbiased(
    num_connections: int, seconds: float, jitter: float, rtt_s: float
) -> None:
    rate = 1e9 / 8
    meter = BusyMeter(base_rtt_s=rtt_s)
    link = SimulatedLink(
        rate=rate,
        rtt_s=rtt_s,
        num_connections=num_connections,
        chunk_bytes=256 * KIB,
        jitter=jitter,
    )
    link.send(meter, round(rate * seconds))
    samples = meter.take()
    if seconds > 6 * rtt_s:
        assert sum(s.num_bytes for s in samples) == round(rate * seconds)
        lost_s = jitter + 0.001
        assert sum(s.end_s - s.start_s for s in samples) == pytest.approx(seconds, abs=lost_s)
        assert all(a.end_s == b.start_s for a, b in itertools.pairwise(samples))
    if seconds > 1:
        assert all(s.end_s - s.start_s < 2 * SLICE_S + 0.05 for s in samples)
        assert all(s.end_s - s.start_s >= SLICE_S / 2 for s in samples)


def test_a_handshake_that_took_too_long_is_corrected_by_the_first_answer() -> None:
    rate, rtt_s = 1e9 / 8, 0.001
    meter = BusyMeter(base_rtt_s=0.05)
    link = SimulatedLink(rate=rate, rtt_s=rtt_s, num_connections=4, chunk_bytes=128 * KIB)
    link.send(meter, 64)
    assert meter.base_rtt_s == pytest.approx(rtt_s, rel=0.01)
    assert meter.take() == ()
    link.send(meter, round(rate * 0.1))
    assert rate_of(meter.take()) == pytest.approx(rate, rel=0.05)


def test_bytes_that_set_the_round_trip_are_not_counted() -> None:
    meter = BusyMeter(base_rtt_s=1.0)
    meter.queued(300, 0.0)
    meter.acknowledged(100, 0.01)
    meter.acknowledged(200, 0.21)
    (sample,) = meter.take()
    assert (sample.num_bytes, sample.start_s, sample.end_s) == (200, 0.01, 0.21)


def test_short_periods_say_nothing() -> None:
    meter = BusyMeter(base_rtt_s=0.01)
    for start_s in range(20):
        meter.queued(1000, start_s)
        meter.acknowledged(1000, start_s + 0.01 + 0.049)
        meter.queued(0, start_s + 0.5)
        meter.acknowledged(0, start_s + 0.6)
        meter.check()
    assert meter.take() == ()
    meter.queued(1000, 30.0)
    meter.acknowledged(1000, 30.0 + 0.01 + 0.051)
    assert [s.num_bytes for s in meter.take()] == [1000]


def test_idle_time_never_counts() -> None:
    meter = BusyMeter(base_rtt_s=0.001)
    for start_s in (0.0, 100.0):
        meter.queued(2000, start_s)
        meter.acknowledged(1000, start_s + 0.051)
        meter.acknowledged(1000, start_s + 0.101)
    assert [s.end_s - s.start_s for s in meter.take()] == [pytest.approx(0.1)] * 2


def test_bytes_queued_while_busy_extend_the_period() -> None:
    meter = BusyMeter(base_rtt_s=0.001)
    meter.queued(1000, 0.0)
    meter.queued(1000, 0.04)
    meter.acknowledged(1000, 0.051)
    assert meter.take() == ()
    meter.acknowledged(1000, 0.101)
    (sample,) = meter.take()
    assert (sample.num_bytes, sample.start_s, sample.end_s) == (2000, 0.001, 0.101)


def test_slices_of_a_long_link_span_several_round_trips() -> None:
    meter = BusyMeter(base_rtt_s=0.2)
    meter.queued(10_000, 0.0)
    for step in range(1, 101):
        meter.acknowledged(100, 0.2 + step * 0.1)
    samples = meter.take()
    assert sum(sample.num_bytes for sample in samples) == 10_000
    assert all(sample.end_s - sample.start_s > 0.9 for sample in samples)


def test_dropped_bytes_end_a_period_without_being_delivered() -> None:
    meter = BusyMeter(base_rtt_s=0.001)
    meter.queued(3000, 0.0)
    meter.acknowledged(1000, 0.101)
    meter.dropped(0)
    assert meter.outstanding_bytes == 2000
    meter.dropped(2000)
    meter.check()
    (sample,) = meter.take()
    assert (sample.num_bytes, sample.end_s) == (1000, 0.101)
    meter.queued(1000, 5.0)
    meter.dropped(1000)
    meter.check()
    assert meter.take() == ()


def test_samples_nobody_takes_are_bounded() -> None:
    meter = BusyMeter(base_rtt_s=0.001)
    for start_s in range(MAX_SAMPLES + 10):
        meter.queued(1, start_s)
        meter.acknowledged(1, start_s + 0.1)
    samples = meter.take()
    assert len(samples) == MAX_SAMPLES
    assert samples[-1].end_s == MAX_SAMPLES + 9 + 0.1


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from("qad"), st.integers(0, 500), st.floats(0, 1)), max_size=60)
)
def test_any_history_keeps_the_invariants(history: list[tuple[str, int, float]]) -> None:
    meter, now, acknowledged = BusyMeter(base_rtt_s=0.01), 0.0, 0
    for what, num_bytes, wait_s in history:
        now += wait_s
        if what == "q":
            meter.queued(num_bytes, now)
            continue
        num_bytes = min(num_bytes, meter.outstanding_bytes)
        if what == "a":
            meter.acknowledged(num_bytes, now)
            acknowledged += num_bytes
        else:
            meter.dropped(num_bytes)
        meter.check()
    samples = meter.take()
    assert sum(s.num_bytes for s in samples) <= acknowledged
    assert all(s.start_s < s.end_s and s.num_bytes > 0 for s in samples)
    assert "outstanding" in repr(meter)
