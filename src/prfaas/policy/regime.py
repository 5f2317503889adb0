"""Whether the link has room for cached prefixes: the border between two rules of routing."""

from __future__ import annotations

import enum
import math

import attrs

from prfaas.errors import ConfigError
from prfaas.policy.forecast import is_measured


class Regime(enum.Enum):
    """Which of the two rules of arXiv 2604.15039, section 3.4.3, holds."""

    SCARCE = "scarce"  # caches are judged apart, no prefix crosses
    ABUNDANT = "abundant"  # the longest prefix counts wherever it is, and crosses if need be


@attrs.frozen(kw_only=True)
class RegimeSettings:
    """Where the border is; the paper gives no numbers.

    Attributes:
        low: load of the link, 0 to 1, below which it is abundant.
        high: load above which it is scarce.
        window_s: time over which prefix transfers are averaged.
    """

    low: float = 0.6
    high: float = 0.8
    window_s: float = 10.0

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise ConfigError(
                f"low is {self.low} and high is {self.high}; they need 0 <= low <= high"
            )
        if not 0 < self.window_s < math.inf:
            raise ConfigError(f"window_s is {self.window_s}; it must be finite and above 0")


class _Flow:
    """Bytes per second, fading."""

    __slots__ = ("_bytes", "_now", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._bytes = 0.0
        self._now = -math.inf

    def add(self, num_bytes: int, now: float) -> None:
        self._bytes = self._at(now) + num_bytes
        self._now = max(self._now, now)

    def bps(self, now: float) -> float:
        return 8 * self._at(now) / self._window_s

    def _at(self, now: float) -> float:
        age_s = max(0.0, now - self._now)
        return self._bytes * math.exp(-age_s / self._window_s) if self._bytes else 0.0


class RegimeBorder:
    """Decides between the regimes, with hysteresis.

    The load of the link is (offered egress + expected prefixes to PD) / B_out, or, where that is
    more, expected prefixes to PRFAAS / B_out: they take the other direction of a line that is
    assumed to be equally fast both ways. Below ``low`` the regime turns abundant, above ``high``
    scarce, between them it stays. A link whose rate or load is unknown is scarce.

    Expected are the prefixes that the abundant rule wants to move, whichever rule holds: else the
    load would fall as soon as the regime turns scarce, and turn it back.
    """

    def __init__(self, settings: RegimeSettings | None = None) -> None:
        self._settings = settings or RegimeSettings()
        self._to_pd = _Flow(self._settings.window_s)
        self._to_prfaas = _Flow(self._settings.window_s)
        self._regime = Regime.SCARCE

    def __repr__(self) -> str:
        return f"<RegimeBorder {self._regime.value}>"

    @property
    def regime(self) -> Regime:
        """The regime at the last update; scarce before the first."""
        return self._regime

    def expect(self, num_bytes: int, now: float, *, is_pull: bool) -> None:
        """Records a prefix that the abundant rule wants to move, to PD (a pull) or to PRFAAS."""
        (self._to_pd if is_pull else self._to_prfaas).add(num_bytes, now)

    def update(self, utilisation: float | None, link_bps: float | None, now: float) -> Regime:
        """Returns the regime.

        Args:
            utilisation: offered egress / B_out without prefixes; None if unknown.
            link_bps: B_out; None if unknown.
            now: seconds.
        """
        if utilisation is None or not is_measured(link_bps):
            self._regime = Regime.SCARCE
            return self._regime
        load = max(
            utilisation + self._to_pd.bps(now) / link_bps, self._to_prfaas.bps(now) / link_bps
        )
        if load < self._settings.low:
            self._regime = Regime.ABUNDANT
        elif not load <= self._settings.high:
            self._regime = Regime.SCARCE
        return self._regime
