"""The null balancer: the configured roles, except where a PD cluster would lack one."""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.core import NodeId, Role
from prfaas.policy.up_nodes import UpNodes, can_serve
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
        self._nodes = UpNodes(baseline)
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
            self._nodes.up(event)
        elif isinstance(event, NodeDown):
            self._nodes.down(event)
        else:
            return
        roles = self._nodes.roles({})
        if roles != self._plan.roles:
            self._plan = Plan(
                epoch=self._plan.epoch + 1, roles=roles, threshold_band=self._plan.threshold_band
            )

    def plan(self, now: float) -> Plan:
        return self._plan

    def check(self) -> None:
        """Asserts that every PD cluster that has nodes can serve a request from end to end."""
        assert self._plan.roles.keys() == self._nodes.ids()
        for cluster_id, nodes in self._nodes.pd_clusters().items():
            roles = [self._plan.roles[up.node_id] for up in nodes]
            assert can_serve(roles), f"{cluster_id} is left with {roles}"
