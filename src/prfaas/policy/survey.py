"""What a router finds for one request: its decode node, and who may prefill, here and there."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from prfaas.core import ClusterId, ClusterKind, Role
from prfaas.errors import CapacityError
from prfaas.seams import Candidate, ClusterLoad, ClusterView, RoutedRequest

_T = TypeVar("_T")


class Survey:
    """The decode node, chosen first, and the candidates for prefill in reach of it.

    The decode node is one with the fewest requests among those of all PD clusters, of these one
    with the most rows of the prompt, of these any. Only where no PRFAAS cluster can prefill, or the
    link is down, it must be in a PD cluster that can; with a dead link and no such cluster the link
    is tried all the same, for nothing else is left. Nodes at their limit are passed over as long as
    another one would do.

    Attributes:
        decode: the decode node.
        decoders: the nodes that it was chosen from, full ones too.
        local: nodes of its cluster that may prefill.
        is_link_down: the link from PRFAAS to PD carries nothing.

    Raises:
        CapacityError: no node can decode, or none can prefill.
    """

    __slots__ = (
        "_clusters",
        "_has_remote",
        "_remote",
        "_rng",
        "decode",
        "decoders",
        "is_link_down",
        "local",
        "request",
        "view",
    )

    def __init__(
        self, request: RoutedRequest, view: ClusterView, rng: Random, *, is_link_down: bool = False
    ) -> None:
        self.request = request
        self.view = view
        self.is_link_down = is_link_down
        self._rng = rng
        self._clusters = view.clusters()
        self._has_remote: bool | None = None
        self._remote: Sequence[Candidate] | None = None
        self.decode = self._choose_decode()
        self.local = self._candidates(self.decode.node.cluster_id, Role.PREFILL)

    @property
    def remote(self) -> Sequence[Candidate]:
        """Nodes of every PRFAAS cluster that may prefill. Asked for on first use."""
        if self._remote is None:
            self._remote = [
                candidate
                for cluster in self._clusters
                if cluster.kind is ClusterKind.PRFAAS and cluster.num_prefill
                for candidate in self._candidates(cluster.cluster_id, Role.PREFILL)
            ]
        return self._remote

    def has_remote(self) -> bool:
        """Whether a PRFAAS node may prefill; cheaper than asking for them."""
        if self._has_remote is None:
            num_excluded = len(self.request.excluded)
            for cluster in self._clusters:
                if cluster.num_prefill > num_excluded and cluster.kind is ClusterKind.PRFAAS:
                    self._has_remote = True
                    break
            else:
                self._has_remote = bool(self.remote)
        return self._has_remote

    def _choose_decode(self) -> Candidate:
        decoding = [c for c in self._clusters if c.kind is ClusterKind.PD and c.num_decode]
        able = decoding
        if self.is_link_down or not self.has_remote():
            able = [cluster for cluster in decoding if self._prefills(cluster)]
        decoders = self._decoders(able)
        if not decoders:
            decoders = self._decoders(decoding)
            if not decoders:
                raise self._no_room("decode")
            if not self.has_remote():
                raise self._no_room("prefill")
        self.decoders = decoders
        if len(decoders) == 1:
            return decoders[0]
        decoders = preferred(decoders)
        loads = [(c.node.num_active, -c.hit.num_held_tokens) for c in decoders]
        return spread(decoders, loads, self._rng)

    def _decoders(self, clusters: Sequence[ClusterLoad]) -> Sequence[Candidate]:
        if len(clusters) == 1:
            return self._candidates(clusters[0].cluster_id, Role.DECODE)
        return [c for load in clusters for c in self._candidates(load.cluster_id, Role.DECODE)]

    def _prefills(self, cluster: ClusterLoad) -> bool:
        if not cluster.num_prefill or cluster.num_prefill > len(self.request.excluded):
            return cluster.num_prefill > 0
        return bool(self._candidates(cluster.cluster_id, Role.PREFILL))

    def _candidates(self, cluster_id: ClusterId, stage: Role) -> Sequence[Candidate]:
        return self.view.candidates(self.request, cluster_id, stage, self._rng)

    def _no_room(self, what: str) -> CapacityError:
        nodes = self.view.nodes()
        num_excluded = sum(node.node_id in self.request.excluded for node in nodes)
        return CapacityError(
            f"no node can {what} request {self.request.request_id!r}: {len(nodes)} nodes are up, "
            f"{num_excluded} of them excluded after failures, and none of the other "
            f"{len(nodes) - num_excluded} has a role that can {what} it; bring up or convert a PD "
            "node, then retry"
        )


def has_room(candidates: Sequence[Candidate]) -> bool:
    """Whether the node of one of them would not refuse a request."""
    return any(not candidate.node.is_full for candidate in candidates)


def not_full(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those whose node would not refuse a request."""
    return [c for c in candidates if not c.node.is_full]


def preferred(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those whose node would not refuse a request, or all of them where every node would."""
    return candidates if len(candidates) == 1 else not_full(candidates) or candidates


def longest(candidates: Sequence[Candidate]) -> int:
    """The longest usable hit among them, tokens."""
    longest_tokens = 0
    for candidate in candidates:
        num_tokens = candidate.hit.num_cached_tokens
        if num_tokens > longest_tokens:
            longest_tokens = num_tokens
    return longest_tokens


def spread(items: Sequence[_T], scores: Sequence[object], rng: Random) -> _T:
    """The item with the least score, at random among equals."""
    least = min(scores)  # type: ignore[type-var]
    equals = [item for item, score in zip(items, scores, strict=True) if score == least]
    return equals[0] if len(equals) == 1 else rng.choice(equals)
