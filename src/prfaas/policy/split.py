"""What a split of a PD cluster's nodes can sustain: Eq. 6 to 8 in expectation form."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate

import attrs

from prfaas.policy.load_curve import PrefillSeconds
from prfaas.spec import ModelSpec

_NUM_BISECTIONS = 12
_EDGE = 0.1
"""A swing node's prefill share is from this to 1 minus this; beyond, a whole split is as good."""


@attrs.frozen(kw_only=True)
class SplitLoad:
    """Seconds for which an average arrival occupies each stage, with the best t for the split.

    Attributes:
        num_prefill, num_decode: N_p and N_d; not whole if a node does both.
        threshold_tokens: t; None without remote nodes, when everything prefills locally.
        remote_s, egress_s, prefill_s, decode_s: reciprocals of the bounds of Eq. 6.
    """

    num_prefill: float
    num_decode: float
    threshold_tokens: int | None
    remote_s: float
    egress_s: float
    prefill_s: float
    decode_s: float

    @property
    def produce_s(self) -> float:
        """The slowest of the stages that make caches."""
        return max(self.remote_s, self.egress_s, self.prefill_s)

    @property
    def worst_s(self) -> float:
        return max(self.produce_s, self.decode_s)

    @property
    def sustainable_rps(self) -> float:
        """Λ_max of Eq. 6."""
        return 1 / self.worst_s if self.worst_s > 0 else math.inf

    @property
    def binding(self) -> str:
        """The stage that saturates first: remote, egress, prefill or decode."""
        seconds = self.stages_s()
        return max(seconds, key=seconds.__getitem__)

    def stages_s(self) -> dict[str, float]:
        return {
            "remote": self.remote_s,
            "egress": self.egress_s,
            "prefill": self.prefill_s,
            "decode": self.decode_s,
        }

    def gain_over(self, other: SplitLoad) -> float:
        """Share by which the worst utilisation is lower than with ``other``, at any rate."""
        return 1 - self.worst_s / other.worst_s if 0 < other.worst_s < math.inf else 0.0


@attrs.frozen(kw_only=True)
class FractionalSplit:
    """A split in which one node serves both stages.

    Attributes:
        mode: ``slices`` or ``mixed``.
        num_others: prefill nodes besides it.
        share: of its time that is for prefill.
        load: net of what the sharing costs.
    """

    mode: str
    num_others: int
    share: float
    load: SplitLoad


@attrs.frozen(kw_only=True)
class _Sums:
    """Position k: of the k shortest lengths (tokens, local_s), or of all others."""

    lengths: list[int]
    tokens: list[float]
    local_s: list[float]
    remote_s: list[float]
    egress_s: list[float]


@attrs.frozen(kw_only=True)
class SplitModel:
    """The stages of one PD cluster, for any split of its nodes.

    Eq. 7 gives each split its t. With more prefill nodes the prefill bound rises and the decode
    bound falls, so the best split (Eq. 8) is where they cross, and bisection finds it.

    Attributes:
        weights: uncached length in tokens -> share of the arrivals.
        num_remote: PRFAAS nodes for this cluster; not whole if it shares them.
        remote_prefill_s, local_prefill_s: T_prefill of one node.
        decode_node_s: seconds of one decode node that a request takes: steps times step time over
            slots, the reciprocal of Eq. 5 for one node.
        link_bps: B_out for this cluster; None leaves egress out of account.
        band: least and greatest t.
        slice_loss: decode nodes that the drains of an alternating node cost.
        decode_base_share: share of a full step that a smaller batch does not save.
    """

    spec: ModelSpec
    weights: Mapping[int, float]
    num_remote: float
    remote_prefill_s: PrefillSeconds
    local_prefill_s: PrefillSeconds
    decode_node_s: float
    link_bps: float | None
    band: tuple[int, int]
    slice_loss: float = 0.0
    decode_base_share: float = 0.0
    _sums: _Sums = attrs.field(init=False, repr=False, eq=False)

    @_sums.default
    def _sum_up(self) -> _Sums:
        lengths = sorted(self.weights)
        shares = [self.weights[n] for n in lengths]
        local_s = [
            share * self.local_prefill_s(n) for n, share in zip(lengths, shares, strict=True)
        ]
        remote_s = bits = [0.0] * len(lengths)
        if self.num_remote:
            away = list(zip(lengths, shares, strict=True))
            remote_s = [share * self.remote_prefill_s(n) / self.num_remote for n, share in away]
            bits = [share * 8 * self.spec.kv_bytes(n) for n, share in away]
        egress_s = [b / (self.link_bps or math.inf) for b in bits]
        return _Sums(
            lengths=lengths,
            tokens=[0.0, *accumulate(n * share for n, share in zip(lengths, shares, strict=True))],
            local_s=[0.0, *accumulate(local_s)],
            remote_s=_sums_from(remote_s),
            egress_s=_sums_from(egress_s),
        )

    def at(self, num_prefill: float, num_decode: float) -> SplitLoad:
        """The load with N_p and N_d nodes and the t that `LoadCurve` would choose for them.

        A curve is of one N_p. Here only the local side depends on it, so that the sums are made
        once and each split takes O(log n) for n lengths.
        """
        sums = self._sums
        k = self._num_local(num_prefill) if self.num_remote else len(sums.lengths)
        low, _ = self.band
        threshold = sums.lengths[k - 1] if k and sums.lengths[k - 1] > low else low
        return SplitLoad(
            num_prefill=num_prefill,
            num_decode=num_decode,
            threshold_tokens=threshold if self.num_remote else None,
            remote_s=sums.remote_s[k],
            egress_s=sums.egress_s[k],
            prefill_s=sums.local_s[k] / num_prefill,
            decode_s=self.decode_node_s / num_decode if num_decode > 0 else math.inf,
        )

    def _num_local(self, num_prefill: float) -> int:
        """How many of the shortest lengths prefill locally: where Eq. 7 holds, inside the band."""
        sums, (low, high) = self._sums, self.band
        first, last = bisect_right(sums.lengths, low), bisect_right(sums.lengths, high)

        def away_s(k: int) -> float:
            return max(sums.remote_s[k], sums.egress_s[k])

        def local_s(k: int) -> float:
            return sums.local_s[k] / num_prefill

        positions = range(first, last)
        k = first + bisect_left(positions, True, key=lambda k: local_s(k) >= away_s(k))
        return min((max(first, k - 1), k), key=lambda k: max(local_s(k), away_s(k)))

    def best_whole(self, num_nodes: int, num_mixed: int = 0) -> SplitLoad:
        """The best of N_p = 1 ... N-1. MIXED nodes besides count half for each stage."""
        low, high = 1, num_nodes - 1
        shared = num_mixed / 2
        while low < high:
            middle = (low + high) // 2
            load = self.at(middle + shared, num_nodes - middle + shared)
            low, high = (middle + 1, high) if load.produce_s > load.decode_s else (low, middle)
        splits = [self.at(n + shared, num_nodes - n + shared) for n in {max(1, low - 1), low}]
        return min(splits, key=lambda load: load.worst_s)

    def fractional(
        self, mode: str, num_nodes: int, num_others: int | None = None
    ) -> FractionalSplit | None:
        """The best split in which one node shares its time; None if there is no such.

        Args:
            mode: ``slices``: the drains cost ``slice_loss`` nodes. ``mixed``: a share φ of prefill
                time costs φ / (1 - decode_base_share) of the node's decode slots.
            num_others: fixes how many other nodes prefill.
        """
        if num_nodes < 3:
            return None
        loss = self.slice_loss if mode == "slices" else 0.0
        if num_others is None:
            at = self._crossing(1.0, num_nodes - 1.0, lambda n: (n, num_nodes - n - loss))
            num_others = min(int(at), num_nodes - 2)
        price = 1.0 if mode == "slices" else 1 / (1 - self.decode_base_share)
        fixed = num_others

        def split(share: float) -> tuple[float, float]:
            return fixed + share, num_nodes - fixed - share * price - loss

        share = self._crossing(_EDGE / price, (1 - _EDGE) / price, split)
        return FractionalSplit(
            mode=mode, num_others=fixed, share=share, load=self.at(*split(share))
        )

    def tokens_per_prefill_s(self, threshold_tokens: int | None) -> float:
        """Uncached tokens that one local node computes per second of its share of the lengths."""
        sums = self._sums
        k = len(sums.lengths)
        if threshold_tokens is not None:
            k = bisect_right(sums.lengths, threshold_tokens) or k
        return sums.tokens[k] / sums.local_s[k] if sums.local_s[k] > 0 else math.inf

    def _crossing(
        self, low: float, high: float, split: Callable[[float], tuple[float, float]]
    ) -> float:
        """Where prefill, which gains with the argument, catches up with decode, which loses."""
        for _ in range(_NUM_BISECTIONS):
            middle = (low + high) / 2
            load = self.at(*split(middle))
            low, high = (middle, high) if load.produce_s > load.decode_s else (low, middle)
        return (low + high) / 2


def _sums_from(values: list[float]) -> list[float]:
    """Position k: the sum of everything from k on."""
    return [*accumulate(reversed(values), initial=0.0)][::-1]
