"""What every job of a worker has: one attempt at one request, its blocks, and how it ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from functools import partial
from typing import ClassVar, TypeVar

from prfaas.core import RequestId, Role
from prfaas.errors import PrfaasError, TransportError
from prfaas.runtime.line import Line
from prfaas.runtime.messages import (
    Expect,
    Failed,
    Message,
    Prefill,
    Work,
    plain_text,
    unpack_tokens,
)
from prfaas.runtime.node import Node
from prfaas.runtime.tasks import report
from prfaas.seams import Reservation
from prfaas.transfer import EndCode
from prfaas.transfer import Message as TransferMessage

T = TypeVar("T")
OnOver = Callable[["Job"], None]


def admits(role: Role, work: Work) -> bool:
    """Whether a node in this role takes this kind of work."""
    match work:
        case Prefill():
            return role.prefills
        case Expect():
            return role.decodes
    # A prompt of one token leaves nothing to ship under Handoff.BEFORE_LAST.
    return role is Role.MIXED or (work.num_tokens == 1 and role.decodes)


class Job(ABC):
    """One attempt at one request on this worker.

    The engine loop calls `prefill_segment` and `decode_step` when the schedule says so. A job may
    be cancelled and released at any time and in any order; its memory is given back when neither
    the engine nor the transport touches it any more.

    Args:
        node: the worker's resources.
        work: what the gateway asked for.
        gateway: where it asked from.
        on_over: called once, when nothing of the job is left.
    """

    stage: ClassVar[str]
    reservation: Reservation

    def __init__(self, node: Node, work: Work, gateway: Line, on_over: OnOver) -> None:
        self.node = node
        self.work = work
        self.gateway = gateway
        self.key = RequestId(work.key)
        self.tokens = unpack_tokens(work.tokens)
        self.until_s = node.clock() + work.deadline_s
        self.is_cancelled = False
        self._on_over = on_over
        self._is_over = False

    def __repr__(self) -> str:
        state = "over" if self._is_over else "cancelled" if self.is_cancelled else "alive"
        return f"<{type(self).__name__} {self.key!r} {state}>"

    @abstractmethod
    async def prefill_segment(self) -> None:
        """Runs one prefill segment in the engine."""

    @abstractmethod
    async def decode_step(self) -> None:
        """Runs one decode step in the engine."""

    @abstractmethod
    def tick(self, moving: Container[Line]) -> None:
        """Keeps the transfer alive; called about ten times a second.

        Args:
            moving: lines that delivered bytes since the last call.
        """

    @property
    @abstractmethod
    def peer_line(self) -> Line | None:
        """Where the other side of the transfer is, once it is known."""

    @abstractmethod
    def feed(self, line: Line, message: TransferMessage) -> bool:
        """A message of the other side; False if it is not part of this job's transfer."""

    @abstractmethod
    def peer_lost(self, reason: str) -> None:
        """The line to the other side ended."""

    @abstractmethod
    def _end(self, reason: str, code: EndCode) -> None:
        """Ends the transfer if there is one, and releases."""

    @property
    def is_wanted(self) -> bool:
        """Whether the job may go on: it was neither cancelled nor released."""
        return not (self.is_cancelled or self._is_over)

    def cancel(self, reason: str, code: EndCode = EndCode.CANCELLED) -> None:
        """Nobody wants the job any more: says nothing to the gateway, and ends. Idempotent."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.node.schedule.remove(self.key)
            self._end(reason, code)

    @property
    def is_allowed(self) -> bool:
        """Whether the node's present role would admit it."""
        return admits(self.node.role, self.work)

    @property
    def is_begun(self) -> bool:
        """Whether the engine has worked for it."""
        return True

    def fail(
        self, reason: str, *, retryable: bool = True, at_fault: str = "", busy: bool = False
    ) -> None:
        """Tells the gateway that the attempt failed, unless it was cancelled before. The caller
        cancels or releases the job."""
        if self.is_cancelled:
            return
        self.node.counters["given_back" if busy else "failed"] += 1
        self.reply(
            Failed(
                request_id=self.work.request_id,
                attempt=self.work.attempt,
                stage=self.stage,
                reason=reason,
                retryable=retryable,
                at_fault=at_fault,
                busy=busy,
            )
        )

    def fail_step(self, error: Exception) -> None:
        """As `fail`, for a step in the engine that raised: a failure of this request only."""
        self.node.counters["steps_failed"] += 1
        if not isinstance(error, PrfaasError):
            report(f"a step of {self!r} failed unexpectedly", error)
        self.fail(plain_text(error), at_fault=self.node.config.node_id)

    def reply(self, message: Message) -> None:
        """Says something to the gateway; one that is gone is about to be noticed elsewhere."""
        try:
            self.gateway.post(message)
        except TransportError:
            self.node.counters["replies_lost"] += 1

    async def in_engine(self, work: Callable[[], T]) -> T | None:
        """Runs one engine call; None if the job ended meanwhile."""
        result = await self.node.in_engine(work)
        return result if self.is_wanted else None

    def schedule_prefill(self) -> None:
        """Asks the engine loop for `prefill_segment`."""
        self.node.schedule.add_prefill(self.key)
        self.node.wake()

    def schedule_decode(self) -> None:
        """Asks the engine loop for `decode_step`."""
        self.node.schedule.add_decode(self.key)
        self.node.wake()

    def release(self) -> None:
        """Lets go of schedule, engine and blocks, once, as soon as the engine is off them."""
        if not self._is_over:
            self._is_over = True
            self.node.schedule.remove(self.key)
            self.node.tasks.spawn(self._free())

    async def _free(self) -> None:
        try:
            # One thread runs every call, in order: what still runs for this job ends before.
            await self.node.in_engine(partial(self.node.engine.close, self.key))
        except Exception as error:
            report(f"the engine could not close {self.key!r}", error)
        self.node.cache.release(self.key)
        self._on_over(self)
