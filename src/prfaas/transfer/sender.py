"""The sending side of one transfer."""

from __future__ import annotations

from typing import ClassVar

from prfaas.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from prfaas.transfer.control import Input, TransferControl, TransferTerms, Transitions
from prfaas.transfer.events import (
    Cancel,
    Ended,
    PeerLost,
    Progress,
    RankDone,
    Send,
    StartSending,
    StopSending,
    TransferState,
)
from prfaas.transfer.layout import entry_group_bytes
from prfaas.transfer.messages import (
    Abort,
    Accept,
    Done,
    Landed,
    Message,
    Offer,
    Reject,
    Renew,
    encode,
)

_S = TransferState
_GIVE_UP = {Abort: _S.ABORTED, Cancel: _S.ABORTED, PeerLost: _S.ABORTED}


class SenderControl(TransferControl):
    """Offers an entry, has it sent, and frees it once, as soon as nobody needs it.

    Made when the entry's blocks are reserved; the Offer goes out at once, so that the receiver may
    answer while the prefill runs. The entry is released after Landed, Reject, Abort, the loss of
    the peer, or the end of the lease, and never while a put reads it (StopSending comes first).

    Args:
        terms: what both sides know.
        now: monotonic seconds.
        num_senders: ranks that send parts of the entry; each reports RankDone.
        lease_s: longest time without progress; the peer uses the same.

    Raises:
        ConfigError: terms that cannot be offered.
    """

    transitions: ClassVar[Transitions] = {
        _S.OFFERED: {
            **_GIVE_UP,
            Reject: _S.REJECTED,
            Accept: _S.ACCEPTED,
            Progress: _S.OFFERED,
            Renew: _S.OFFERED,
        },
        _S.ACCEPTED: {
            **_GIVE_UP,
            Progress: _S.SENDING,
            RankDone: _S.SENDING,
            Renew: _S.ACCEPTED,
        },
        _S.SENDING: {
            **_GIVE_UP,
            Progress: _S.SENDING,
            RankDone: _S.SENDING,
            Renew: _S.SENDING,
        },
        _S.DONE: {
            **_GIVE_UP,
            Landed: _S.LANDED,
            Progress: _S.DONE,
            Renew: _S.DONE,
        },
    }

    def __init__(
        self, terms: TransferTerms, now: float, *, num_senders: int = 1, lease_s: float = 30.0
    ) -> None:
        super().__init__(terms, now, state=TransferState.OFFERED, lease_s=lease_s)
        self._num_senders = num_senders
        self._window_bytes: int | None = None
        self._sent_bytes: dict[int, int] = {}
        self._said_s = now
        self._owes_renewal = False
        offer = Offer(
            transfer_id=terms.transfer_id,
            request_id=terms.request_id,
            num_tokens=terms.num_tokens,
            kv_tokens=terms.num_tokens,
            state_tokens=terms.state_tokens,
            num_senders=num_senders,
            group_bytes=entry_group_bytes(terms.spec, terms.num_tokens),
            lease_s=lease_s,
        )
        encode(offer)  # refuses here what could not be said later
        self._commands.append(Send(offer))

    def _apply(self, happened: Input, now: float) -> None:
        match happened:
            case Accept():
                self._accept(happened)
            case RankDone():
                self._finish_rank(happened, now)
            case Progress():
                self._owes_renewal = True
                self._renew(now)

    def _accept(self, accept: Accept) -> None:
        try:
            needed = self.terms.spec.kv_bytes_delta(self.terms.num_tokens, accept.start_token)
        except ConfigError as error:
            raise RemoteProtocolError(f"Accept with a wrong start_token: {error}") from error
        if accept.window_bytes != needed:
            raise RemoteProtocolError(
                f"Accept with a window of {accept.window_bytes} bytes; "
                f"from token {accept.start_token} on the entry has {needed}"
            )
        self._window_bytes = needed
        self._heard.append(accept)
        self._commands.append(
            StartSending(
                transfer_id=self._transfer_id,
                window=accept.window,
                start_token=accept.start_token,
            )
        )

    def _finish_rank(self, done: RankDone, now: float) -> None:
        rank, sent = done.sender_rank, done.sent_bytes
        if not 0 <= rank < self._num_senders or rank in self._sent_bytes:
            raise LocalProtocolError(
                f"rank {rank} is done; ranks 0 to {self._num_senders - 1} report once each, and "
                f"{sorted(self._sent_bytes)} have"
            )
        total = sum(self._sent_bytes.values()) + sent
        is_last = len(self._sent_bytes) + 1 == self._num_senders
        assert self._window_bytes is not None, self
        if sent < 0 or total > self._window_bytes or (is_last and total < self._window_bytes):
            raise LocalProtocolError(
                f"{total} bytes are acknowledged with rank {rank}, the window has "
                f"{self._window_bytes}; report a rank when all of its puts are acknowledged, or "
                "Cancel"
            )
        message = Done(
            transfer_id=self._transfer_id,
            sender_rank=rank,
            sent_bytes=sent,
            first_token=done.first_token,
        )
        encode(message)  # refuses here what could not be said later
        self._sent_bytes[rank] = sent
        self._heard.append(done)
        self._say(message, now)

    def _settle(self) -> None:
        if self._state is TransferState.SENDING and len(self._sent_bytes) == self._num_senders:
            self._state = TransferState.DONE

    def _farewell(self, target: TransferState, cause: Input | None) -> Message | None:
        return None if target is TransferState.LANDED else self._abort(cause)

    def _let_go(self, target: TransferState) -> None:
        if self._state in (TransferState.ACCEPTED, TransferState.SENDING):
            self._commands.append(StopSending(transfer_id=self._transfer_id))
        self._release()

    def _answer_late(self, happened: Input) -> None:
        """Nothing: whoever writes to an ended sender has been told, or told us."""

    def next_deadline(self) -> float | None:
        """As in `TransferControl`, and earlier when the peer must be told of progress."""
        deadline = super().next_deadline()
        if deadline is None or not self._owes_renewal:
            return deadline
        return min(deadline, self._renew_at_s)

    def on_deadline(self, now: float) -> tuple[Ended, ...]:
        """Ends the transfer if its lease has run out; else passes on progress that was not said."""
        ended = super().on_deadline(now)
        if self._waits:
            self._renew(now)
        return ended

    @property
    def _renew_at_s(self) -> float:
        # Three times per lease are enough for the peer's lease to outlast ours, and are few.
        return self._said_s + self._lease_s / 3

    def _renew(self, now: float) -> None:
        if self._owes_renewal and now >= self._renew_at_s:
            self._say(Renew(transfer_id=self._transfer_id), now)

    def _say(self, message: Message, now: float) -> None:
        self._said_s = now
        self._owes_renewal = False
        self._commands.append(Send(message))

    def check(self) -> None:
        """Asserts the invariants."""
        super().check()
        total = sum(self._sent_bytes.values())
        accepted = self._state not in (TransferState.OFFERED, TransferState.REJECTED)
        assert self._window_bytes is None or total <= self._window_bytes, self
        assert self._window_bytes is not None or not self._sent_bytes, self
        if self._state in (TransferState.DONE, TransferState.LANDED):
            assert len(self._sent_bytes) == self._num_senders, self
            assert total == self._window_bytes, self
        if not self._state.is_end:
            assert (self._window_bytes is not None) == accepted, self

    def _describe(self) -> str:
        return (
            f"{sum(self._sent_bytes.values())}/{self._window_bytes} B, "
            f"{len(self._sent_bytes)}/{self._num_senders} senders done"
        )
