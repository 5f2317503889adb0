"""The receiving side of one transfer."""

from __future__ import annotations

import math
from typing import ClassVar

from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.transfer.control import Input, TransferControl, TransferTerms, Transitions
from prfaas.transfer.events import (
    BytesLanded,
    Cancel,
    CloseWindow,
    Installed,
    InstallEntry,
    OpenWindow,
    PeerLost,
    Send,
    TransferState,
    WindowOpened,
)
from prfaas.transfer.layout import entry_group_bytes
from prfaas.transfer.messages import (
    MAX_REASON_CHARS,
    Abort,
    Accept,
    Done,
    EndCode,
    Landed,
    Message,
    Offer,
    Reject,
    Renew,
    encode,
)

_S = TransferState
_PEER_GIVES_UP = {Abort: _S.ABORTED, PeerLost: _S.ABORTED}


class ReceiverControl(TransferControl):
    """Waits for an offer, has it land in a window, and hands the entry over when all of it is here.

    Made when the entry's blocks are reserved. They are released once, and only after the window is
    closed; or they go to the request with InstallEntry, and are then the request's to release.

    The entry is complete when every sender has said Done and the acknowledged bytes they name add
    up to the entry. A put is acknowledged only when its bytes are at this side, so that is proof.
    Where the transport also tells this side of every landing, that count must be full as well.

    Args:
        terms: what both sides know.
        now: monotonic seconds.
        start_token: leading tokens whose rows this side already holds.
        reports_landings: whether BytesLanded will be reported for every byte.
    """

    transitions: ClassVar[Transitions] = {
        _S.EXPECTING: {
            **_PEER_GIVES_UP,
            Cancel: _S.REJECTED,
            Offer: _S.OFFERED,
            Renew: _S.EXPECTING,
        },
        _S.OFFERED: {
            **_PEER_GIVES_UP,
            Cancel: _S.REJECTED,
            WindowOpened: _S.ACCEPTED,
            Renew: _S.OFFERED,
        },
        _S.ACCEPTED: {
            **_PEER_GIVES_UP,
            Cancel: _S.ABORTED,
            BytesLanded: _S.ACCEPTED,
            Done: _S.ACCEPTED,
            Renew: _S.ACCEPTED,
        },
        # Everything is here: the peer is not needed any more, whatever becomes of it.
        _S.COMPLETE: {
            Installed: _S.LANDED,
            Cancel: _S.ABORTED,
            Abort: _S.COMPLETE,
            PeerLost: _S.COMPLETE,
            Renew: _S.COMPLETE,
        },
    }

    def __init__(
        self,
        terms: TransferTerms,
        now: float,
        *,
        start_token: int = 0,
        reports_landings: bool = False,
    ) -> None:
        # The lease is the sender's to name; until it has, only the end of the terms counts.
        super().__init__(terms, now, state=TransferState.EXPECTING, lease_s=math.inf)
        self._start_token = start_token
        self._num_bytes = terms.spec.kv_bytes_delta(terms.num_tokens, start_token)
        self._reports_landings = reports_landings
        self._offer: Offer | None = None
        self._sent_bytes: dict[int, int] = {}
        self._landed_bytes = 0

    def _next_state(self, happened: Input) -> TransferState | None:
        target = super()._next_state(happened)
        if isinstance(happened, Offer) and target is TransferState.OFFERED:
            return TransferState.REJECTED if self._difference(happened) else target
        return target

    def _difference(self, offer: Offer) -> str | None:
        """The first field in which an offer is not what we expect, for the Reject."""
        terms = self.terms
        fields: list[tuple[str, object, object]] = [
            ("request_id", terms.request_id, offer.request_id),
            ("num_tokens", terms.num_tokens, offer.num_tokens),
            ("state_tokens", terms.state_tokens, offer.state_tokens),
        ]
        ours = entry_group_bytes(terms.spec, terms.num_tokens)
        names = {group.group_id: group.name for group in terms.spec.groups}
        for group_id in sorted(ours.keys() | offer.group_bytes.keys()):
            name = f"group_bytes[{group_id}] ({names.get(group_id, 'unknown group')})"
            fields.append((name, ours.get(group_id), offer.group_bytes.get(group_id)))
        for name, our_value, their_value in fields:
            if our_value != their_value:
                return (
                    f"offer differs in {name}: receiver {our_value}, sender {their_value}; "
                    "serve the same model, dtypes and handoff on both sides"
                )
        return None

    def _apply(self, happened: Input, now: float) -> None:
        match happened:
            case Offer():
                self._take_offer(happened)
            case WindowOpened():
                self._accept(happened)
            case Done():
                self._finish_rank(happened)
            case BytesLanded():
                self._count(happened.num_bytes)
            case Abort() | PeerLost() | Renew() if self._state is TransferState.COMPLETE:
                self.num_ignored += 1

    def _take_offer(self, offer: Offer) -> None:
        self._offer = offer
        self._lease_s = offer.lease_s
        self._heard.append(offer)
        self._commands.append(
            OpenWindow(
                transfer_id=self._transfer_id,
                start_token=self._start_token,
                num_bytes=self._num_bytes,
            )
        )

    def _accept(self, opened: WindowOpened) -> None:
        if opened.window.num_bytes != self._num_bytes:
            raise LocalProtocolError(
                f"the window has {opened.window.num_bytes} bytes, the entry {self._num_bytes}; "
                "expose the spans of the whole entry"
            )
        accept = Accept(
            transfer_id=self._transfer_id,
            window_token=opened.window.token,
            window_bytes=self._num_bytes,
            start_token=self._start_token,
        )
        encode(accept)  # refuses here what could not be said later
        self._heard.append(opened)
        self._commands.append(Send(accept))

    def _finish_rank(self, done: Done) -> None:
        assert self._offer is not None, self
        num_senders = self._offer.num_senders
        if done.sender_rank >= num_senders or done.sender_rank in self._sent_bytes:
            raise RemoteProtocolError(
                f"Done of rank {done.sender_rank}; ranks 0 to {num_senders - 1} say it once each, "
                f"and {sorted(self._sent_bytes)} have"
            )
        total = sum(self._sent_bytes.values()) + done.sent_bytes
        is_last = len(self._sent_bytes) + 1 == num_senders
        if total > self._num_bytes or (is_last and total < self._num_bytes):
            raise RemoteProtocolError(
                f"Done of rank {done.sender_rank} makes {total} bytes sent by "
                f"{len(self._sent_bytes) + 1} of {num_senders} senders; the entry has "
                f"{self._num_bytes}"
            )
        self._sent_bytes[done.sender_rank] = done.sent_bytes
        self._heard.append(done)

    def _count(self, num_bytes: int) -> None:
        landed = self._landed_bytes + num_bytes
        if not self._reports_landings or num_bytes < 0 or landed > self._num_bytes:
            raise LocalProtocolError(
                f"{num_bytes} bytes landed after {self._landed_bytes} of {self._num_bytes}; report "
                "only bytes that are new, and only with reports_landings"
            )
        self._landed_bytes = landed

    def _settle(self) -> None:
        if self._state is not TransferState.ACCEPTED or not self._is_complete:
            return
        self._state = TransferState.COMPLETE
        self._commands.append(CloseWindow(transfer_id=self._transfer_id))
        self._commands.append(
            InstallEntry(transfer_id=self._transfer_id, request_id=self.terms.request_id)
        )

    @property
    def _is_complete(self) -> bool:
        if self._offer is None or len(self._sent_bytes) < self._offer.num_senders:
            return False
        return not self._reports_landings or self._landed_bytes == self._num_bytes

    def _why(self, target: TransferState, cause: Input | None) -> tuple[EndCode | None, str, bool]:
        if isinstance(cause, Offer):
            return EndCode.MISMATCH, self._difference(cause) or "", False
        return super()._why(target, cause)

    def _farewell(self, target: TransferState, cause: Input | None) -> Message | None:
        if target is TransferState.LANDED:
            return Landed(transfer_id=self._transfer_id)
        abort = self._abort(cause)
        if abort is not None and target is TransferState.REJECTED:
            return Reject(transfer_id=self._transfer_id, code=abort.code, reason=abort.reason)
        return abort

    def _let_go(self, target: TransferState) -> None:
        if self._state in (TransferState.OFFERED, TransferState.ACCEPTED):
            self._commands.append(CloseWindow(transfer_id=self._transfer_id))
        if target is not TransferState.LANDED:
            self._release()

    def _answer_late(self, happened: Input) -> None:
        # We ended before the sender spoke, so it may never have heard that: say it now.
        ended = self.ended
        if not isinstance(happened, Offer) or self._offer is not None or ended is None:
            return
        code = ended.code or EndCode.UNKNOWN
        reason = ended.reason[:MAX_REASON_CHARS]
        self._commands.append(Send(Reject(transfer_id=self._transfer_id, code=code, reason=reason)))

    def check(self) -> None:
        """Asserts the invariants."""
        super().check()
        assert sum(self._sent_bytes.values()) <= self._num_bytes, self
        assert self._landed_bytes <= self._num_bytes, self
        assert self._offer is not None or not self._sent_bytes, self
        if self._state is TransferState.EXPECTING:
            assert self._offer is None, self
        if self._state in (TransferState.COMPLETE, TransferState.LANDED):
            assert self._is_complete, self
            assert sum(self._sent_bytes.values()) == self._num_bytes, self
        if self._state is TransferState.ACCEPTED:
            assert not self._is_complete, self

    def _describe(self) -> str:
        num_senders = "?" if self._offer is None else self._offer.num_senders
        return (
            f"{sum(self._sent_bytes.values())}/{self._num_bytes} B sent, "
            f"{len(self._sent_bytes)}/{num_senders} senders done"
        )
