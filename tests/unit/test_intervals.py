"""Sets of byte ranges against a set of bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import CapacityError, ConfigError
from prfaas.transfer import IntervalSet

SIZE = 24
RANGES = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), RANGES), max_size=30), RANGES)
def test_every_operation_agrees_with_a_set_of_bytes(
    steps: list[tuple[str, list[int]]], probe: list[int]
) -> None:
    intervals, model = IntervalSet(SIZE), set[int]()
    for operation, (start, stop) in steps:
        span = set(range(start, stop))
        if operation == "add":
            assert intervals.add(start, stop) == len(span - model)
            model |= span
        else:
            assert intervals.remove(start, stop) == len(span & model)
            model -= span
        intervals.check()
        assert {byte for a, b in intervals for byte in range(a, b)} == model
        assert intervals.total == len(model)
    wanted = set(range(*probe))
    assert intervals.covers(*probe) == (wanted <= model)
    gaps = intervals.missing(*probe)
    assert {byte for a, b in gaps for byte in range(a, b)} == wanted - model
    assert all(a < b for a, b in gaps)
    assert all(before[1] < after[0] for before, after in pairwise(gaps))


def test_neighbours_melt_into_one_range() -> None:
    intervals = IntervalSet(30)
    intervals.add(0, 10)
    intervals.add(20, 30)
    assert len(intervals) == 2
    assert intervals.add(10, 20) == 10
    assert list(intervals) == [(0, 30)]
    assert repr(intervals) == "<IntervalSet 30/30 B in 1 ranges>"


def test_the_number_of_ranges_is_bounded_and_a_refusal_changes_nothing() -> None:
    intervals = IntervalSet(100, max_intervals=3)
    for start in (0, 10, 20):
        intervals.add(start, start + 5)
    with pytest.raises(CapacityError, match="4 separate ranges, at most 3"):
        intervals.add(30, 31)
    with pytest.raises(CapacityError, match="at most 3"):
        intervals.remove(11, 12)
    assert list(intervals) == [(0, 5), (10, 15), (20, 25)]
    assert intervals.add(5, 10) == 5
    assert intervals.remove(10, 15) == 5
    intervals.add(30, 31)
    intervals.check()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_ranges_outside_the_space_are_refused(start: int, stop: int) -> None:
    intervals = IntervalSet(10)
    for operation in (intervals.add, intervals.remove, intervals.covers, intervals.missing):
        with pytest.raises(ConfigError, match="not a range inside"):
            operation(start, stop)


@pytest.mark.parametrize(("size", "limit"), [(-1, None), (1, 0)])
def test_sizes_are_checked(size: int, limit: int | None) -> None:
    with pytest.raises(ConfigError):
        IntervalSet(size, max_intervals=limit)
