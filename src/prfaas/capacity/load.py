"""What one arriving request asks of each side of the threshold, as functions of the threshold."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import attrs

from prfaas.capacity.lengths import LengthDistribution
from prfaas.capacity.throughput import RateForm

Curve = Callable[[float], float]


@attrs.frozen
class LoadCurves:
    """Unconditional mean loads: E[f(L); L > t] and E[f(L); L <= t] per arriving request.

    In the mean form f stands outside: p f(l_long) and (1 - p) f(l_short). Everything that does
    not depend on t is computed once, so that a search over t is cheap.
    """

    lengths: LengthDistribution
    form: RateForm
    _share_above: Curve = attrs.field(init=False)
    _tokens_up_to: Curve = attrs.field(init=False)

    @_share_above.default
    def _share_at(self) -> Curve:
        return cache(self.lengths.share_above)

    @_tokens_up_to.default
    def _first_moment(self) -> Curve:
        return cache(self.lengths.cumulative(lambda num_tokens: num_tokens))

    def above(self, function: Curve) -> Curve:
        """The load that requests longer than t bring."""
        if self.form is RateForm.EXPECTATION:
            up_to = self.lengths.cumulative(function)
            total = up_to(self.lengths.max_tokens)
            return lambda threshold: max(0.0, total - up_to(threshold))
        total_tokens = self._tokens_up_to(self.lengths.max_tokens)

        def of_mean(threshold: float) -> float:
            share = self._share_above(threshold)
            if share <= 0:
                return 0.0
            mean = (total_tokens - self._tokens_up_to(threshold)) / share
            # A tiny share makes the mean a quotient of rounding errors; keep it on its side.
            least = max(threshold, self.lengths.min_tokens)
            return share * function(min(max(mean, least), self.lengths.max_tokens))

        return of_mean

    def below(self, function: Curve) -> Curve:
        """The load that the other requests bring."""
        if self.form is RateForm.EXPECTATION:
            return self.lengths.cumulative(function)

        def of_mean(threshold: float) -> float:
            share = 1 - self._share_above(threshold)
            if share <= 0:
                return 0.0
            mean = self._tokens_up_to(threshold) / share
            most = min(threshold, self.lengths.max_tokens)
            return share * function(min(max(mean, self.lengths.min_tokens), most))

        return of_mean


def rate_of(capacity: float, load: float) -> float:
    """Arrivals per second that ``capacity`` carries at ``load`` each; unbounded without load."""
    return capacity / load if load > 0 else float("inf")
