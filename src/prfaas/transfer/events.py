"""What a transfer machine is told by its own side, what it asks for, and how it ends."""

from __future__ import annotations

import enum
from typing import TypeAlias

import attrs

from prfaas.core import RequestId, TransferId
from prfaas.errors import TransferAborted
from prfaas.seams.transport import WindowRef
from prfaas.transfer.messages import EndCode, Message


class TransferState(enum.Enum):
    """Where one side of a transfer stands. The last four are ends."""

    EXPECTING = "expecting"  # receiver: no offer yet
    OFFERED = "offered"  # sender: no answer yet; receiver: opening its window
    ACCEPTED = "accepted"  # the window is known to both
    SENDING = "sending"  # sender: something was acknowledged
    DONE = "done"  # sender: everything was acknowledged
    COMPLETE = "complete"  # receiver: everything is here, the window is closed
    LANDED = "landed"  # the entry belongs to the receiver's request
    REJECTED = "rejected"
    ABORTED = "aborted"
    EXPIRED = "expired"

    @property
    def is_end(self) -> bool:
        return self in _ENDS


_ENDS = frozenset(
    {
        TransferState.LANDED,
        TransferState.REJECTED,
        TransferState.ABORTED,
        TransferState.EXPIRED,
    }
)


# Local events of either side.


@attrs.frozen
class Cancel:
    """This side gives up: before the receiver accepted it rejects, later it aborts."""

    code: EndCode = EndCode.CANCELLED
    reason: str = ""


@attrs.frozen
class PeerLost:
    """The channel to the peer is gone; nothing can be said to it any more."""

    reason: str = "the channel broke"


# Local events of the sender.


@attrs.frozen
class Progress:
    """A layer became ready, or a put was acknowledged."""


@attrs.frozen(kw_only=True)
class RankDone:
    """A rank has nothing left to send, and all of its puts were acknowledged.

    Attributes:
        sender_rank: from 0 to ``num_senders`` - 1; each rank reports once.
        sent_bytes: bytes that were acknowledged (`DataSender.sent_bytes`), 0 where a rank has none.
        first_token: the token that this rank sampled after the prompt, if it did.
    """

    sender_rank: int = 0
    sent_bytes: int
    first_token: int | None = None


# Local events of the receiver.


@attrs.frozen
class WindowOpened:
    """`OpenWindow` was executed."""

    window: WindowRef


@attrs.frozen(kw_only=True)
class BytesLanded:
    """Bytes landed that had not landed before (the result of `DataReceiver.landed`)."""

    num_bytes: int


@attrs.frozen
class Installed:
    """`InstallEntry` was executed: the entry now belongs to its request."""


LocalEvent: TypeAlias = (
    Cancel | PeerLost | Progress | RankDone | WindowOpened | BytesLanded | Installed
)


# Commands. They are executed in order; a failed Send does not excuse from the rest.


@attrs.frozen
class Send:
    """Say ``message`` to the peer."""

    message: Message


@attrs.frozen(kw_only=True)
class StartSending:
    """Sender: put the entry, laid out from ``start_token``, into the peer's window."""

    transfer_id: TransferId
    window: WindowRef
    start_token: int


@attrs.frozen(kw_only=True)
class StopSending:
    """Sender: start no put any more, and wait until none reads the entry."""

    transfer_id: TransferId


@attrs.frozen(kw_only=True)
class OpenWindow:
    """Receiver: expose the entry's spans, laid out from ``start_token``; answer WindowOpened."""

    transfer_id: TransferId
    start_token: int
    num_bytes: int


@attrs.frozen(kw_only=True)
class CloseWindow:
    """Receiver: withdraw the window, and wait until nothing can be written through it."""

    transfer_id: TransferId


@attrs.frozen(kw_only=True)
class InstallEntry:
    """Receiver: the entry is whole; hand it to its request and answer Installed, or else Cancel."""

    transfer_id: TransferId
    request_id: RequestId


@attrs.frozen(kw_only=True)
class ReleaseEntry:
    """Free the entry's blocks and slots. Given exactly once, unless the entry was installed."""

    transfer_id: TransferId
    request_id: RequestId


Command: TypeAlias = (
    Send | StartSending | StopSending | OpenWindow | CloseWindow | InstallEntry | ReleaseEntry
)


@attrs.frozen(kw_only=True)
class Ended:
    """The transfer is over on this side; reported exactly once.

    Attributes:
        state: one of the ends.
        code: why, None when it landed.
        by_peer: whether the peer ended it.
    """

    transfer_id: TransferId
    request_id: RequestId
    state: TransferState
    code: EndCode | None = None
    reason: str = ""
    by_peer: bool = False

    @property
    def error(self) -> TransferAborted | None:
        """What to fail the request with; None when the entry landed."""
        if self.code is None:
            return None
        side = "by peer" if self.by_peer else "on this side"
        return TransferAborted(
            f"transfer {self.transfer_id!r} of request {self.request_id!r} {self.state.value} "
            f"{side} ({self.code.value}): {self.reason or 'no reason given'}; "
            "prefill the prompt again or elsewhere"
        )
