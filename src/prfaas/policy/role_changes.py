"""The changes of role that are under way: asked for, then done, failed or too late."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

from prfaas.core import NodeId, Role
from prfaas.seams import ChangePhase, RoleChanged


@attrs.frozen(kw_only=True)
class Change:
    """A change of one node.

    Attributes:
        plan_epoch: the plan that asked for it first, which names it.
        old, new: roles.
        is_slice: a flip of a node that alternates anyway.
        asked_s, deadline_s: when it was asked for, and when it is rolled back if not done.
    """

    node_id: NodeId
    plan_epoch: int
    old: Role
    new: Role
    is_slice: bool
    asked_s: float
    deadline_s: float


class RoleChanges:
    """At most one change per node; a node whose change failed is left alone for a while.

    Args:
        deadline_s: time that a change has.
        backoff_s: time for which a node is not tried again.
    """

    def __init__(self, *, deadline_s: float, backoff_s: float) -> None:
        self._deadline_s = deadline_s
        self._backoff_s = backoff_s
        self._pending: dict[NodeId, Change] = {}
        self._not_before_s: dict[NodeId, float] = {}

    def __repr__(self) -> str:
        changes = ", ".join(
            f"{change.node_id} {change.old.value} -> {change.new.value}"
            for change in self._pending.values()
        )
        return f"<RoleChanges {changes or 'none'}>"

    def ask(
        self,
        node_id: NodeId,
        *,
        old: Role,
        new: Role,
        plan_epoch: int,
        is_slice: bool,
        now: float,
    ) -> None:
        """Begins a change."""
        assert node_id not in self._pending, f"{node_id} is changing already"
        self._pending[node_id] = Change(
            node_id=node_id,
            plan_epoch=plan_epoch,
            old=old,
            new=new,
            is_slice=is_slice,
            asked_s=now,
            deadline_s=now + self._deadline_s,
        )

    def ended(self, event: RoleChanged, now: float) -> tuple[Change, bool] | None:
        """The change that this news ends, and whether it is done; None for any other news.

        A node that is done with another role than the asked one has failed.
        """
        change = self._pending.get(event.node_id)
        if (
            change is None
            or event.plan_epoch != change.plan_epoch
            or event.phase is ChangePhase.STARTED
        ):
            return None
        del self._pending[event.node_id]
        ok = event.phase is ChangePhase.DONE and event.role is change.new
        if not ok:
            self._not_before_s[event.node_id] = now + self._backoff_s
        return change, ok

    def expire(self, now: float) -> list[Change]:
        """Ends the changes that are too late, and returns them."""
        late = [change for change in self._pending.values() if change.deadline_s <= now]
        for change in late:
            del self._pending[change.node_id]
            self._not_before_s[change.node_id] = now + self._backoff_s
        return late

    def cancel(self, node_id: NodeId) -> Change | None:
        """Ends a change without a verdict on the node; returns it if there was one."""
        return self._pending.pop(node_id, None)

    def forget(self, node_id: NodeId) -> None:
        """A node began a new life: what it failed in the last one does not count."""
        self._not_before_s.pop(node_id, None)

    def may_try(self, node_id: NodeId, now: float) -> bool:
        """Whether a change of this node can be asked for."""
        return node_id not in self._pending and now >= self._not_before_s.get(node_id, -math.inf)

    def pending(self, node_ids: Iterable[NodeId]) -> list[Change]:
        """The changes of these nodes that are under way."""
        return [self._pending[node_id] for node_id in node_ids if node_id in self._pending]

    def all(self) -> list[Change]:
        return list(self._pending.values())
