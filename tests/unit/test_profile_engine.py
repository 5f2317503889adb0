"""The engine that computes nothing and takes as long as a profile says."""

from __future__ import annotations

import pytest

from prfaas.core import RequestId
from prfaas.errors import ConfigError, LocalProtocolError
from prfaas.testing import ProfileEngine
from prfaas.testing.engine import toy_spec

A, B = RequestId("a"), RequestId("b")


class Clock:
    """Time that passes only while somebody sleeps, or when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_sleeps = 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.num_sleeps += 1


def engine(clock: Clock, **options: float) -> ProfileEngine:
    return ProfileEngine(
        toy_spec(),
        prefill_s=lambda new, cached: 1.0 + new * 0.01 + new * cached * 1e-4,
        decode_s=0.5,
        segment_tokens=100,
        clock=clock,
        sleep=clock.sleep,
        **options,
    )


def test_the_segments_of_a_prompt_take_its_whole_time() -> None:
    clock = Clock()
    model = engine(clock)
    model.open(A)
    ready: list[tuple[int, float]] = []
    model.prefill(A, [0] * 100, 0, on_layer=lambda i: ready.append((i, clock.now)))
    assert clock.now == pytest.approx(102.0)
    assert [layer for layer, _ in ready] == [0, 1, 2, 3]
    assert [time_s for _, time_s in ready] == pytest.approx([100.5, 101.0, 101.5, 102.0])
    model.prefill(A, [0] * 50, 100)
    assert clock.now == pytest.approx(100 + 1 + 150 * 0.01)
    assert repr(model) == "<ProfileEngine toy, 1 open>"
    model.close(A)
    model.close(A)
    assert model.num_open == 0


def test_a_cached_prefix_counts_in_the_profile() -> None:
    clock = Clock()
    model = engine(clock)
    model.open(A, 200)
    model.prefill(A, [0] * 50, 200)
    model.prefill(A, [0] * 50, 250)
    assert clock.now == pytest.approx(100 + 1 + 100 * 0.01 + 100 * 200 * 1e-4)


def test_short_pauses_between_calls_come_out_of_the_next_call() -> None:
    clock = Clock()
    model = engine(clock, absorb_s=0.1)
    model.open(A)
    for _ in range(4):
        model.decode(A, 0)
        clock.now += 0.05
    assert clock.now == pytest.approx(102.05)
    clock.now += 0.2  # a pause of its own
    model.decode(A, 0)
    assert clock.now == pytest.approx(102.75)
    clock.now -= 50  # a clock that jumps back starts anew
    model.decode(A, 0)
    assert clock.now == pytest.approx(53.25)


def test_work_that_is_late_does_not_sleep() -> None:
    clock = Clock()
    model = engine(clock, absorb_s=10.0)
    model.open(A)
    model.decode(A, 0)
    clock.now += 2.0
    num_sleeps = clock.num_sleeps
    for _ in range(4):
        model.decode(A, 0)
    assert clock.num_sleeps == num_sleeps
    assert clock.now == pytest.approx(102.5)


def test_calls_out_of_order_are_refused_and_change_nothing() -> None:
    clock = Clock()
    model = engine(clock)
    model.open(A)
    with pytest.raises(LocalProtocolError, match="already open"):
        model.open(A)
    with pytest.raises(LocalProtocolError, match="not open"):
        model.decode(B, 0)
    for tokens, start in (([], 0), ([1], 5)):
        with pytest.raises(LocalProtocolError, match="follow each other"):
            model.prefill(A, tokens, start)
    assert clock.now == 100.0
    model.prefill(A, [1], 0)


@pytest.mark.parametrize(
    "bad", [{"segment_tokens": 0}, {"decode_s": -1.0}, {"absorb_s": -0.1}], ids=str
)
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    good = {"prefill_s": lambda new, cached: 1.0, "decode_s": 0.1, "segment_tokens": 1}
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ProfileEngine(toy_spec(), **(good | bad))
