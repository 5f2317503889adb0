"""A balancer that orders the roles that a test asks for."""

from __future__ import annotations

from collections.abc import Mapping

from clusters import ROLES, Deployment
from prfaas.core import NodeId, Role
from prfaas.policy import FixedRoles
from prfaas.seams import BalancerEvent, ChangePhase, Plan, RoleChanged

NAMES = ("remote", "local1", "local2", "decode1", "decode2")


class Orders(FixedRoles):
    """Publishes whatever roles a test asks for, and remembers what it was told."""

    def __init__(self, threshold: int) -> None:
        self._band = (threshold, threshold)
        baseline = {NodeId(name): ROLES[name.rstrip("0123456789")][1] for name in NAMES}
        super().__init__(baseline, self._band)
        self.ordered = Plan(epoch=1, roles=baseline, threshold_band=self._band)
        self.heard: list[BalancerEvent] = []

    def observe(self, event: BalancerEvent, now: float) -> None:
        super().observe(event, now)
        self.heard.append(event)

    def plan(self, now: float) -> Plan:
        return self.ordered

    def order(self, roles: Mapping[str, Role], budgets: Mapping[str, int] | None = None) -> None:
        """From here on; what was heard before is forgotten."""
        now = self.ordered
        self.heard.clear()
        self.ordered = Plan(
            epoch=now.epoch + 1,
            roles={**now.roles, **{NodeId(name): role for name, role in roles.items()}},
            threshold_band=self._band,
            prefill_budgets={NodeId(name): num for name, num in (budgets or {}).items()},
        )

    def phases(self, name: str) -> list[ChangePhase]:
        changes = [event for event in self.heard if isinstance(event, RoleChanged)]
        return [change.phase for change in changes if change.node_id == name]


def role_of(d: Deployment, name: str) -> tuple[Role, bool]:
    view = next(view for view in d.ledger.nodes() if view.node_id == name)
    return view.role, view.is_draining
