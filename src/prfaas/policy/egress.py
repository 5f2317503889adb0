"""How much is offered to the link, and a clock that never goes back."""

from __future__ import annotations

import math

from prfaas.errors import ConfigError

MAX_BYTES = 2**63
"""More than any request puts on a link."""
_RESTART_TAUS = 20
"""A time that lies this many time constants back is taken for a clock that started again."""


class EgressMeter:
    """Exponentially weighted rate of bytes that come in lumps.

    Every lump counts with exp(-age / tau_s) / tau_s, so a steady flow reads as its rate, a lump as
    its size spread over tau_s, and silence as a rate that halves every 0.7 tau_s. The weights
    depend on times only: reports that come late or out of order change nothing.

    Args:
        tau_s: time constant.
    """

    def __init__(self, *, tau_s: float = 5.0) -> None:
        if not 0 < tau_s < math.inf:
            raise ConfigError(f"tau_s is {tau_s}; it must be finite and above 0")
        self._tau_s = tau_s
        self._newest_s = -math.inf
        self._bits = 0.0

    def __repr__(self) -> str:
        return f"<EgressMeter {self._bits / self._tau_s:.3g} bit/s at {self._newest_s} s>"

    def observe(self, num_bytes: int, now: float) -> None:
        """Takes in bytes that were offered at ``now``.

        Raises:
            ConfigError: not a whole number from 0 to 2**63, or a time that is not finite.
        """
        if type(num_bytes) is not int or not 0 <= num_bytes <= MAX_BYTES:
            raise ConfigError(
                f"num_bytes is {num_bytes!r}; it must be a whole number from 0 to {MAX_BYTES}"
            )
        if not math.isfinite(now):
            raise ConfigError(f"now is {now}; it must be finite")
        age_s = now - self._newest_s
        if age_s >= 0 or age_s < -_RESTART_TAUS * self._tau_s:
            self._bits = self._bits * self._weight(age_s) + 8.0 * num_bytes
            self._newest_s = now
        else:
            self._bits += 8.0 * num_bytes * self._weight(-age_s)

    def rate_bps(self, now: float) -> float:
        """Bits per second at ``now``; a time before the newest report reads as that report's."""
        return self._bits * self._weight(now - self._newest_s) / self._tau_s

    def _weight(self, age_s: float) -> float:
        # Before the first report the age is infinite, and a restarted clock leaves a negative one:
        # neither keeps anything of the past.
        if age_s >= 0:
            return math.exp(-age_s / self._tau_s)
        return 0.0 if age_s < -_RESTART_TAUS * self._tau_s else 1.0


class SteadyClock:
    """Times that never go back, whatever the caller's clock does.

    A small step back reads as no step at all. After a large one the clock goes on from the time it
    had reached, so that nothing waits for the past to come round again. A time that is not finite
    reads as the last one.

    Args:
        slack_s: the largest step back that is small.
    """

    def __init__(self, *, slack_s: float = 1.0) -> None:
        self._slack_s = slack_s
        self._offset_s = 0.0
        self._last_s: float | None = None

    def read(self, now: float) -> float:
        """``now`` on the steady clock, without remembering it."""
        if self._last_s is None:
            return now if math.isfinite(now) else 0.0
        if not math.isfinite(now):
            return self._last_s
        return max(self._last_s, now + self._offset_s)

    def advance(self, now: float) -> float:
        """``now`` on the steady clock, which does not go behind it any more."""
        if self._last_s is not None and self._last_s <= now + self._offset_s < math.inf:
            self._last_s = now + self._offset_s  # as nearly always: time went on
            return self._last_s
        steady_s = self.read(now)
        if math.isfinite(now) and steady_s - (now + self._offset_s) > self._slack_s:
            self._offset_s = steady_s - now
        self._last_s = steady_s
        return steady_s
