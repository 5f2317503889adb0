"""Whether the link has to be relieved, and how much of its rate is planned with meanwhile."""

from __future__ import annotations

import math

from prfaas.policy.link_watch import LinkWatch

_LEAST_SHARE = 0.1
_SHARE_STEP = 0.1
"""Share of the link that every quiet period gives back."""


class Congestion:
    """A share of the measured rate: cut at once, at most once per period, given back in steps.

    A cut leaves what was delivered lately, or what loss lets through, within half to nine tenths
    of the share so far. Offered egress above ``high_utilisation`` of the rate is congestion while
    the link's backlog grows and is the longest queue; packet loss above ``max_loss`` always is.

    Args:
        high_utilisation, surge_s, max_loss, period_s: see `ThresholdSettings`.
    """

    def __init__(
        self, *, high_utilisation: float, surge_s: float, max_loss: float, period_s: float
    ) -> None:
        self._high_utilisation = high_utilisation
        self._surge_s = surge_s
        self._max_loss = max_loss
        self._period_s = period_s
        self._share = 1.0
        self._mark_s = 0.0
        self._next_cut_s = -math.inf

    @property
    def share(self) -> float:
        """Share of the measured rate to plan with, at most 1."""
        return self._share

    def relieves(
        self, watch: LinkWatch, loss: float | None, local_queue_s: float, now: float
    ) -> bool:
        """Whether the link has to be relieved now; if so, the share is smaller already."""
        rate = watch.rate_bps
        if rate is None or now < self._next_cut_s:
            return False
        keep = 1.0
        if loss is not None and self._max_loss < loss <= 1:
            keep = 1 - loss
        # The backlog is the cheapest to read, and short nearly always.
        if watch.backlog_s > max(self._surge_s, self._mark_s, local_queue_s):
            utilisation = watch.utilisation(now)
            if utilisation is not None and utilisation > self._high_utilisation:
                keep = min(keep, watch.delivered_bps(now) / (self._share * rate), 0.9)
        if keep == 1.0:
            return False
        self._share = max(_LEAST_SHARE, self._share * min(0.9, max(0.5, keep)))
        self._next_cut_s = now + self._period_s
        return True

    def tick(self, backlog_s: float, *, is_quiet: bool) -> None:
        """Once per period: growth counts from this backlog on, and quiet gives some back."""
        self._mark_s = backlog_s
        if is_quiet:
            self._share = min(1.0, self._share + _SHARE_STEP)

    def check(self) -> None:
        """Asserts the invariants."""
        assert _LEAST_SHARE <= self._share <= 1, f"share {self._share}"
