"""The role of a simulated node, and its change to another one."""

from __future__ import annotations

from prfaas.core import Role
from prfaas.seams import ChangePhase


class Conversion:
    """The rules of a server: a change is done when no work of the role that it leaves remains, and
    until then only the way back is open."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.plan_epoch = 0
        self.is_draining = False
        self._leaves = role

    def ask(self, wanted: Role, plan_epoch: int) -> ChangePhase:
        """Begins a change. FAILED: it is refused; STARTED: `finish` it once nothing is left."""
        if self.is_draining and wanted not in (self.role, self._leaves):
            return ChangePhase.FAILED
        if wanted is self.role and not self.is_draining:
            return ChangePhase.DONE
        if wanted is not self.role:
            self.role, self._leaves = wanted, self.role
        self.is_draining = True
        self.plan_epoch = plan_epoch
        return ChangePhase.STARTED

    def finish(self) -> None:
        """No work of the earlier role is left, or the node is."""
        self.is_draining = False
