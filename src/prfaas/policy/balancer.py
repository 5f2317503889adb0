"""The null balancer: the configured roles, except where a PD cluster would lack one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError
from prfaas.seams import BalancerEvent, NodeDown, NodeUp, Plan, RoleBalancer


class FixedRoles(RoleBalancer):
    """Publishes each node's configured role and never converts a node to balance load.

    When the nodes of a PD cluster that are up can no longer both prefill and decode, all of them
    become MIXED, until the configured roles suffice again. PRFAAS nodes always prefill.

    Args:
        baseline: configured roles of PD nodes; a node that is not named keeps the role that it
            came up with.
        band: least and greatest t of every plan, tokens.
    """

    def __init__(self, baseline: Mapping[NodeId, Role], band: tuple[int, int]) -> None:
        self._baseline = dict(baseline)
        self._up: dict[NodeId, NodeUp] = {}
        self._epochs: dict[NodeId, int] = {}
        self._plan = Plan(epoch=0, roles={}, threshold_band=band)

    def __repr__(self) -> str:
        roles = ", ".join(f"{node_id} {role.value}" for node_id, role in self._plan.roles.items())
        return f"<FixedRoles plan {self._plan.epoch}: {roles or 'no nodes'}>"

    def observe(self, event: BalancerEvent, now: float) -> None:
        """Takes in a node that came or went; events of an earlier epoch of it change nothing.

        How a change of role ended changes nothing either: the plan still asks for the role.

        Raises:
            ConfigError: a PRFAAS node is configured for a role other than PREFILL.
        """
        if isinstance(event, NodeUp):
            self._node_up(event)
        elif isinstance(event, NodeDown):
            self._node_down(event)
        roles = self._roles()
        if roles != self._plan.roles:
            self._plan = Plan(
                epoch=self._plan.epoch + 1, roles=roles, threshold_band=self._plan.threshold_band
            )

    def plan(self, now: float) -> Plan:
        return self._plan

    def check(self) -> None:
        """Asserts that every PD cluster that has nodes can serve a request from end to end."""
        assert self._plan.roles.keys() == self._up.keys()
        for nodes in self._pd_clusters().values():
            roles = [self._plan.roles[up.node_id] for up in nodes]
            assert _can_serve(roles), f"{nodes[0].cluster_id} is left with {roles}"

    def _node_up(self, event: NodeUp) -> None:
        configured = self._baseline.get(event.node_id, Role.PREFILL)
        if event.kind is ClusterKind.PRFAAS and configured is not Role.PREFILL:
            raise ConfigError(
                f"PRFAAS node {event.node_id!r} is configured as {configured.value}; PRFAAS nodes "
                "only prefill: take it out of the baseline, or move it to a PD cluster"
            )
        if event.epoch >= self._epochs.get(event.node_id, event.epoch):
            self._epochs[event.node_id] = event.epoch
            self._up[event.node_id] = event

    def _node_down(self, event: NodeDown) -> None:
        if event.epoch >= self._epochs.get(event.node_id, event.epoch):
            self._up.pop(event.node_id, None)

    def _roles(self) -> dict[NodeId, Role]:
        roles = {up.node_id: self._configured(up) for up in self._up.values()}
        for nodes in self._pd_clusters().values():
            if not _can_serve(roles[up.node_id] for up in nodes):
                roles |= {up.node_id: Role.MIXED for up in nodes}
        return roles

    def _configured(self, up: NodeUp) -> Role:
        if up.kind is ClusterKind.PRFAAS:
            return Role.PREFILL
        return self._baseline.get(up.node_id, up.role)

    def _pd_clusters(self) -> dict[ClusterId, list[NodeUp]]:
        clusters: dict[ClusterId, list[NodeUp]] = {}
        for up in self._up.values():
            if up.kind is ClusterKind.PD:
                clusters.setdefault(up.cluster_id, []).append(up)
        return clusters


def _can_serve(roles: Iterable[Role]) -> bool:
    roles = list(roles)
    return any(role.prefills for role in roles) and any(role.decodes for role in roles)
