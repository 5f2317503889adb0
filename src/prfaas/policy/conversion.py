"""A node's change of role, and how far it is."""

from __future__ import annotations

from prfaas.core import Role
from prfaas.seams import ChangePhase


class Conversion:
    """The role that a node admits work for, and the change to it, if that is not over yet.

    Work that this role would not admit is worked off, or given back, before the change is done.
    Another role may be asked for at any time, whatever was left before: where a cluster lost all
    nodes of a role, those that drain are the ones to turn to.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.plan_epoch = 0
        self.is_draining = False

    def __repr__(self) -> str:
        return f"<Conversion {self.role.value}{', draining' if self.is_draining else ''}>"

    def ask(self, wanted: Role, plan_epoch: int) -> ChangePhase:
        """Begins a change, or goes on with it under the epoch that it has.

        Returns:
            DONE: the role is in force and nothing changes. STARTED: call `drained` when no work
            is left that the role would not admit.
        """
        if wanted is not self.role:
            self.role, self.plan_epoch, self.is_draining = wanted, plan_epoch, True
        return ChangePhase.STARTED if self.is_draining else ChangePhase.DONE

    def drained(self) -> int:
        """The change is over. Returns the epoch of the plan that asked for it first."""
        self.is_draining = False
        return self.plan_epoch
