"""Prefill time of one instance, measured over new and cached tokens."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from itertools import groupby, pairwise

import attrs

from prfaas.capacity.prefill_profile import PrefillProfile
from prfaas.errors import ConfigError


def _checked_rows(
    measurements: Iterable[tuple[float, float, float]],
) -> tuple[tuple[float, float, float], ...]:
    """Sort by cached, then new tokens; refuse what is no measurement or was given twice."""
    given = tuple(measurements)
    for new, cached, seconds in given:
        if not (0 <= new < math.inf and 0 <= cached < math.inf and 0 < seconds < math.inf):
            raise ConfigError(
                f"measurement ({new}, {cached}, {seconds}) is not usable; tokens must be "
                "finite and at least 0, seconds finite and above 0"
            )
    rows = tuple(sorted(given, key=lambda measurement: (measurement[1], measurement[0])))
    for one, other in pairwise(rows):
        if one[:2] == other[:2]:
            raise ConfigError(
                f"{one[0]} new after {one[1]} cached tokens was measured twice "
                f"({one[2]} s and {other[2]} s); give one value, for instance the median"
            )
    return rows


@attrs.frozen
class PrefillSurface:
    """T_prefill(new, cached) of one instance from a table of measurements.

    Linear in the new tokens along each row of equal cached tokens, linear between the two rows
    around the cached tokens: on a full grid that is bilinear. Outside, the end segments and the
    two end rows extend, never below 0 s. Rows need not share their new tokens.

    Attributes:
        measurements: (new tokens, cached tokens, seconds) in any order; at least two rows, each
            of at least two new lengths. Seconds never fall with more tokens of either kind.
    """

    measurements: tuple[tuple[float, float, float], ...] = attrs.field(
        converter=_checked_rows, repr=lambda rows: f"<{len(rows)} measurements>"
    )
    _cached: tuple[float, ...] = attrs.field(init=False, repr=False, eq=False)
    _curves: tuple[PrefillProfile, ...] = attrs.field(init=False, repr=False, eq=False)

    @_cached.default
    def _row_places(self) -> tuple[float, ...]:
        places = tuple(sorted({cached for _, cached, _ in self.measurements}))
        if len(places) < 2:
            raise ConfigError(
                f"the surface has {len(places)} rows of cached tokens; at least 2 are needed, "
                "or use a PrefillProfile"
            )
        return places

    @_curves.default
    def _row_curves(self) -> tuple[PrefillProfile, ...]:
        curves = []
        for cached, row in groupby(self.measurements, key=lambda measurement: measurement[1]):
            knots = tuple((new, seconds) for new, _, seconds in row)
            try:
                curves.append(PrefillProfile(knots))
            except ConfigError as error:
                raise ConfigError(f"row of {cached} cached tokens: {error}") from None
        return tuple(curves)

    def __attrs_post_init__(self) -> None:
        """Refuse a row that is faster than the one before it where both were measured."""
        for i, (lower, upper) in enumerate(pairwise(self._curves)):
            first = max(lower.knots[0][0], upper.knots[0][0])
            last = min(lower.knots[-1][0], upper.knots[-1][0])
            for new in sorted(n for n, _ in (*lower.knots, *upper.knots) if first <= n <= last):
                if upper.prefill_s(new) < lower.prefill_s(new):
                    raise ConfigError(
                        f"{new} new tokens take {upper.prefill_s(new)} s after "
                        f"{self._cached[i + 1]} cached tokens but {lower.prefill_s(new)} s after "
                        f"{self._cached[i]}; a longer prefix cannot be faster, measure again"
                    )

    def prefill_s(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """T_prefill in seconds for ``num_tokens`` new tokens after a cached prefix."""
        right = bisect.bisect_left(self._cached, num_cached_tokens, 1, len(self._cached) - 1)
        c0, c1 = self._cached[right - 1], self._cached[right]
        s0 = self._curves[right - 1].prefill_s(num_tokens)
        s1 = self._curves[right].prefill_s(num_tokens)
        return max(0.0, s0 + (s1 - s0) * (num_cached_tokens - c0) / (c1 - c0))
