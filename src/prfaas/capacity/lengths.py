"""Distributions of uncached prompt lengths, as the capacity model asks about them."""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import accumulate, pairwise
from statistics import NormalDist

import attrs

from prfaas.errors import ConfigError

_SIMPSON_INTERVALS = 128
_NUM_CELLS = 512


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ConfigError(f"share is {share!r}; a quantile needs a share from 0 to 1")


class LengthDistribution(ABC):
    """The law of the uncached length L of a request, in tokens.

    "Above" is L > t and "below" is L <= t. An expectation over an empty side is None.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def min_tokens(self) -> float:
        """The shortest length."""

    @property
    @abstractmethod
    def max_tokens(self) -> float:
        """The longest length."""

    @abstractmethod
    def share_above(self, threshold_tokens: float) -> float:
        """P(L > t)."""

    @abstractmethod
    def expect_above(
        self, function: Callable[[float], float], threshold_tokens: float
    ) -> float | None:
        """E[f(L) | L > t]."""

    @abstractmethod
    def expect_below(
        self, function: Callable[[float], float], threshold_tokens: float
    ) -> float | None:
        """E[f(L) | L <= t]."""

    @abstractmethod
    def quantile(self, share: float) -> float:
        """The shortest length l with P(L <= l) >= ``share``.

        Of a uniform random share it is a sample of the law.

        Raises:
            ConfigError: unless ``0 <= share <= 1``.
        """

    @abstractmethod
    def cumulative(self, function: Callable[[float], float]) -> Callable[[float], float]:
        """Return t -> E[f(L); L <= t], the part of E[f(L)] up to t.

        Costs a pass over the law once and next to nothing per t, for searches over t.
        """

    def mean_above(self, threshold_tokens: float) -> float | None:
        """E[L | L > t], the paper's l_long."""
        return self.expect_above(lambda num_tokens: num_tokens, threshold_tokens)

    def mean_below(self, threshold_tokens: float) -> float | None:
        """E[L | L <= t], the paper's l_short."""
        return self.expect_below(lambda num_tokens: num_tokens, threshold_tokens)


@attrs.frozen(kw_only=True)
class LogNormalLengths(LengthDistribution):
    """A log-normal law cut to ``[min_tokens, max_tokens]``; ``mu`` and ``sigma`` are of ln L."""

    mu: float
    sigma: float = attrs.field()
    min_tokens: float = attrs.field()
    max_tokens: float = attrs.field()

    @sigma.validator
    def _check_sigma(self, _: object, value: float) -> None:
        if not value > 0:
            raise ConfigError(f"sigma is {value}; it must be greater than 0")

    @max_tokens.validator
    def _check_range(self, _: object, value: float) -> None:
        if not 0 < self.min_tokens < value:
            raise ConfigError(
                f"lengths range from {self.min_tokens} to {value}; need 0 < min_tokens < max_tokens"
            )
        if not self._cdf(self.min_tokens) < self._cdf(value):
            raise ConfigError(
                f"mu is {self.mu} and sigma {self.sigma}: no length is from {self.min_tokens} to "
                f"{value}; mu is the logarithm of the median, 9.9 for about 20,000 tokens"
            )

    def share_above(self, threshold_tokens: float) -> float:
        low, high = self._cdf(self.min_tokens), self._cdf(self.max_tokens)
        clipped = min(max(threshold_tokens, self.min_tokens), self.max_tokens)
        return (high - self._cdf(clipped)) / (high - low)

    def expect_above(
        self, function: Callable[[float], float], threshold_tokens: float
    ) -> float | None:
        return self._expect(function, max(threshold_tokens, self.min_tokens), self.max_tokens)

    def expect_below(
        self, function: Callable[[float], float], threshold_tokens: float
    ) -> float | None:
        return self._expect(function, self.min_tokens, min(threshold_tokens, self.max_tokens))

    def quantile(self, share: float) -> float:
        _check_share(share)
        low, high = self._cdf(self.min_tokens), self._cdf(self.max_tokens)
        at = low + share * (high - low)
        if not low < at < high:
            return self.min_tokens if at <= low else self.max_tokens
        num_tokens = math.exp(NormalDist(self.mu, self.sigma).inv_cdf(at))
        return min(max(num_tokens, self.min_tokens), self.max_tokens)

    def cumulative(self, function: Callable[[float], float]) -> Callable[[float], float]:
        """Simpson's rule over ln L in each of 512 cells, and once more in the cell of t."""
        density = NormalDist(self.mu, self.sigma).pdf
        start = math.log(self.min_tokens)
        width = (math.log(self.max_tokens) - start) / _NUM_CELLS
        mass = self._cdf(self.max_tokens) - self._cdf(self.min_tokens)

        def height(x: float) -> float:
            return density(x) / mass * function(math.exp(x))

        edges = [height(start + i * width) for i in range(_NUM_CELLS + 1)]
        middles = [height(start + (i + 0.5) * width) for i in range(_NUM_CELLS)]
        cells = zip(pairwise(edges), middles, strict=True)
        areas = (width / 6 * (left + 4 * middle + right) for (left, right), middle in cells)
        sums = list(accumulate(areas, initial=0.0))

        def up_to(threshold_tokens: float) -> float:
            if threshold_tokens >= self.max_tokens:
                return sums[-1]
            x = math.log(max(threshold_tokens, self.min_tokens))
            cell = min(int((x - start) / width), _NUM_CELLS - 1)
            rest = x - (start + cell * width)
            return sums[cell] + rest / 6 * (edges[cell] + 4 * height(x - rest / 2) + height(x))

        return up_to

    def _cdf(self, num_tokens: float) -> float:
        return NormalDist(self.mu, self.sigma).cdf(math.log(num_tokens))

    def _expect(self, function: Callable[[float], float], low: float, high: float) -> float | None:
        """Conditional mean on ``[low, high]`` by Simpson's rule over ln L."""
        if not low < high:
            return None
        start, density = math.log(low), NormalDist(self.mu, self.sigma).pdf
        step = (math.log(high) - start) / _SIMPSON_INTERVALS
        total = weighted = 0.0
        for i in range(_SIMPSON_INTERVALS + 1):
            x = start + i * step
            weight = density(x) * (1 if i in (0, _SIMPSON_INTERVALS) else 2 + 2 * (i % 2))
            total += weight
            weighted += weight * function(math.exp(x))
        return weighted / total


def _sorted_lengths(values: tuple[int, ...]) -> tuple[int, ...]:
    lengths = tuple(sorted(values))
    if not lengths or lengths[0] < 1:
        raise ConfigError(
            f"got {len(lengths)} lengths, the shortest {min(lengths, default=None)}; "
            "at least 1 is needed, each of at least 1 token"
        )
    return lengths


@attrs.frozen
class EmpiricalLengths(LengthDistribution):
    """Every observed length with equal weight, e.g. the uncached lengths of a trace."""

    lengths: tuple[int, ...] = attrs.field(
        converter=_sorted_lengths, repr=lambda lengths: f"<{len(lengths)} lengths>"
    )
    _sums: tuple[int, ...] = attrs.field(init=False, repr=False, eq=False)

    @_sums.default
    def _prefix_sums(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def min_tokens(self) -> float:
        return self.lengths[0]

    @property
    def max_tokens(self) -> float:
        return self.lengths[-1]

    def share_above(self, threshold_tokens: float) -> float:
        return 1 - self._num_below(threshold_tokens) / len(self.lengths)

    def expect_above(
        self, function: Callable[[float], float], threshold_tokens: float
    ) -> float | None:
        return self._expect(function, self._num_below(threshold_tokens), len(self.lengths))

    def expect_below(
        self, function: Callable[[float], float], threshold_tokens: float
    ) -> float | None:
        return self._expect(function, 0, self._num_below(threshold_tokens))

    def quantile(self, share: float) -> float:
        _check_share(share)
        count = len(self.lengths)
        position = max(0, math.ceil(share * count) - 1)
        if position > 0 and position / count >= share:  # the product was rounded up
            position -= 1
        return self.lengths[position]

    def cumulative(self, function: Callable[[float], float]) -> Callable[[float], float]:
        count, values = len(self.lengths), map(function, self.lengths)
        sums = list(accumulate((value / count for value in values), initial=0.0))
        return lambda threshold_tokens: sums[self._num_below(threshold_tokens)]

    def mean_above(self, threshold_tokens: float) -> float | None:
        return self._mean(self._num_below(threshold_tokens), len(self.lengths))

    def mean_below(self, threshold_tokens: float) -> float | None:
        return self._mean(0, self._num_below(threshold_tokens))

    def _num_below(self, threshold_tokens: float) -> int:
        return bisect.bisect_right(self.lengths, threshold_tokens)

    def _expect(self, function: Callable[[float], float], start: int, stop: int) -> float | None:
        if start == stop:
            return None
        return math.fsum(map(function, self.lengths[start:stop])) / (stop - start)

    def _mean(self, start: int, stop: int) -> float | None:
        """The mean from prefix sums, so that a search over thresholds is cheap on long traces."""
        return None if start == stop else (self._sums[stop] - self._sums[start]) / (stop - start)
