"""How busy the busiest prefill resource is, as a function of the threshold t."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from operator import mul
from typing import TypeAlias

import attrs

from prfaas.errors import ConfigError
from prfaas.spec import ModelSpec

PrefillSeconds: TypeAlias = Callable[[int], float]
"""T_prefill: seconds that one node needs for a number of uncached tokens."""


@attrs.frozen(kw_only=True)
class PrefillStage:
    """The nodes that share one kind of prefill: how many, and T_prefill of one of them.

    Attributes:
        num_nodes: above 0; a fraction stands for a node that is slower than its profile says, or
            that also does something else.
        prefill_s: T_prefill of a whole node.
    """

    num_nodes: float = attrs.field()
    prefill_s: PrefillSeconds

    @num_nodes.validator
    def _check_num_nodes(self, _: object, value: float) -> None:
        if not 0 < value < math.inf:
            raise ConfigError(f"num_nodes is {value}; a stage needs a finite number above 0")


class LoadCurve:
    """Load of the busiest resource, as a function of t.

    Eq. 6 of arXiv 2604.15039 bounds the request rate by min(Θ_prfaas/p, Θ_pd-p/(1-p), Θ_pd-d),
    where Θ_prfaas is the lesser of compute and egress (Eq. 3). Each bound is the reciprocal of the
    time for which an average arrival occupies that resource: E[T(L); L > t] / N_prfaas for remote
    compute, E[8 S_kv(L); L > t] / B_out for egress, E[T(L); L <= t] / N_p for local prefill. These
    are expectations over lengths, where the paper takes T and S_kv at the mean length. Θ_pd-d does
    not depend on t, so the t that maximises Eq. 6 minimises the greatest of the three. The first
    two fall with t and the third rises; the minimum is where they cross, which is Eq. 7.

    Args:
        spec: gives S_kv.
        weights: uncached length in tokens -> share of the arrivals, at least one, all above 0.
            Any unit will do, except for `imbalance`, which takes them for numbers of arrivals.
        remote, local: the two stages.
        link_bps: B_out; None leaves egress out of account.
        kv_bytes: S_kv from something faster than ``spec``; None for ``spec.kv_bytes``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[int, float],
        *,
        remote: PrefillStage,
        local: PrefillStage,
        link_bps: float | None,
        kv_bytes: Callable[[int], int] | None = None,
    ) -> None:
        lengths = sorted(weights)
        shares = [weights[length] for length in lengths]
        size = kv_bytes or spec.kv_bytes
        bps = link_bps or math.inf
        self._lengths = lengths
        self._shares = shares
        # Seconds that one arrival of each length occupies each resource.
        self._remote_each_s = [remote.prefill_s(n) / remote.num_nodes for n in lengths]
        self._local_each_s = [local.prefill_s(n) / local.num_nodes for n in lengths]
        self._egress_each_s = [8 * size(n) / bps for n in lengths]
        # Position k: the k shortest lengths prefill locally, the others remotely.
        self._remote_s = _sums_from(map(mul, shares, self._remote_each_s))
        self._egress_s = _sums_from(map(mul, shares, self._egress_each_s))
        self._local_s = [*accumulate(map(mul, shares, self._local_each_s), initial=0.0)]
        self._all_s: list[float] = [*map(max, self._remote_s, self._egress_s, self._local_s)]

    def load_s(self, threshold_tokens: int) -> float:
        """Seconds of the busiest resource per unit of arrivals, with t at this value."""
        return self._all_s[bisect_right(self._lengths, threshold_tokens)]

    def best(self, band: tuple[int, int]) -> int:
        """The t inside ``band`` with the least load; the smallest one of equals."""
        low, high = band
        first, last = bisect_right(self._lengths, low), bisect_right(self._lengths, high)
        num_local = min(range(first, last + 1), key=self._all_s.__getitem__)
        return low if num_local == first else self._lengths[num_local - 1]

    def imbalance(self, threshold_tokens: int) -> float:
        """How far t is off Eq. 7, in standard errors; above 0 where the remote side is busier.

        The weights count arrivals, and another sample of as many would give other loads: the
        difference of the two sides has the standard error sqrt(sum of weight * seconds^2). Within
        a few of them nothing speaks against t.
        """
        k = bisect_right(self._lengths, threshold_tokens)
        is_egress = self._egress_s[k] > self._remote_s[k]
        away = self._egress_each_s if is_egress else self._remote_each_s
        difference = max(self._egress_s[k], self._remote_s[k]) - self._local_s[k]
        error = math.sqrt(sum(map(_squared, self._shares, [*self._local_each_s[:k], *away[k:]])))
        return difference / error if error else 0.0


def _squared(share: float, seconds: float) -> float:
    return share * seconds * seconds


def _sums_from(values: Iterable[float]) -> list[float]:
    """Position k: the sum of everything from k on."""
    return [*accumulate(reversed([*values]), initial=0.0)][::-1]
