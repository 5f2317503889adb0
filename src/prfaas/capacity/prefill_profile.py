"""Prefill time of one instance as a curve over the prompt length."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Protocol

import attrs

from prfaas.errors import ConfigError


class PrefillTime(Protocol):
    """Anything that knows how long one instance takes to prefill."""

    def prefill_s(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Seconds for ``num_tokens`` new tokens after ``num_cached_tokens`` cached ones."""
        ...


@attrs.frozen
class PrefillProfile:
    """T_prefill of one instance as a piecewise linear curve.

    Attributes:
        knots: (tokens, seconds) with ascending tokens, at least two. The end segments extend
            beyond the first and the last knot, never below 0 s.
    """

    knots: tuple[tuple[float, float], ...] = attrs.field()
    _tokens: tuple[float, ...] = attrs.field(init=False, repr=False, eq=False)

    @knots.validator
    def _check_knots(self, _: object, value: tuple[tuple[float, float], ...]) -> None:
        if len(value) < 2:
            raise ConfigError(f"a profile has {len(value)} knots; measure at least 2 lengths")
        for (n0, s0), (n1, s1) in pairwise(value):
            if not (0 <= n0 < n1 < float("inf") and 0 < s0 <= s1 < float("inf")):
                raise ConfigError(
                    f"knots ({n0}, {s0}) and ({n1}, {s1}) are out of order; tokens must ascend "
                    "from at least 0, seconds must be positive and never fall"
                )

    @_tokens.default
    def _knot_tokens(self) -> tuple[float, ...]:
        return tuple(tokens for tokens, _ in self.knots)

    @classmethod
    def sampled(cls, curve: Callable[[float], float], at_tokens: Iterable[float]) -> PrefillProfile:
        """Build a profile from a formula for T_prefill, evaluated at ``at_tokens``."""
        return cls(tuple((tokens, curve(tokens)) for tokens in at_tokens))

    def prefill_s(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """T_prefill in seconds for ``num_tokens`` new tokens after a cached prefix.

        The curve knows only whole prompts, so with a prefix it is T(0) + T(cached + new) -
        T(cached): the fixed overhead is paid again, and the new tokens still attend over the
        prefix. It is T(new) without a prefix. Where the curve is convex it never falls in either
        argument. Measure a `PrefillSurface` where that rule is too coarse.
        """
        if num_cached_tokens == 0:
            return self._curve_s(num_tokens)
        whole_s = self._curve_s(num_cached_tokens + num_tokens)
        return self._curve_s(0) + max(0.0, whole_s - self._curve_s(num_cached_tokens))

    def _curve_s(self, num_tokens: float) -> float:
        right = bisect.bisect_left(self._tokens, num_tokens, 1, len(self.knots) - 1)
        (n0, s0), (n1, s1) = self.knots[right - 1], self.knots[right]
        return max(0.0, s0 + (s1 - s0) * (num_tokens - n0) / (n1 - n0))
