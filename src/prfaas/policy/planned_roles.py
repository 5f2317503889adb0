"""The role that is planned for every node of the PD clusters, and the changes under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prfaas.core import ClusterKind, NodeId, Role
from prfaas.policy.role_changes import Change, RoleChanges
from prfaas.policy.situation import ClusterNodes
from prfaas.policy.up_nodes import UpNodes, can_serve
from prfaas.seams import NodeDown, NodeUp


class PlannedRoles:
    """Planned roles: those of the baseline, and what conversions made of them.

    A node that comes back takes up the role that was planned for it last.

    Args:
        baseline: configured roles of PD nodes; a node that is not named keeps the role that it
            came up with, and is forgotten when it goes.
        changes: the changes under way.
    """

    def __init__(self, baseline: Mapping[NodeId, Role], changes: RoleChanges) -> None:
        self.nodes = UpNodes(baseline)
        self.changes = changes
        self._baseline = frozenset(baseline)
        self._planned: dict[NodeId, Role] = {}
        self.num_conversions = 0
        self.num_slices = 0

    def __repr__(self) -> str:
        roles = ", ".join(f"{node_id} {role.value}" for node_id, role in self._planned.items())
        return f"<PlannedRoles {roles or 'none'}; {self.changes!r}>"

    def __getitem__(self, node_id: NodeId) -> Role:
        return self._planned[node_id]

    def up(self, event: NodeUp) -> bool:
        """Takes in a node; returns whether this begins a life of it."""
        if not self.nodes.up(event):
            return False
        self.cancel([event.node_id])
        self.changes.forget(event.node_id)
        if event.kind is ClusterKind.PD:
            self._planned.setdefault(event.node_id, self.nodes.configured(event))
        return True

    def down(self, event: NodeDown) -> NodeUp | None:
        """Takes a node out; returns the life that ended, if one did."""
        ended = self.nodes.down(event)
        if ended is not None:
            self.cancel([event.node_id])
            if event.node_id not in self._baseline:
                self._planned.pop(event.node_id, None)
        return ended

    def all_roles(self) -> dict[NodeId, Role]:
        """What a plan says: all MIXED where a cluster lacks a role."""
        return self.nodes.roles(self._planned)

    def can_serve(self, ids: Iterable[NodeId], but: Mapping[NodeId, Role] | None = None) -> bool:
        """Whether these nodes can serve a request as planned, or with some roles changed."""
        return can_serve({**{n: self._planned[n] for n in ids}, **(but or {})}.values())

    def split(self, ids: Iterable[NodeId], swing: NodeId | None) -> ClusterNodes:
        """Nodes of a cluster by planned role."""
        by_role: dict[Role, list[NodeId]] = {role: [] for role in Role}
        for node_id in ids:
            if node_id != swing:
                by_role[self._planned[node_id]].append(node_id)
        return ClusterNodes(
            prefill=tuple(by_role[Role.PREFILL]),
            decode=tuple(by_role[Role.DECODE]),
            num_mixed=len(by_role[Role.MIXED]),
            swing=swing,
        )

    def ask(
        self, roles: Mapping[NodeId, Role], *, plan_epoch: int, is_slice: bool, now: float
    ) -> None:
        """Plans other roles; the plan of ``plan_epoch`` will be the first to say so."""
        for node_id, new in roles.items():
            old, self._planned[node_id] = self._planned[node_id], new
            self.changes.ask(
                node_id, old=old, new=new, plan_epoch=plan_epoch, is_slice=is_slice, now=now
            )
        if is_slice:
            self.num_slices += len(roles)
        else:
            self.num_conversions += len(roles)

    def take_back(self, change: Change) -> None:
        """Plans the old role again for a change that is over."""
        self._planned[change.node_id] = change.old

    def cancel(self, ids: Iterable[NodeId]) -> None:
        """Takes back the changes of these nodes that are under way."""
        for change in self.changes.pending(ids):
            self.changes.cancel(change.node_id)
            self.take_back(change)

    def unshare(self, node_id: NodeId) -> None:
        """A node that was to serve both stages decodes again."""
        if self._planned.get(node_id) is Role.MIXED:
            self._planned[node_id] = Role.DECODE

    def stray(self, ids: Iterable[NodeId], swing: NodeId | None, now: float) -> dict[NodeId, Role]:
        """The first node that is left MIXED although nobody configured that and it is not the
        swing node, with a role of its own: the change that should have ended its sharing did not
        come about. That is its configured role, or the other
        one if nobody else has that."""
        ids = sorted(ids)
        for node_id in ids:
            home = self.nodes.configured(self.nodes[node_id])
            is_stray = self._planned[node_id] is Role.MIXED is not home and node_id != swing
            if is_stray and self.changes.may_try(node_id, now):
                other = Role.DECODE if home is Role.PREFILL else Role.PREFILL
                return {node_id: home if self.can_serve(ids, {node_id: home}) else other}
        return {}

    def homecoming(self, ids: Iterable[NodeId], now: float) -> dict[NodeId, Role]:
        """The first node that is away from its configured role and can be spared, with that."""
        ids = sorted(ids)
        for node_id in ids:
            home = {node_id: self.nodes.configured(self.nodes[node_id])}
            is_away = home[node_id] is not self._planned[node_id]
            if is_away and self.can_serve(ids, home) and self.changes.may_try(node_id, now):
                return home
        return {}

    def check(self, plan_epoch: int) -> None:
        """Asserts the invariants."""
        for name, ups in self.nodes.pd_clusters().items():
            ids = [up.node_id for up in ups]
            assert self._planned.keys() >= set(ids)
            epochs = {change.plan_epoch for change in self.changes.pending(ids)}
            assert len(epochs) <= 1, f"{name} has changes of the plans {epochs} under way"
        for change in self.changes.all():
            assert self.nodes[change.node_id].kind is ClusterKind.PD, change
            assert self._planned[change.node_id] is change.new is not change.old, change
            assert change.plan_epoch <= plan_epoch, change
