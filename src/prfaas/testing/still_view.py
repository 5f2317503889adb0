"""A `ClusterView` in which nothing happens, and the examples that routers are checked on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import attrs

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.seams import Candidate, ClusterView, NodeHit, NodeView, RoutedRequest


@attrs.frozen(kw_only=True)
class StillView(ClusterView):
    """A `ClusterView` in which nothing happens.

    Attributes:
        views: the nodes that are up.
        hits: predicted hits; nodes that are not named have none.
        rate_bps: link rate.
        version: any number.
        backlog_bytes: what is on its way over the link.
        is_sparse: `candidates` names no more than it has to: one node for each hit.
    """

    views: Sequence[NodeView]
    hits: Mapping[NodeId, NodeHit] = attrs.field(factory=dict)
    rate_bps: float | None = None
    version: int = 7
    backlog_bytes: int = 0
    is_sparse: bool = False

    def nodes(self) -> Sequence[NodeView]:
        return self.views

    def hit(self, node_id: NodeId, request: RoutedRequest) -> NodeHit:
        return self.hits.get(node_id, NodeHit())

    def link_bps(self) -> float | None:
        return self.rate_bps

    def link_backlog_bytes(self) -> int:
        return self.backlog_bytes

    def candidates(
        self, request: RoutedRequest, cluster_id: ClusterId, stage: Role, rng: Random
    ) -> Sequence[Candidate]:
        everyone = ClusterView.candidates(self, request, cluster_id, stage, rng)
        if not self.is_sparse:
            return everyone
        by_hit: dict[NodeHit, list[Candidate]] = {}
        for candidate in everyone:
            by_hit.setdefault(candidate.hit, []).append(candidate)
        found = []
        for equals in by_hit.values():
            least = min(_load(c.node, stage) for c in equals)
            idlest = [c for c in equals if _load(c.node, stage) == least]
            found.append(idlest[0] if len(idlest) == 1 else rng.choice(idlest))
        return found


def example_views() -> list[StillView]:
    """Clusters that can serve: whole, one-sided, mixed, loaded, draining, full, several of each."""
    remote, local = prfaas_nodes("r", 3), pd_nodes("p", 2, Role.PREFILL)
    decoders = pd_nodes("d", 2, Role.DECODE)
    busy = [
        attrs.evolve(node, num_active=i, queued_tokens=30_000 * i, prefill_tokens_per_s=9_000.0)
        for i, node in enumerate(remote + local + decoders)
    ]
    hits = {
        NodeId("p0"): NodeHit(num_cached_tokens=32_000, num_held_tokens=38_400),
        NodeId("r1"): NodeHit(num_cached_tokens=6_400, num_held_tokens=6_400),
        NodeId("d1"): NodeHit(num_cached_tokens=0, num_held_tokens=12_800),
    }
    far = [attrs.evolve(node, cluster_id=ClusterId("far")) for node in _pd("q", "e")]
    further = [attrs.evolve(n, cluster_id=ClusterId("further")) for n in prfaas_nodes("s", 2)]
    many = [*busy, *far, *further]
    whole = [
        StillView(views=remote + local + decoders),
        StillView(views=local + decoders),
        StillView(views=remote + decoders),
        StillView(views=remote + pd_nodes("m", 2)),
        StillView(views=pd_nodes("m", 1)),
        StillView(views=busy, rate_bps=1e9),
        StillView(views=busy, hits=hits, rate_bps=1e9, backlog_bytes=10**8),
        StillView(views=_draining(busy, "r0", "p0", "d0"), hits=hits, rate_bps=1e9),
        StillView(views=_draining(busy, "r0", "r1", "r2"), hits=hits, rate_bps=1e9),
        StillView(views=_full(busy, "r0", "p0", "d0"), hits=hits, rate_bps=1e9),
        StillView(views=_full(busy, "r0", "r1", "r2"), hits=hits, rate_bps=1e9),
        StillView(views=_full(busy, "p0", "p1"), hits=hits, rate_bps=1e9),
        StillView(views=many, hits=hits, rate_bps=1e9),
        StillView(views=[*decoders, *far, *further], rate_bps=1e9),
        StillView(views=[*decoders, *far], rate_bps=1e9),
    ]
    return whole + [attrs.evolve(view, is_sparse=True) for view in whole]


def prfaas_nodes(name: str, num: int) -> list[NodeView]:
    """Idle nodes of a PRFAAS cluster."""
    return _nodes(name, num, ClusterKind.PRFAAS, Role.PREFILL)


def pd_nodes(name: str, num: int, role: Role = Role.MIXED) -> list[NodeView]:
    """Idle nodes of a PD cluster."""
    return _nodes(name, num, ClusterKind.PD, role)


def _pd(prefill: str, decode: str) -> list[NodeView]:
    return pd_nodes(prefill, 2, Role.PREFILL) + pd_nodes(decode, 2, Role.DECODE)


def _nodes(name: str, num: int, kind: ClusterKind, role: Role) -> list[NodeView]:
    return [
        NodeView(
            node_id=NodeId(f"{name}{i}"),
            cluster_id=ClusterId(kind.value),
            kind=kind,
            role=role,
            epoch=1,
            num_active=0,
            queued_tokens=0,
            prefill_tokens_per_s=None,
            decode_step_s=None,
        )
        for i in range(num)
    ]


def _draining(views: Sequence[NodeView], *names: str) -> list[NodeView]:
    return [attrs.evolve(v, is_draining=v.node_id in names) for v in views]


def _full(views: Sequence[NodeView], *names: str) -> list[NodeView]:
    return [attrs.evolve(v, max_active=v.num_active if v.node_id in names else 99) for v in views]


def _load(node: NodeView, stage: Role) -> int:
    return node.queued_tokens if stage is Role.PREFILL else node.num_active
