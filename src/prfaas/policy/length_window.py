"""The uncached lengths of recent requests, with a prior that fades as they come."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Sequence

from prfaas.errors import ConfigError

_MAX_LENGTHS = 512
"""Distinct lengths in one search; more make it slower and t no better."""


class LengthWindow:
    """The measured distribution of lengths, defined before the first one too.

    Args:
        prior: lengths to expect before any are seen, equally likely.
        size: recent lengths that count.
        prior_weight: number of recent lengths at which the prior has faded out.
    """

    def __init__(self, prior: Sequence[int], *, size: int, prior_weight: int) -> None:
        if not prior or any(type(n) is not int or n < 1 for n in prior):
            raise ConfigError(
                f"prior_tokens is {tuple(prior)}; it needs at least one length, each of them a "
                "whole number of at least 1"
            )
        self._prior = sorted(prior)
        self._prior_weight = min(prior_weight, size)
        self._recent: deque[int] = deque(maxlen=size)
        # The recent ones again, ascending, as every search wants them.
        self._ascending: list[int] = []
        self._sum = 0

    def __len__(self) -> int:
        return len(self._recent)

    def observe(self, uncached_tokens: int) -> None:
        """Takes in one length; raises ConfigError unless it is a whole number of at least 1."""
        if type(uncached_tokens) is not int or uncached_tokens < 1:
            raise ConfigError(
                f"uncached_tokens is {uncached_tokens!r}; it must be a whole number of at least 1"
            )
        recent, ascending = self._recent, self._ascending
        if len(recent) == recent.maxlen:
            self._sum -= recent[0]
            del ascending[bisect_left(ascending, recent[0])]
        recent.append(uncached_tokens)
        insort(ascending, uncached_tokens)
        self._sum += uncached_tokens

    @property
    def longest(self) -> int:
        """The greatest recent length, or of the prior as long as there is none."""
        return (self._ascending or self._prior)[-1]

    @property
    def mean(self) -> int:
        """Mean recent length, rounded down."""
        if not self._recent:
            return sum(self._prior) // len(self._prior)
        return self._sum // len(self._recent)

    def quantile(self, share: float) -> int:
        """The length that this share, below 1, of the recent lengths is shorter than."""
        lengths = self._ascending or self._prior
        return lengths[int(share * len(lengths))]

    def weights(self) -> dict[int, float]:
        """Length -> number of arrivals. What has faded of the prior counts as that many more."""
        fading = max(0, self._prior_weight - len(self._recent)) / len(self._prior)
        if self._recent and not fading:
            lengths = _ends([*dict.fromkeys(self._ascending)])
            ranks = [bisect_right(self._ascending, length) for length in lengths]
            return {n: float(b - a) for n, a, b in zip(lengths, [0, *ranks], ranks, strict=False)}
        shares = {length: float(num) for length, num in Counter(self._recent).items()}
        for length in self._prior:
            shares[length] = shares.get(length, 0.0) + (fading or 1.0)
        return _grouped(shares)

    def check(self) -> None:
        """Asserts the invariants."""
        assert self._ascending == sorted(self._recent)
        assert self._sum == sum(self._recent)


def _ends(lengths: list[int]) -> list[int]:
    """Of ascending lengths the last ones of groups of neighbours, equally large but for the last
    group: all of them, as long as they are few."""
    size = math.ceil(len(lengths) / _MAX_LENGTHS)
    ends = lengths[size - 1 :: size]
    return ends if ends[-1] == lengths[-1] else [*ends, lengths[-1]]


def _grouped(shares: dict[int, float]) -> dict[int, float]:
    """The same shares on fewer lengths: neighbours join under the longest of them."""
    lengths = sorted(shares)
    groups = dict.fromkeys(_ends(lengths), 0.0)
    ends = iter(groups)
    end = next(ends)
    for length in lengths:
        if length > end:
            end = next(ends)
        groups[end] += shares[length]
    return groups
