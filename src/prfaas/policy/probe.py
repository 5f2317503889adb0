"""A probe of a link that nobody uses: a few requests may cross, no more."""

from __future__ import annotations

import math


class Probe:
    """The budget of one probe at a time, and when the next one is due.

    Args:
        after_s: silence before a probe, and the longest that one stays open.
        num_requests, num_bytes: the budget.
    """

    def __init__(self, *, after_s: float, num_requests: int, num_bytes: int) -> None:
        self._after_s = after_s
        self._budget = (num_requests, num_bytes)
        self._left = (0, 0)
        self._until_s = -math.inf
        self._last_s = -math.inf

    def is_open(self, now: float) -> bool:
        """Whether a request may still cross."""
        return now < self._until_s and min(self._left) > 0

    def is_due(self, silence_s: float, now: float) -> bool:
        """Whether the link was silent, and left alone, for long enough."""
        return min(silence_s, now - self._last_s) >= self._after_s and not self.is_open(now)

    def start(self, now: float) -> None:
        """Opens a probe."""
        self._left = self._budget
        self._until_s = now + self._after_s
        self._last_s = self._until_s

    def stop(self, now: float) -> None:
        """Ends an open probe; with none, puts off the next one."""
        self._left = (0, 0)
        self._last_s = now

    def spend(self, num_bytes: int) -> None:
        """One request crosses."""
        requests, left = self._left
        if requests or left:
            self._left = (max(0, requests - 1), max(0, left - num_bytes))

    def check(self) -> None:
        """Asserts the invariants."""
        for left, budget in zip(self._left, self._budget, strict=True):
            assert 0 <= left <= budget, f"{left} left of a budget of {budget}"
