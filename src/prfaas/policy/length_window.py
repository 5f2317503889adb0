"""The uncached lengths of recent requests, with a prior that fades as they come."""

from __future__ import annotations

import math
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

    def __len__(self) -> int:
        return len(self._recent)

    def observe(self, uncached_tokens: int) -> None:
        """Takes in one length; raises ConfigError unless it is a whole number of at least 1."""
        if type(uncached_tokens) is not int or uncached_tokens < 1:
            raise ConfigError(
                f"uncached_tokens is {uncached_tokens!r}; it must be a whole number of at least 1"
            )
        self._recent.append(uncached_tokens)

    @property
    def longest(self) -> int:
        """The greatest recent length, or of the prior as long as there is none."""
        return max(self._recent, default=self._prior[-1])

    @property
    def mean(self) -> int:
        """Mean recent length, rounded down."""
        lengths = self._recent or self._prior
        return sum(lengths) // len(lengths)

    def quantile(self, share: float) -> int:
        """The length that this share, below 1, of the recent lengths is shorter than."""
        lengths = sorted(self._recent) or self._prior
        return lengths[int(share * len(lengths))]

    def weights(self) -> dict[int, float]:
        """Length -> number of arrivals. What has faded of the prior counts as that many more."""
        fading = max(0, self._prior_weight - len(self._recent)) / len(self._prior)
        shares = {length: float(num) for length, num in Counter(self._recent).items()}
        if fading or not shares:
            for length in self._prior:
                shares[length] = shares.get(length, 0.0) + (fading or 1.0)
        return shares if len(shares) <= _MAX_LENGTHS else _grouped(shares)


def _grouped(shares: dict[int, float]) -> dict[int, float]:
    """The same shares on fewer lengths: neighbours join under the longest of them."""
    lengths = sorted(shares)
    size = math.ceil(len(lengths) / _MAX_LENGTHS)
    groups = (lengths[i : i + size] for i in range(0, len(lengths), size))
    return {group[-1]: sum(shares[length] for length in group) for group in groups}
