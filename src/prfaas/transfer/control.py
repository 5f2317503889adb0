"""What the two control machines of a transfer share; there is one per request and side.

Feed messages of the peer and local events to `receive`, execute `commands` in order, and call
`on_deadline` at `next_deadline`. The lease starts again with every sign of progress and never
reaches beyond ``until_s`` of the terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, TypeAlias

import attrs

from prfaas.core import RequestId, TransferId
from prfaas.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from prfaas.spec import ModelSpec
from prfaas.transfer.events import (
    Cancel,
    Command,
    Ended,
    LocalEvent,
    PeerLost,
    ReleaseEntry,
    Send,
    TransferState,
)
from prfaas.transfer.messages import (
    MAX_REASON_CHARS,
    Abort,
    EndCode,
    Message,
    Reject,
)

Input: TypeAlias = Message | LocalEvent
Transitions: TypeAlias = Mapping[TransferState, Mapping[type, TransferState]]


@attrs.frozen(kw_only=True)
class TransferTerms:
    """What a side knows of a transfer before the first message.

    Attributes:
        transfer_id: names the transfer on both sides.
        request_id: the request it belongs to.
        spec: the model's cache.
        num_tokens: tokens that the entry covers.
        until_s: the transfer is over by then, whatever the lease says; monotonic seconds.
    """

    transfer_id: TransferId
    request_id: RequestId
    spec: ModelSpec = attrs.field(repr=False)
    num_tokens: int
    until_s: float

    @property
    def state_tokens(self) -> int | None:
        """Tokens that the recurrent state covers; None for a model without slot groups."""
        has_state = any(not group.is_token_kind for group in self.spec.groups)
        return self.num_tokens if has_state else None


class TransferControl(ABC):
    """One side of one transfer.

    A call out of order raises LocalProtocolError, a message that the protocol forbids
    RemoteProtocolError; in both cases nothing has changed. After a RemoteProtocolError the caller
    gives up with ``Cancel(EndCode.PROTOCOL, str(error))``. What is repeated, and whatever comes
    after the end, is ignored and counted.

    Attributes:
        terms: what this side knew before the first message.
        ended: how it ended, None before that.
        num_ignored: inputs that were ignored.
    """

    transitions: ClassVar[Transitions]
    """State -> input type -> next state. What is not in the table is forbidden."""

    def __init__(
        self, terms: TransferTerms, now: float, *, state: TransferState, lease_s: float
    ) -> None:
        if not now < terms.until_s:
            raise ConfigError(
                f"until_s is {terms.until_s}, now it is {now}; start a transfer before its end"
            )
        self.terms = terms
        self.ended: Ended | None = None
        self.num_ignored = 0
        self._state = state
        self._lease_s = lease_s
        self._lease_until_s = min(now + lease_s, terms.until_s)
        self._commands: list[Command] = []
        self._heard: list[Input] = []

    @property
    def state(self) -> TransferState:
        return self._state

    def receive(self, happened: Input, now: float) -> tuple[Ended, ...]:
        """Takes a message of the peer or a local event; tells whether it ended the transfer.

        Raises:
            LocalProtocolError: out of order, or a message of another transfer.
            RemoteProtocolError: the peer may not say this now.
        """
        self._check_input(happened)
        ended = self.on_deadline(now)
        if self._state.is_end:
            self.num_ignored += 1
            self._answer_late(happened)
            return ended
        if happened in self._heard:
            self.num_ignored += 1
            return ()
        target = self._next_state(happened)
        if target is None:
            raise self._forbidden(happened)
        if target.is_end:
            return self._end(target, happened)
        self._apply(happened, now)
        self._state = target
        self._lease_until_s = min(now + self._lease_s, self.terms.until_s)
        self._settle()
        return ()

    def commands(self) -> tuple[Command, ...]:
        """What to execute now, in this order; each is handed out once."""
        commands = tuple(self._commands)
        self._commands.clear()
        return commands

    def next_deadline(self) -> float | None:
        """When to call `on_deadline`; None when this side waits for nobody else."""
        return self._lease_until_s if self._waits else None

    def on_deadline(self, now: float) -> tuple[Ended, ...]:
        """Ends the transfer if its lease has run out."""
        if not self._waits or now < self._lease_until_s:
            return ()
        return self._end(TransferState.EXPIRED, None)

    @property
    def _transfer_id(self) -> TransferId:
        return self.terms.transfer_id

    @property
    def _waits(self) -> bool:
        return not self._state.is_end and self._state is not TransferState.COMPLETE

    def check(self) -> None:
        """Asserts the invariants that both sides share."""
        assert self._state in self.transitions or self._state.is_end, self
        assert (self.ended is not None) == self._state.is_end, self
        assert self._lease_until_s <= self.terms.until_s, self

    def _next_state(self, happened: Input) -> TransferState | None:
        return self.transitions[self._state].get(type(happened))

    @abstractmethod
    def _apply(self, happened: Input, now: float) -> None:
        """Checks an allowed input, raises if its content is wrong, and only then takes it in."""

    @abstractmethod
    def _settle(self) -> None:
        """Makes the transitions that no single input makes."""

    @abstractmethod
    def _farewell(self, target: TransferState, cause: Input | None) -> Message | None:
        """What to tell the peer at the end, if it does not know."""

    @abstractmethod
    def _let_go(self, target: TransferState) -> None:
        """Queues the commands that free what this side holds."""

    @abstractmethod
    def _answer_late(self, happened: Input) -> None:
        """Answers an input that came after the end, where silence would keep the peer waiting."""

    def _end(self, target: TransferState, cause: Input | None) -> tuple[Ended, ...]:
        code, reason, by_peer = self._why(target, cause)
        farewell = self._farewell(target, cause)
        if farewell is not None:
            self._commands.append(Send(farewell))
        self._let_go(target)
        self._state = target
        self.ended = Ended(
            transfer_id=self._transfer_id,
            request_id=self.terms.request_id,
            state=target,
            code=code,
            reason=reason,
            by_peer=by_peer,
        )
        return (self.ended,)

    def _why(self, target: TransferState, cause: Input | None) -> tuple[EndCode | None, str, bool]:
        if target is TransferState.LANDED:
            return None, "", False
        match cause:
            case Abort() | Reject():
                return cause.code, cause.reason, True
            case Cancel():
                return cause.code, cause.reason, False
            case PeerLost():
                return EndCode.PEER_LOST, cause.reason, True
        return EndCode.EXPIRED, f"no progress until {self._lease_until_s:.3f} s", False

    def _abort(self, cause: Input | None) -> Abort | None:
        """The Abort for the peer, unless it was the peer that ended the transfer."""
        code, reason, by_peer = self._why(TransferState.ABORTED, cause)
        if by_peer or code is None:
            return None
        return Abort(transfer_id=self._transfer_id, code=code, reason=reason[:MAX_REASON_CHARS])

    def _release(self) -> None:
        self._commands.append(
            ReleaseEntry(transfer_id=self._transfer_id, request_id=self.terms.request_id)
        )

    def _check_input(self, happened: Input) -> None:
        if isinstance(happened, Message):
            if happened.transfer_id != self._transfer_id:
                raise LocalProtocolError(
                    f"{type(happened).__name__} of transfer {happened.transfer_id!r} was given to "
                    f"{self._transfer_id!r}; route messages by transfer_id"
                )
        elif not isinstance(happened, LocalEvent):
            raise LocalProtocolError(
                f"{happened!r} is neither a transfer message nor a local event of prfaas.transfer"
            )

    def _forbidden(self, happened: Input) -> LocalProtocolError | RemoteProtocolError:
        error = RemoteProtocolError if isinstance(happened, Message) else LocalProtocolError
        allowed = sorted(kind.__name__ for kind in self.transitions[self._state])
        return error(
            f"{type(happened).__name__} is not allowed in {self!r}; allowed now: "
            f"{', '.join(allowed)}"
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._transfer_id!r} {self._state.value}, "
            f"{self._describe()}, lease until {self._lease_until_s:.3f} s, "
            f"{self.num_ignored} ignored>"
        )

    @abstractmethod
    def _describe(self) -> str:
        """What this side has got so far, for the repr."""
