"""Time slices of one node that alternates between prefill and decode."""

from __future__ import annotations

import math

from prfaas.core import NodeId, Role


class Swing:
    """Keeps the share of time that one node prefills at its target.

    It counts by how much the prefill time is ahead of the target. The count rises by 1 - share
    per second of prefill and falls by share per second of decode; the node flips whenever it has
    gone share (1 - share) period / 2 too far. That makes slices of share * period and
    (1 - share) * period, and what a drain, a failure or an early flip takes from one slice comes
    back in the next ones.

    Args:
        node_id: the node.
        role: PREFILL or DECODE, which it serves now.
        share: target, between 0 and 1.
        period_s: a whole cycle.
    """

    def __init__(
        self, node_id: NodeId, *, role: Role, share: float, period_s: float, now: float
    ) -> None:
        self.node_id = node_id
        self._role = role
        self._share = share
        self._period_s = period_s
        self._now = self._since_s = now
        self._ahead_s = 0.0

    def __repr__(self) -> str:
        return (
            f"<Swing {self.node_id} {self._role.value}, {self._share:.2f} prefill of "
            f"{self._period_s:.0f} s, {self._ahead_s:+.1f} s>"
        )

    @property
    def share(self) -> float:
        return self._share

    def retune(self, share: float, period_s: float, now: float) -> None:
        """Takes over a new target."""
        self._count(now)
        self._share, self._period_s = share, period_s

    def serves(self, role: Role, now: float) -> None:
        """The node has come to serve ``role``."""
        self._count(now)
        self._role, self._since_s = role, now

    def flip_s(self) -> float:
        """When the node has to flip."""
        if self._role is Role.PREFILL:
            return self._now + (self._limit_s - self._ahead_s) / (1 - self._share)
        return self._now + (self._limit_s + self._ahead_s) / self._share

    def wanted(self, now: float, *, is_idle: bool) -> Role:
        """The role for now.

        Args:
            is_idle: its stage has nothing waiting and the other one has; then half a slice is
                enough.
        """
        self._count(now)
        is_due = now >= self.flip_s() - 1e-9
        if is_due or (is_idle and now - self._since_s >= self._slice_s / 2):
            return Role.DECODE if self._role is Role.PREFILL else Role.PREFILL
        return self._role

    def check(self) -> None:
        """Asserts the invariants."""
        assert self._role is not Role.MIXED
        assert 0 < self._share < 1
        assert math.isfinite(self._ahead_s)

    @property
    def _limit_s(self) -> float:
        return self._share * (1 - self._share) * self._period_s / 2

    @property
    def _slice_s(self) -> float:
        return self._period_s * (self._share if self._role is Role.PREFILL else 1 - self._share)

    def _count(self, now: float) -> None:
        elapsed_s = max(0.0, now - self._now)
        rate = 1 - self._share if self._role is Role.PREFILL else -self._share
        self._ahead_s += elapsed_s * rate
        self._now = max(now, self._now)
