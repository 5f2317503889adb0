"""What a controller knows of the link: its rate, and whether it is silent or down."""

from __future__ import annotations

import math
from typing import TypeGuard

from prfaas.policy.egress import MAX_BYTES, EgressMeter

_RISE_TICKS = 3
"""A rise has to be measured this often in a row; a fall counts at once."""
_KEEP = 0.8
"""Share of the past that one tick leaves standing in the rate, once there is a past."""
_LEAST_UTILISATION = 0.02
"""Below this share of the link nobody can tell a rate that is missing from traffic that is."""


def is_link_rate(value: float | None) -> TypeGuard[float]:
    """Whether a link of this rate, in bits/s, carries anything: at least 1 and finite."""
    return value is not None and 1 <= value < math.inf


class LinkWatch:
    """Follows the measured rate: falls at once, rises once they last; and notices a dead link.

    A *sample* is a measured rate that differs from the last one seen. Progress is a sample, or a
    backlog smaller than the last one and what was offered since. The link is down when bytes waited
    for ``down_after_s`` without progress, and either some still wait, or no rate is measured
    although so much was offered that a link of the known rate would have been measured. Only a
    sample ends that.

    Args:
        rate_bps: the rate to assume until the first sample; None if unknown.
        link_change: relative change that is no noise.
        down_after_s: longer than the longest prefill and its transfer, which look like silence.
    """

    def __init__(self, *, rate_bps: float | None, link_change: float, down_after_s: float) -> None:
        self._rate_bps = rate_bps
        self._link_change = link_change
        self._down_after_s = down_after_s
        self._offered = EgressMeter()
        self._landed = EgressMeter()
        self._last_bps: float | None = None
        self._num_samples = self._num_ticks = self._num_rises = 0
        self._backlog_bytes = 0
        self._expected_bytes = 0
        self._waiting_since_s: float | None = None
        self._heard_s: float | None = None
        self._is_down = False

    @property
    def rate_bps(self) -> float | None:
        """The rate to plan with; None as long as none is known."""
        return self._rate_bps

    @property
    def num_samples(self) -> int:
        """Samples so far."""
        return self._num_samples

    @property
    def backlog_s(self) -> float:
        """Time that the bytes which have not landed keep the link busy."""
        return 8 * self._backlog_bytes / self._rate_bps if self._rate_bps else 0.0

    def delivered_bps(self, now: float) -> float:
        """Rate at which offered bytes landed, lately."""
        return self._landed.rate_bps(now)

    def utilisation(self, now: float) -> float | None:
        """Offered egress over the rate; None as long as no rate is known."""
        return self._offered.rate_bps(now) / self._rate_bps if self._rate_bps else None

    def silence_s(self, now: float) -> float:
        """Time since the last sample or offer, or since the watch began."""
        return 0.0 if self._heard_s is None else now - self._heard_s

    def is_down(self, now: float) -> bool:
        """Whether the link carries nothing, judged by the last view."""
        return self._is_down or (self._waiting_since_s is not None and self._has_stalled(now))

    def offer(self, num_bytes: int, now: float) -> None:
        """Records bytes of a request that goes over the link."""
        self._offered.observe(num_bytes, now)
        self._expected_bytes += num_bytes
        if num_bytes and self._waiting_since_s is None:
            self._waiting_since_s = now
        self._heard_s = now

    def see(self, link_bps: float | None, backlog_bytes: int, now: float) -> bool:
        """Takes in what a view says. Returns whether the rate fell by more than noise."""
        measured = link_bps if is_link_rate(link_bps) else None
        is_sample = measured is not None and measured != self._last_bps
        self._num_samples += is_sample
        self._note_backlog(max(0, backlog_bytes), measured is not None, is_sample, now)
        self._is_down = not is_sample and self.is_down(now)
        was_silent, self._last_bps = self._last_bps is None, measured
        if is_sample or self._heard_s is None:
            self._heard_s = now
        if measured is None:
            return False
        if self._rate_bps is None or (was_silent and is_sample):
            has_fallen = self._rate_bps is not None and measured < self._rate_bps
            self._restart(measured)
            return has_fallen
        if measured < self._rate_bps * (1 - self._link_change):
            self._restart(measured)
            return True
        return False

    def tick(self) -> None:
        """Once per period: lets the rate follow what was seen last."""
        measured, rate = self._last_bps, self._rate_bps
        if measured is None or rate is None:
            return
        if measured > rate * (1 + self._link_change):
            self._num_rises += 1
            if self._num_rises >= _RISE_TICKS:
                self._restart(measured)
            return
        self._num_rises = 0
        self._num_ticks += 1
        self._rate_bps = rate + (measured - rate) * max(1 - _KEEP, 1 / self._num_ticks)

    def check(self) -> None:
        """Asserts the invariants."""
        assert self._rate_bps is None or is_link_rate(self._rate_bps), f"rate {self._rate_bps}"
        assert self._backlog_bytes >= 0
        assert self._num_rises < _RISE_TICKS

    def _restart(self, rate_bps: float) -> None:
        self._rate_bps = rate_bps
        self._num_ticks = self._num_rises = 0

    def _note_backlog(
        self, backlog_bytes: int, has_rate: bool, is_sample: bool, now: float
    ) -> None:
        # What should be waiting, less what is, has landed or was given up.
        landed = self._expected_bytes - backlog_bytes
        if landed > 0:
            self._landed.observe(min(landed, MAX_BYTES), now)
        # Where no backlog was ever seen it may be that nobody keeps account of it.
        has_shrunk = landed > 0 and (backlog_bytes > 0 or self._backlog_bytes > 0)
        is_all_landed = backlog_bytes == 0 and has_rate
        if is_sample or has_shrunk or is_all_landed:
            self._waiting_since_s = None
        if backlog_bytes and self._waiting_since_s is None:
            self._waiting_since_s = now
        self._backlog_bytes = self._expected_bytes = backlog_bytes

    def _has_stalled(self, now: float) -> bool:
        if self._waiting_since_s is None or now - self._waiting_since_s < self._down_after_s:
            return False
        return self._backlog_bytes > 0 or (
            self._last_bps is None and (self.utilisation(now) or 0.0) >= _LEAST_UTILISATION
        )
