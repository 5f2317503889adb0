"""How busy the busiest prefill resource is, as a function of the threshold t."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TypeAlias

import attrs

from prfaas.spec import ModelSpec

PrefillSeconds: TypeAlias = Callable[[int], float]
"""T_prefill: seconds that one node needs for a number of uncached tokens."""


@attrs.frozen(kw_only=True)
class PrefillStage:
    """The nodes that share one kind of prefill: how many, and T_prefill of one of them."""

    num_nodes: int
    prefill_s: PrefillSeconds


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
        remote, local: the two stages.
        link_bps: B_out; None leaves egress out of account.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[int, float],
        *,
        remote: PrefillStage,
        local: PrefillStage,
        link_bps: float | None,
    ) -> None:
        lengths = sorted(weights)
        shares = [weights[length] for length in lengths]
        remote_s = [share * remote.prefill_s(n) for n, share in zip(lengths, shares, strict=True)]
        local_s = [share * local.prefill_s(n) for n, share in zip(lengths, shares, strict=True)]
        bits = [share * 8 * spec.kv_bytes(n) for n, share in zip(lengths, shares, strict=True)]
        self._lengths = lengths
        # Position k: the k shortest lengths prefill locally, the others remotely.
        self._remote_s = [total / remote.num_nodes for total in _sums_from(remote_s)]
        self._local_s = [total / local.num_nodes for total in accumulate(local_s, initial=0.0)]
        self._egress_s = [total / (link_bps or math.inf) for total in _sums_from(bits)]

    def load_s(self, threshold_tokens: int) -> float:
        """Seconds of the busiest resource per unit of arrivals, with t at this value."""
        return self._load_s(bisect_right(self._lengths, threshold_tokens))

    def best(self, band: tuple[int, int]) -> int:
        """The t inside ``band`` with the least load; the smallest one of equals."""
        low, high = band
        first, last = bisect_right(self._lengths, low), bisect_right(self._lengths, high)
        num_local = min(range(first, last + 1), key=self._load_s)
        return low if num_local == first else self._lengths[num_local - 1]

    def _load_s(self, num_local: int) -> float:
        return max(self._remote_s[num_local], self._egress_s[num_local], self._local_s[num_local])


def _sums_from(values: list[float]) -> list[float]:
    """Position k: the sum of everything from k on."""
    return [*accumulate(reversed(values), initial=0.0)][::-1]
