"""A node's change of role: who may ask for one, and how far it is."""

from __future__ import annotations

from prfaas.core import Role
from prfaas.seams import ChangePhase


class Conversion:
    """The role that a node admits work for, and the change to it, if that is not over yet.

    Work of the role that a node leaves is worked off, or given back, before the change is done.
    Until then only the way back is open: a second change would leave work of three roles.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.plan_epoch = 0
        self._leaves: Role | None = None

    def __repr__(self) -> str:
        leaves = "" if self._leaves is None else f", leaves {self._leaves.value}"
        return f"<Conversion {self.role.value}{leaves}>"

    @property
    def is_draining(self) -> bool:
        """Whether a change is not over yet."""
        return self._leaves is not None

    def ask(self, wanted: Role, plan_epoch: int) -> ChangePhase:
        """Begins a change, or refuses it.

        Returns:
            DONE: the role is in force and nothing changes. STARTED: call `drained` when no work
            of the old role is left. FAILED: the role stays as it is.
        """
        if self._leaves is not None and wanted not in (self.role, self._leaves):
            return ChangePhase.FAILED
        if wanted is not self.role:
            self.role, self._leaves = wanted, self.role
        if self._leaves is None:
            return ChangePhase.DONE
        self.plan_epoch = plan_epoch
        return ChangePhase.STARTED

    def drained(self) -> int:
        """The change is over. Returns the epoch of the plan that asked for it."""
        self._leaves = None
        return self.plan_epoch
