"""A set of half-open byte ranges, for readiness and for what has landed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

from prfaas.errors import CapacityError, ConfigError


class IntervalSet:
    """Disjoint, non-adjacent, ordered ranges ``[start, stop)`` inside ``[0, size)``.

    Every operation finds its place by bisection and then touches only the ranges it changes.

    Args:
        size: end of the space, in bytes.
        max_intervals: most separate ranges to hold, so that a peer that sends every other byte
            cannot fill the memory; None where only this side decides what is added.
    """

    __slots__ = ("_max_intervals", "_size", "_starts", "_stops", "_total")

    def __init__(self, size: int, *, max_intervals: int | None = None) -> None:
        if size < 0 or (max_intervals is not None and max_intervals < 1):
            raise ConfigError(
                f"size is {size} and max_intervals {max_intervals}; use at least 0 and at least 1"
            )
        self._size = size
        self._max_intervals = max_intervals
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._total = 0

    @property
    def size(self) -> int:
        return self._size

    @property
    def total(self) -> int:
        """Bytes covered."""
        return self._total

    def __len__(self) -> int:
        """Number of separate ranges."""
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def add(self, start: int, stop: int) -> int:
        """Covers ``[start, stop)`` and returns how many of its bytes were not covered before.

        Raises:
            ConfigError: the range is not inside the space.
            CapacityError: the set would hold more than ``max_intervals`` ranges. Nothing changed.
        """
        self._check_range(start, stop)
        if start == stop:
            return 0
        # Ranges first..last-1 touch the new one, be it only at an end, and melt into it.
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first == last:
            self._check_room(len(self._starts) + 1)
            held = 0
            low, high = start, stop
        else:
            held = sum(self._stops[first:last]) - sum(self._starts[first:last])
            low = min(start, self._starts[first])
            high = max(stop, self._stops[last - 1])
        self._starts[first:last] = [low]
        self._stops[first:last] = [high]
        num_new = high - low - held
        self._total += num_new
        return num_new

    def remove(self, start: int, stop: int) -> int:
        """Uncovers ``[start, stop)`` and returns how many of its bytes were covered.

        Raises:
            ConfigError: the range is not inside the space.
            CapacityError: the cut would leave more than ``max_intervals`` ranges. Nothing changed.
        """
        self._check_range(start, stop)
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        if start == stop or first >= last:
            return 0
        head, tail = self._starts[first], self._stops[last - 1]
        kept = [(a, b) for a, b in ((head, start), (stop, tail)) if a < b]
        self._check_room(len(self._starts) - (last - first) + len(kept))
        held = sum(self._stops[first:last]) - sum(self._starts[first:last])
        num_gone = held - sum(b - a for a, b in kept)
        self._starts[first:last] = [a for a, _ in kept]
        self._stops[first:last] = [b for _, b in kept]
        self._total -= num_gone
        return num_gone

    def covers(self, start: int, stop: int) -> bool:
        """Whether every byte of ``[start, stop)`` is covered. Reads only."""
        self._check_range(start, stop)
        if start == stop:
            return True
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and self._stops[at] >= stop

    def missing(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """The ranges of ``[start, stop)`` that are not covered, in order. Reads only."""
        self._check_range(start, stop)
        gaps: list[tuple[int, int]] = []
        at = bisect_right(self._stops, start)
        while start < stop:
            if at == len(self._starts) or self._starts[at] >= stop:
                gaps.append((start, stop))
                break
            if self._starts[at] > start:
                gaps.append((start, self._starts[at]))
            start = self._stops[at]
            at += 1
        return tuple(gaps)

    def check(self) -> None:
        """Asserts order, separation, bounds and the total."""
        edges = [edge for interval in self for edge in interval]
        assert all(a < b for a, b in pairwise(edges)), edges
        assert not edges or (edges[0] >= 0 and edges[-1] <= self._size), edges
        assert self._total == sum(self._stops) - sum(self._starts), (self._total, edges)
        assert self._max_intervals is None or len(self._starts) <= self._max_intervals, len(self)

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self._size:
            raise ConfigError(f"[{start}, {stop}) is not a range inside [0, {self._size})")

    def _check_room(self, num_intervals: int) -> None:
        if self._max_intervals is not None and num_intervals > self._max_intervals:
            raise CapacityError(
                f"{num_intervals} separate ranges, at most {self._max_intervals} are kept; "
                "use larger or adjacent ranges"
            )

    def __repr__(self) -> str:
        return f"<IntervalSet {self._total}/{self._size} B in {len(self)} ranges>"
