"""Which nodes are up, in which cluster, and what keeps every PD cluster able to serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError
from prfaas.seams import NodeDown, NodeUp


class UpNodes:
    """Nodes that came up and did not go down; news of an earlier life of one change nothing.

    Args:
        baseline: configured roles of PD nodes; a node that is not named keeps the role that it
            came up with.
    """

    def __init__(self, baseline: Mapping[NodeId, Role]) -> None:
        self._baseline = dict(baseline)
        self._up: dict[NodeId, NodeUp] = {}
        self._epochs: dict[NodeId, int] = {}

    def __getitem__(self, node_id: NodeId) -> NodeUp:
        return self._up[node_id]

    def get(self, node_id: NodeId) -> NodeUp | None:
        return self._up.get(node_id)

    def ids(self) -> frozenset[NodeId]:
        return frozenset(self._up)

    def remote(self) -> list[NodeUp]:
        """PRFAAS nodes that are up."""
        return [up for up in self._up.values() if up.kind is ClusterKind.PRFAAS]

    def up(self, event: NodeUp) -> bool:
        """Takes in a node; returns whether this begins a life of it.

        Raises:
            ConfigError: a PRFAAS node is configured for a role other than PREFILL.
        """
        configured = self._baseline.get(event.node_id, Role.PREFILL)
        if event.kind is ClusterKind.PRFAAS and configured is not Role.PREFILL:
            raise ConfigError(
                f"PRFAAS node {event.node_id!r} is configured as {configured.value}; PRFAAS nodes "
                "only prefill: take it out of the baseline, or move it to a PD cluster"
            )
        if event.epoch < self._epochs.get(event.node_id, event.epoch):
            return False
        before = self._up.get(event.node_id)
        self._epochs[event.node_id] = event.epoch
        self._up[event.node_id] = event
        return before is None or before.epoch != event.epoch

    def down(self, event: NodeDown) -> NodeUp | None:
        """Takes a node out; returns the life that ended, or None if it is not the one that ends."""
        if event.epoch < self._epochs.get(event.node_id, event.epoch):
            return None
        return self._up.pop(event.node_id, None)

    def configured(self, up: NodeUp) -> Role:
        """The role of a node while nothing is converted."""
        if up.kind is ClusterKind.PRFAAS:
            return Role.PREFILL
        return self._baseline.get(up.node_id, up.role)

    def pd_clusters(self) -> dict[ClusterId, list[NodeUp]]:
        clusters: dict[ClusterId, list[NodeUp]] = {}
        for up in self._up.values():
            if up.kind is ClusterKind.PD:
                clusters.setdefault(up.cluster_id, []).append(up)
        return clusters

    def roles(self, wanted: Mapping[NodeId, Role]) -> dict[NodeId, Role]:
        """The role of every node that is up: as wanted, or configured where nothing is.

        Where the nodes of a PD cluster could not both prefill and decode, all of them are MIXED.
        """
        roles = {up.node_id: self.configured(up) for up in self._up.values()}
        roles |= {n: r for n, r in wanted.items() if n in roles and self[n].kind is ClusterKind.PD}
        for nodes in self.pd_clusters().values():
            if not can_serve(roles[up.node_id] for up in nodes):
                roles |= {up.node_id: Role.MIXED for up in nodes}
        return roles


def can_serve(roles: Iterable[Role]) -> bool:
    """Whether nodes of these roles can serve a request from end to end."""
    roles = list(roles)
    return any(role.prefills for role in roles) and any(role.decodes for role in roles)
