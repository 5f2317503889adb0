"""Arrival processes: their laws, their ends, and what reshaping keeps."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.capacity import EmpiricalLengths, LogNormalLengths
from prfaas.core import BlockHash, RequestId
from prfaas.errors import ConfigError
from prfaas.workload import (
    Arrival,
    Phase,
    SessionShape,
    at_rate,
    bursty,
    diurnal,
    mean_rate_rps,
    phases,
    poisson,
    repeated,
    sessions,
)

LENGTHS = LogNormalLengths(mu=9.9, sigma=1.0, min_tokens=128, max_tokens=131_072)
TALK = SessionShape(
    user_tokens=EmpiricalLengths((10, 100, 300)), output_tokens=40, system_tokens=200
)


def arrival(
    number: int, at_s: float, *, tokens: int = 10, hashes: tuple[bytes, ...] = ()
) -> Arrival:
    return Arrival(
        request_id=RequestId(str(number)),
        arrived_s=at_s,
        num_tokens=tokens,
        output_tokens=1,
        granule_hashes=tuple(BlockHash(value) for value in hashes),
    )


PROCESSES: dict[str, Callable[..., Iterator[Arrival]]] = {
    "poisson": partial(poisson, 2.0, LENGTHS, 8),
    "bursty": partial(bursty, 2.0, LENGTHS, 8, burstiness=3.0, mean_burst_s=5.0),
    "diurnal": partial(diurnal, 2.0, LENGTHS, 8, period_s=100.0, rate_swing=0.8, length_swing=-0.5),
    "sessions": partial(sessions, 2.0, TALK),
}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"arrived_s": -0.1}, "comes at -0.1 s"),
        ({"arrived_s": math.nan}, "comes at nan s"),
        ({"arrived_s": math.inf}, "comes at inf s"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"num_tokens": 1.5}, "num_tokens=1.5"),
        ({"output_tokens": 0}, "output_tokens=0"),
        ({"output_tokens": 2.0}, "output_tokens=2.0"),
        ({"granule_hashes": (b"1", b"2"), "num_tokens": 1}, "2 granule_hashes for 1 tokens"),
    ],
)
def test_an_arrival_refuses_what_cannot_be(changed: dict[str, object], text: str) -> None:
    values = {"request_id": "r", "arrived_s": 0.0, "num_tokens": 4, "output_tokens": 1}
    Arrival(**values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=text):
        Arrival(**{**values, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_every_process_repeats_itself_is_in_order_and_ends(
    process: Callable[..., Iterator[Arrival]],
) -> None:
    first = list(process(Random(5), num_requests=200))
    assert first == list(process(Random(5), num_requests=200))
    assert first != list(process(Random(6), num_requests=200))
    assert len(first) == 200
    assert len({a.request_id for a in first}) == 200
    assert all(a.arrived_s <= b.arrived_s for a, b in pairwise(first))
    timed = list(process(Random(5), duration_s=20.0, start_s=1000.0))
    assert timed
    assert all(1000.0 <= a.arrived_s < 1020.0 for a in timed)
    both = list(process(Random(5), duration_s=20.0, num_requests=3))
    assert len(both) == 3
    assert list(process(Random(5), num_requests=0)) == []
    with pytest.raises(ConfigError, match="no end"):
        process(Random(5))
    with pytest.raises(ConfigError, match="num_requests is -1"):
        process(Random(5), num_requests=-1)
    with pytest.raises(ConfigError, match="duration_s is 0"):
        process(Random(5), duration_s=0)
    with pytest.raises(ConfigError, match="start_s is -1"):
        process(Random(5), num_requests=1, start_s=-1)


def test_poisson_gaps_are_exponential_and_lengths_follow_their_law() -> None:
    drawn = list(poisson(4.0, LENGTHS, EmpiricalLengths((3, 5)), Random(1), num_requests=8000))
    gaps = [b.arrived_s - a.arrived_s for a, b in pairwise(drawn)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.05)
    lengths = [a.num_tokens for a in drawn]
    mean = LENGTHS.expect_above(lambda n: n, 0.0)
    assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.03)
    assert 128 <= min(lengths) <= max(lengths) <= 131_072
    assert {a.output_tokens for a in drawn} == {3, 5}


def test_a_length_below_half_a_token_is_drawn_as_one() -> None:
    tiny = LogNormalLengths(mu=0.0, sigma=1.0, min_tokens=0.01, max_tokens=0.4)
    assert [a.num_tokens for a in poisson(1.0, tiny, 1, Random(1), num_requests=3)] == [1, 1, 1]


def test_bursty_has_the_mean_rate_and_the_dispersion_that_it_states() -> None:
    rate, burstiness, burst_s, window_s, num_windows = 2.0, 4.0, 2.0, 100.0, 1500
    counts = Counter(
        int(a.arrived_s // window_s)
        for a in bursty(
            rate,
            1,
            1,
            Random(2),
            burstiness=burstiness,
            mean_burst_s=burst_s,
            duration_s=window_s * num_windows,
        )
    )
    per_window = [counts[i] for i in range(num_windows)]
    mean = statistics.fmean(per_window)
    assert mean == pytest.approx(rate * window_s, rel=0.03)
    stated = 1 + 2 * burst_s * rate * (burstiness - 1) ** 2 / burstiness
    assert statistics.pvariance(per_window) / mean == pytest.approx(stated, rel=0.1)


def test_bursty_starts_in_its_steady_state() -> None:
    """Over many runs the first second has the mean rate, not that of a burst or of a silence."""
    rng = Random(1)
    counts = [
        len(list(bursty(3.0, 1, 1, rng, burstiness=5, mean_burst_s=50, duration_s=1)))
        for _ in range(4000)
    ]
    assert statistics.fmean(counts) == pytest.approx(3.0, rel=0.1)


def test_burstiness_1_is_poisson() -> None:
    drawn = bursty(4.0, 1, 1, Random(3), burstiness=1, mean_burst_s=2, num_requests=5000)
    gaps = [b.arrived_s - a.arrived_s for a, b in pairwise(drawn)]
    assert statistics.pstdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.05)


def test_phases_follow_each_other_with_pauses() -> None:
    parts = [
        Phase(duration_s=100, rate_rps=5, lengths=10, output_tokens=1),
        Phase(duration_s=50, rate_rps=0, lengths=20, output_tokens=1),
        Phase(duration_s=100, rate_rps=1, lengths=30, output_tokens=2),
    ]
    drawn = list(phases(parts, Random(4), start_s=7.0))
    assert [a.request_id for a in drawn] == [str(i) for i in range(len(drawn))]
    first = [a for a in drawn if a.arrived_s < 107]
    last = [a for a in drawn if a.arrived_s >= 157]
    assert len(first) + len(last) == len(drawn)
    assert {a.num_tokens for a in first} == {10}
    assert {(a.num_tokens, a.output_tokens) for a in last} == {(30, 2)}
    assert len(first) == pytest.approx(500, rel=0.15)
    assert len(last) == pytest.approx(100, rel=0.3)


def test_diurnal_rate_and_length_swing_together() -> None:
    drawn = list(
        diurnal(
            5.0,
            1000,
            1,
            Random(5),
            period_s=100.0,
            rate_swing=1.0,
            length_swing=0.5,
            duration_s=1000.0,
        )
    )
    assert len(drawn) == pytest.approx(5000, rel=0.05)

    def near(phase_s: float) -> list[Arrival]:
        return [a for a in drawn if abs(a.arrived_s % 100 - phase_s) < 5]

    assert len(near(25)) == pytest.approx(2 * 5 * 10 * 10, rel=0.1)
    assert len(near(75)) < 20
    assert statistics.fmean(a.num_tokens for a in near(25)) == pytest.approx(1500, rel=0.02)
    assert all(500 <= a.num_tokens <= 1500 for a in drawn)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(poisson, 0, 1, 1), "rate_rps is 0"),
        (partial(poisson, math.inf, 1, 1), "rate_rps is inf"),
        (partial(bursty, 1, 1, 1, burstiness=0.5, mean_burst_s=1), "burstiness is 0.5"),
        (partial(bursty, 1, 1, 1, burstiness=2, mean_burst_s=0), "mean_burst_s is 0"),
        (partial(diurnal, 1, 1, 1, period_s=0), "period_s is 0"),
        (partial(diurnal, 1, 1, 1, period_s=9, rate_swing=1.1), "rate_swing is 1.1"),
        (partial(diurnal, 1, 1, 1, period_s=9, length_swing=-1), "length_swing is -1"),
        (partial(sessions, -1, TALK), "rate_rps is -1"),
    ],
)
def test_processes_refuse_bad_numbers_at_the_call(
    make: Callable[..., Iterator[Arrival]], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        make(Random(0), num_requests=1)


def test_phases_and_session_shapes_refuse_bad_numbers() -> None:
    with pytest.raises(ConfigError, match="duration_s is 0"):
        Phase(duration_s=0, rate_rps=1, lengths=1, output_tokens=1)
    with pytest.raises(ConfigError, match="rate_rps is -1"):
        Phase(duration_s=1, rate_rps=-1, lengths=1, output_tokens=1)
    for changed, text in (
        ({"mean_turns": 0.5}, "mean_turns is 0.5"),
        ({"mean_gap_s": 0}, "mean_gap_s is 0"),
        ({"num_system_prompts": 0}, "num_system_prompts is 0"),
        ({"granule_tokens": 0}, "granule_tokens is 0"),
        ({"system_tokens": -1}, "system_tokens is -1"),
        ({"user_tokens": 0}, "user_tokens is 0"),
        ({"max_tokens": 1025}, "max_tokens is 1025; it must be at least 1029"),
    ):
        values: dict[str, object] = {"user_tokens": 5, "output_tokens": 5, **changed}
        with pytest.raises(ConfigError, match=text):
            SessionShape(**values)  # type: ignore[arg-type]


def test_at_rate_scales_the_gaps_only() -> None:
    kept = [arrival(0, 5.0), arrival(1, 6.0), arrival(2, 9.0, tokens=7)]
    assert mean_rate_rps(kept) == pytest.approx(0.5)
    scaled = list(at_rate(iter(kept), 1.0))
    assert [a.arrived_s for a in scaled] == [5.0, 5.5, 7.0]
    assert mean_rate_rps(scaled) == pytest.approx(1.0)
    assert [(a.request_id, a.num_tokens) for a in scaled] == [("0", 10), ("1", 10), ("2", 7)]
    for few in ([], kept[:1], [kept[0], kept[0]], list(reversed(kept))):
        with pytest.raises(ConfigError, match="have no rate"):
            at_rate(few, 1.0)
    with pytest.raises(ConfigError, match="rate_rps is 0"):
        at_rate(kept, 0)


@given(times=st.integers(1, 4), keys=st.lists(st.integers(0, 3), min_size=2, max_size=6))
def test_repetitions_share_prefixes_within_and_never_across(times: int, keys: list[int]) -> None:
    kept = [arrival(i, float(i), hashes=(key.to_bytes(16, "big"),)) for i, key in enumerate(keys)]
    played = list(repeated(iter(kept), times))
    assert played[: len(kept)] == kept
    assert len(played) == times * len(kept) == len({a.request_id for a in played})
    assert [a.arrived_s for a in played] == pytest.approx([float(i) for i in range(len(played))])
    per_time = [
        [a.granule_hashes[0] for a in played[i : i + len(kept)]]
        for i in range(0, len(played), len(kept))
    ]
    for one in per_time:
        assert [one.index(value) for value in one] == [keys.index(key) for key in keys]
        assert all(len(value) == 16 for value in one)
    assert len(set().union(*per_time)) == times * len(set(keys))


def test_repeated_needs_a_count_and_a_rate() -> None:
    with pytest.raises(ConfigError, match="times is 0"):
        repeated([arrival(0, 0.0)], 0)
    assert list(repeated([arrival(0, 0.0)], 1)) == [arrival(0, 0.0)]
    with pytest.raises(ConfigError, match="have no rate"):
        repeated([arrival(0, 0.0)], 2)


def test_a_conversation_grows_by_question_and_answer() -> None:
    shape = SessionShape(
        user_tokens=100, output_tokens=28, mean_turns=4, system_tokens=200, mean_gap_s=10
    )
    talks: dict[str, list[Arrival]] = {}
    for turn in sessions(1.0, shape, Random(6), num_requests=4000):
        talks.setdefault(turn.request_id.split(".")[0], []).append(turn)
    for turns in talks.values():
        assert [a.num_tokens for a in turns] == [300 + 128 * i for i in range(len(turns))]
        assert all(len(a.granule_hashes) == a.num_tokens // 64 for a in turns)
        for earlier, later in pairwise(turns):
            kept = len(earlier.granule_hashes)
            assert later.granule_hashes[:kept] == earlier.granule_hashes
            assert earlier.arrived_s < later.arrived_s
    whole = list(talks.values())[:800]  # those that the end did not cut
    assert statistics.fmean(len(turns) for turns in whole) == pytest.approx(4, rel=0.1)
    gaps = [b.arrived_s - a.arrived_s for turns in whole for a, b in pairwise(turns)]
    assert statistics.fmean(gaps) == pytest.approx(10, rel=0.1)


def test_sessions_share_the_system_prompt_and_nothing_else() -> None:
    shape = SessionShape(user_tokens=100, output_tokens=10, system_tokens=200, num_system_prompts=2)
    firsts = [
        a for a in sessions(1.0, shape, Random(7), num_requests=300) if a.request_id.endswith(".0")
    ]
    systems = {a.granule_hashes[:3] for a in firsts}  # 200 tokens are 3 granules and a bit
    assert len(systems) == 2
    assert len({key for system in systems for key in system}) == 6
    assert len({a.granule_hashes[3] for a in firsts}) == len(firsts)
    other = next(sessions(1.0, shape, Random(8), num_requests=1))
    assert other.granule_hashes[:3] not in systems


def test_a_session_ends_before_a_prompt_that_is_too_long() -> None:
    shape = SessionShape(
        user_tokens=EmpiricalLengths((100, 900)),
        output_tokens=10,
        mean_turns=1000,
        system_tokens=0,
        max_tokens=500,
    )
    turns = list(islice(sessions(1.0, shape, Random(9), duration_s=300.0), 200))
    assert turns
    assert max(a.num_tokens for a in turns) <= 500
    assert any(a.num_tokens > 200 for a in turns)
