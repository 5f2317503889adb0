"""The live account of one node: what it has to do, how fast it is, and how busy it was."""

from __future__ import annotations

import attrs

from prfaas.core import RequestId, Role
from prfaas.seams import NodeLoad, NodeUp, NodeView

_KEEP = 0.8
"""Share of the past that each new rate sample leaves standing (EWMA with weight 0.2)."""


class Rate:
    """Work over time, both decaying alike: long samples weigh more than short ones.

    Attributes:
        work_per_s, s_per_work: None before the first sample.
    """

    __slots__ = ("_seconds", "_work", "s_per_work", "work_per_s")

    def __init__(self) -> None:
        self._work = 0.0
        self._seconds = 0.0
        self.work_per_s: float | None = None
        self.s_per_work: float | None = None

    def observe(self, work: float, seconds: float) -> None:
        self._work = _KEEP * self._work + work
        self._seconds = _KEEP * self._seconds + seconds
        self.work_per_s = self._work / self._seconds if self._seconds > 0 else None
        self.s_per_work = self._seconds / self._work if self._work > 0 else None


class NodeAccount:
    """One life of a node.

    Attributes:
        up: what it said when it came up, with the role that it has now.
        position: of the node in every `NodeSet`.
        is_draining: it takes nothing new.
        takes_prefill, takes_decode: whether new work of that stage may be sent to it.
        active: requests that occupy it.
        queued_tokens: uncached prompt tokens admitted and not yet prefilled.
        num_decoding: requests of it that are prefilled and not finished.
    """

    __slots__ = (
        "_begin_s",
        "_decode",
        "_prefill",
        "_prefill_s",
        "_since_s",
        "_slot_s",
        "_view",
        "active",
        "is_draining",
        "num_decoding",
        "position",
        "queued_tokens",
        "takes_decode",
        "takes_prefill",
        "up",
    )

    def __init__(self, up: NodeUp, position: int, now: float | None) -> None:
        self.up = up
        self.position = position
        self.serve(up.role, is_draining=False)
        self.active: set[RequestId] = set()
        self.queued_tokens = 0
        self.num_decoding = 0
        self._prefill = Rate()
        self._decode = Rate()
        self._view: NodeView | None = None
        self._begin_s = self._since_s = now
        self._prefill_s = 0.0
        self._slot_s = 0.0

    def serve(self, role: Role, *, is_draining: bool) -> None:
        """Changes what it takes."""
        if role is not self.up.role:
            self.up = attrs.evolve(self.up, role=role)
        self.is_draining = is_draining
        self.takes_prefill = role.prefills and not is_draining
        self.takes_decode = role.decodes and not is_draining

    def touch(self) -> None:
        """Call it after every change that a view shows."""
        self._view = None

    def view(self) -> NodeView:
        """What policies see; the same object until the account changes."""
        if self._view is None:
            up = self.up
            self._view = NodeView(
                node_id=up.node_id,
                cluster_id=up.cluster_id,
                kind=up.kind,
                role=up.role,
                epoch=up.epoch,
                num_active=len(self.active),
                queued_tokens=self.queued_tokens,
                prefill_tokens_per_s=self._prefill.work_per_s,
                decode_step_s=self._decode.s_per_work,
                is_draining=self.is_draining,
                max_active=up.max_active,
            )
        return self._view

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._prefill.observe(num_tokens, seconds)
        self._view = None

    def observe_decode(self, num_steps: int, seconds: float) -> None:
        self._decode.observe(num_steps, seconds)
        self._view = None

    def begin(self, now: float) -> None:
        """Starts a period."""
        self._begin_s = self._since_s = now
        self._prefill_s = 0.0
        self._slot_s = 0.0

    def queue(self, num_tokens: int, now: float | None) -> None:
        """More prompt tokens to compute, or fewer, from ``now`` on."""
        self._settle(now)
        self.queued_tokens += num_tokens

    def count_decoding(self, change: int, now: float | None) -> None:
        """More requests, or fewer, decode from ``now`` on."""
        self._settle(now)
        self.num_decoding += change

    def take_load(self, now: float) -> NodeLoad:
        """What it did from the start of the period to ``now``, where the next one starts."""
        self._settle(now)
        period_s = 0.0 if self._begin_s is None else now - self._begin_s
        up, num_decoding = self.up, self.num_decoding
        num_slots, num_waiting = up.num_slots, 0
        if num_slots is not None and num_slots < num_decoding:
            num_waiting = num_decoding - num_slots
        if not num_slots:
            decode_busy = 1.0 if num_decoding else 0.0
        elif period_s > 0:
            decode_busy = min(1.0, self._slot_s / (period_s * num_slots))
        else:
            decode_busy = (num_decoding - num_waiting) / num_slots
        prefill_busy = min(1.0, self._prefill_s / period_s) if period_s > 0 else 0.0
        self.begin(now)
        return NodeLoad(
            node_id=up.node_id,
            epoch=up.epoch,
            prefill_busy=prefill_busy,
            decode_busy=decode_busy,
            queued_tokens=self.queued_tokens,
            num_waiting=num_waiting,
        )

    def check(self) -> None:
        """Asserts that the view is not an old one."""
        view = self._view
        self.touch()
        assert view is None or view == self.view(), f"an old view of {self.up.node_id}"

    def _settle(self, now: float | None) -> None:
        """Books the time since the last change."""
        if now is None or self._since_s is None or now == self._since_s:
            return
        elapsed_s = now - self._since_s
        if self.num_decoding:
            num_slots, num_taken = self.up.num_slots, self.num_decoding
            if num_slots is not None and num_slots < num_taken:
                num_taken = num_slots
            self._slot_s += num_taken * elapsed_s
        if self.queued_tokens:
            self._prefill_s += elapsed_s
        self._since_s = now
