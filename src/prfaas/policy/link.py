"""The rate of a shared link, measured from what its senders delivered."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from operator import itemgetter

from prfaas.errors import ConfigError
from prfaas.seams import Delivery

_SLICES_PER_WINDOW = 32
_MAX_CLOCK_S = 1e12
"""No clock reads more (30,000 years); beyond it a float cannot tell slices apart."""
_start, _end = itemgetter(0), itemgetter(1)


class _Slice:
    """Deliveries inside one short piece of the time line: bytes, and when anybody was busy."""

    __slots__ = ("busy_s", "intervals", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0.0
        self.busy_s = 0.0
        self.intervals: list[tuple[float, float]] = []

    def add(self, start_s: float, end_s: float, num_bytes: float) -> None:
        self.num_bytes += num_bytes
        first = bisect_left(self.intervals, start_s, key=_end)
        stop = bisect_right(self.intervals, end_s, key=_start)
        touched = self.intervals[first:stop]
        if touched:
            start_s = min(start_s, touched[0][0])
            end_s = max(end_s, touched[-1][1])
        self.intervals[first:stop] = [(start_s, end_s)]
        self.busy_s += end_s - start_s - sum(end - start for start, end in touched)


class LinkEstimator:
    """Bytes over the union of busy intervals, in a sliding window of recent busy time.

    Channels that send at the same time share the link: their bytes add up and their time counts
    once, so the estimate is the link's rate whatever the number of senders. Idle time never counts.
    Deliveries may overlap and may come out of order; all of them are on one clock.

    Args:
        window_s: busy time that the estimate looks back on.
        max_age_s: deliveries that ended this long before the newest one no longer count, and the
            estimate ends this long after the newest.
        min_bytes: no estimate from fewer bytes.
        min_busy_s: no estimate from less busy time.
    """

    def __init__(
        self,
        *,
        window_s: float = 2.0,
        max_age_s: float = 60.0,
        min_bytes: int = 64 * 1024,
        min_busy_s: float = 0.05,
    ) -> None:
        if not 0 < window_s <= max_age_s < math.inf:
            raise ConfigError(
                f"window_s is {window_s} and max_age_s is {max_age_s}; "
                "they need 0 < window_s <= max_age_s, both finite"
            )
        if not 0 < min_busy_s <= window_s:
            raise ConfigError(
                f"min_busy_s is {min_busy_s}; it must be above 0 and at most window_s, {window_s}"
            )
        if min_bytes < 1:
            raise ConfigError(f"min_bytes is {min_bytes}; it must be at least 1")
        self._window_s = window_s
        self._max_age_s = max_age_s
        self._min_bytes = min_bytes
        self._min_busy_s = min_busy_s
        self._slice_s = window_s / _SLICES_PER_WINDOW
        self._slices: dict[int, _Slice] = {}
        self._newest_s = -math.inf
        self._oldest_index: int | None = None
        self._rate_bps: float | None = None
        self._is_stale = False
        self._num_refused = 0

    def __repr__(self) -> str:
        return (
            f"<LinkEstimator {self.rate_bps(self._newest_s)} bit/s at {self._newest_s} s, "
            f"{len(self._slices)} slices, {self._num_refused} deliveries refused>"
        )

    @property
    def num_refused(self) -> int:
        """Deliveries that measured nothing: no bytes, no duration, or times that no clock reads."""
        return self._num_refused

    def observe(self, delivery: Delivery) -> None:
        """Takes in one delivery. One that measures nothing is counted and changes nothing else."""
        start, end, num_bytes = delivery.start_s, delivery.end_s, delivery.num_bytes
        length = end - start
        is_on_clock = -_MAX_CLOCK_S < start < end < _MAX_CLOCK_S
        if not (is_on_clock and 0 < num_bytes < math.inf):
            self._num_refused += 1
            return
        if end < self._newest_s - self._max_age_s:
            return
        # The window can never reach further back than this from the delivery's own end.
        start = max(start, end - self._window_s - self._slice_s)
        for index in range(self._index(start), self._index(end) + 1):
            first = max(start, index * self._slice_s)
            last = min(end, (index + 1) * self._slice_s)
            if last > first:
                piece = self._slices.setdefault(index, _Slice())
                piece.add(first, last, num_bytes * ((last - first) / length))
        if end > self._newest_s:
            self._forget_before(end - self._max_age_s)
            self._newest_s = end
        self._is_stale = True

    def rate_bps(self, now: float) -> float | None:
        """Bits per second; None before enough was measured, and after a long silence."""
        if now - self._newest_s > self._max_age_s:
            return None
        if self._is_stale:
            self._rate_bps = self._measure()
            self._is_stale = False
        return self._rate_bps

    def check(self) -> None:
        """Asserts the invariants."""
        for index, piece in self._slices.items():
            assert 0 < piece.busy_s <= self._slice_s * (1 + 1e-6), (
                f"slice {index} is busy {piece.busy_s}"
            )
            for (_, end), (start, _) in zip(piece.intervals, piece.intervals[1:], strict=False):
                assert end < start, f"slice {index} has overlapping intervals"
        assert len(self._slices) <= self._max_age_s / self._slice_s + _SLICES_PER_WINDOW + 3

    def _index(self, time_s: float) -> int:
        return math.floor(time_s / self._slice_s)

    def _forget_before(self, time_s: float) -> None:
        oldest = self._index(time_s)
        if oldest != self._oldest_index:
            self._oldest_index = oldest
            self._slices = {i: piece for i, piece in self._slices.items() if i >= oldest}

    def _measure(self) -> float | None:
        num_bytes = busy_s = 0.0
        for index in sorted(self._slices, reverse=True):
            num_bytes += self._slices[index].num_bytes
            busy_s += self._slices[index].busy_s
            if busy_s >= self._window_s:
                break
        if num_bytes < self._min_bytes or busy_s < self._min_busy_s:
            return None
        return 8 * num_bytes / busy_s
