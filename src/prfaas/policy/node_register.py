"""The accounts of all nodes that are up, by name, by position and by cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

from prfaas.core import ClusterId, NodeId, Role
from prfaas.policy.cluster_account import ClusterAccount
from prfaas.policy.global_index import HitLevel
from prfaas.policy.node_account import NodeAccount
from prfaas.policy.node_set import NodeSet
from prfaas.seams import Candidate, ClusterLoad


class NodeRegister:
    """Nodes in the order in which they came; a node that restarts keeps its place."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, NodeAccount] = {}
        self._by_position: dict[int, NodeAccount] = {}
        self._clusters: dict[ClusterId, ClusterAccount] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[NodeAccount]:
        return iter(self._nodes.values())

    def __getitem__(self, node_id: NodeId) -> NodeAccount:
        return self._nodes[node_id]

    def get(self, node_id: NodeId) -> NodeAccount | None:
        return self._nodes.get(node_id)

    @property
    def queued_tokens(self) -> int:
        return sum(cluster.load().queued_tokens for cluster in self._clusters.values())

    def put(self, node: NodeAccount) -> None:
        """Takes in a node in the place of its earlier life, if it has one here."""
        up = node.up
        known = self._nodes.get(up.node_id)
        if known is not None:
            self._clusters[known.up.cluster_id].forget(known)
            del self._by_position[known.position]
        self._nodes[up.node_id] = self._by_position[node.position] = node
        if up.cluster_id not in self._clusters:
            self._clusters[up.cluster_id] = ClusterAccount(up.cluster_id, up.kind)
        self.refresh(node)
        if known is not None:
            self._drop_if_empty(known.up.cluster_id)

    def drop(self, node: NodeAccount) -> None:
        del self._nodes[node.up.node_id], self._by_position[node.position]
        self._clusters[node.up.cluster_id].forget(node)
        self._drop_if_empty(node.up.cluster_id)

    def refresh(self, node: NodeAccount) -> None:
        """Call it after every change of a node's account."""
        node.touch()
        self._clusters[node.up.cluster_id].refresh(node)

    def count(self, node: NodeAccount) -> None:
        """As `refresh`, where nothing but its load has changed."""
        node.touch()
        self._clusters[node.up.cluster_id].count(node)

    def clusters(self) -> Sequence[ClusterLoad]:
        """Clusters that have nodes, in the order in which they came."""
        return [cluster.load() for cluster in self._clusters.values()]

    def candidates(
        self,
        cluster_id: ClusterId,
        stage: Role,
        levels: Sequence[HitLevel],
        excluded: Iterable[NodeId],
        rng: Random,
    ) -> Sequence[Candidate]:
        """See `ClusterView.candidates`; ``levels`` are the hits of all nodes."""
        cluster = self._clusters.get(cluster_id)
        if cluster is None:
            return []
        out: NodeSet = 0
        for node_id in excluded:
            node = self._nodes.get(node_id)
            if node is not None:
                out |= 1 << node.position
        nodes = self._by_position
        found = cluster.least_loaded(stage, levels, out, rng)
        return [Candidate(node=nodes[position].view(), hit=hit) for position, hit in found]

    def check(self) -> None:
        """Asserts the invariants."""
        assert self._by_position == {node.position: node for node in self}
        assert {node.up.cluster_id for node in self} == set(self._clusters)
        for node in self:
            node.check()
        for cluster_id, cluster in self._clusters.items():
            cluster.check([node for node in self if node.up.cluster_id == cluster_id])

    def _drop_if_empty(self, cluster_id: ClusterId) -> None:
        if not len(self._clusters[cluster_id]):
            del self._clusters[cluster_id]
