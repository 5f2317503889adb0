"""What the two sides of a transfer say to each other, and its form on the wire (MessagePack).

    sender    Offer            Done (one per sender)  Renew  Abort
    receiver         Accept                                         Landed
                     Reject                           Renew  Abort

There is no list on the wire, only maps, text, bytes and numbers: a length that a peer claims never
makes us reserve memory for it.

Fields are only ever appended, with a default, and a field that has its default value is not sent.
A reader refuses a key that it does not know: such a field says something that must not be ignored.
So two releases work together as long as the newer one uses nothing that the older one lacks.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

from prfaas.core import MAX_TOKEN_ID, GroupId, RequestId, TransferId
from prfaas.errors import ConfigError, RemoteProtocolError
from prfaas.seams.transport import WindowRef

MAX_MESSAGE_BYTES = 65_536
MAX_ID_CHARS = 1_024
MAX_REASON_CHARS = 2_000
MAX_TOKENS = 2**32
MAX_ENTRY_BYTES = 2**62
MAX_GROUPS = 256
MAX_SENDERS = 1_024
MAX_TOKEN_BYTES = 8_192
MAX_LEASE_S = 3_600.0

_RequestId = Annotated[RequestId, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARS)]
_TransferId = Annotated[TransferId, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARS)]
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
_NumTokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_NumBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_ENTRY_BYTES)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
_NumSenders = Annotated[int, msgspec.Meta(ge=1, le=MAX_SENDERS)]
_SenderRank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SENDERS)]
_GroupId = Annotated[GroupId, msgspec.Meta(ge=0, lt=MAX_GROUPS)]
_GroupBytes = Annotated[
    dict[_GroupId, _NumBytes], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)
]
_WindowToken = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_TOKEN_BYTES)]
_LeaseS = Annotated[float, msgspec.Meta(gt=0, le=MAX_LEASE_S)]


class EndCode(enum.Enum):
    """Why a transfer ended without its bytes."""

    CAPACITY = "capacity"  # no room at the receiver
    MISMATCH = "mismatch"  # the offer is not what the receiver expects
    CANCELLED = "cancelled"  # the request was given up, or refused before it was admitted
    EXPIRED = "expired"  # no progress within the lease, or out of time
    FAILED = "failed"  # the engine, a put or an installation failed
    PROTOCOL = "protocol"  # the other side broke the protocol
    UNKNOWN = "unknown"  # nobody here knows the transfer
    CLOSING = "closing"  # the worker shuts down
    PEER_LOST = "peer_lost"  # the channel broke; never said, only concluded


class _Message(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag=str.lower,
    tag_field="type",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """``transfer_id`` names the transfer, the same on both sides."""

    transfer_id: _TransferId


class Offer(_Message, frozen=True, kw_only=True):
    """An entry is, or will soon be, ready to be sent.

    Attributes:
        request_id: the request it belongs to, verbatim.
        num_tokens: tokens that the shipped cache covers.
        kv_tokens: tokens that the rows cover; always ``num_tokens``.
        state_tokens: tokens that the recurrent state has seen; None for a model without slot
            groups. A state cannot be rewound, so anything but ``num_tokens`` is refused.
        num_senders: ranks that will each say Done.
        group_bytes: bytes of every group of the whole entry.
        lease_s: both sides let go when nothing is heard of the transfer for so long.
    """

    request_id: _RequestId
    num_tokens: _NumTokens
    kv_tokens: _NumTokens
    state_tokens: _NumTokens | None
    num_senders: _NumSenders
    group_bytes: _GroupBytes
    lease_s: _LeaseS

    def __post_init__(self) -> None:
        if self.kv_tokens != self.num_tokens:
            raise ConfigError(
                f"kv_tokens is {self.kv_tokens}, num_tokens {self.num_tokens}; they must be equal"
            )
        if self.state_tokens is not None and self.state_tokens != self.kv_tokens:
            raise ConfigError(
                f"state_tokens is {self.state_tokens}, kv_tokens {self.kv_tokens}; a state cannot "
                "be rewound, so rows and state must cover the same tokens"
            )


class Accept(_Message, frozen=True, kw_only=True):
    """The receiver has room, and this is where the bytes go.

    Attributes:
        window_token: permission to write; opaque to the sender.
        window_bytes: length of the window.
        start_token: leading tokens whose rows the receiver already holds.
    """

    window_token: _WindowToken
    window_bytes: _NumBytes
    start_token: _NumTokens

    @property
    def window(self) -> WindowRef:
        return WindowRef(self.window_token, self.window_bytes)


class Reject(_Message, frozen=True, kw_only=True):
    """The receiver does not take the offer; the sender may let go at once."""

    code: EndCode
    reason: _Reason = ""


class Done(_Message, frozen=True, kw_only=True):
    """One sender has nothing left to send, and every byte it sent was acknowledged at the receiver.

    Each of ``num_senders`` ranks says it once, a rank with nothing to send as well. The rank that
    sampled the first token says it here; None where the handoff leaves that to the receiver.
    """

    sender_rank: _SenderRank
    sent_bytes: _NumBytes
    first_token: _TokenId | None = None


class Landed(_Message, frozen=True, kw_only=True):
    """Every byte is at the receiver and in use there; the sender may let go."""


class Renew(_Message, frozen=True, kw_only=True):
    """The transfer is alive: the lease starts again."""


class Abort(_Message, frozen=True, kw_only=True):
    """The other side has given up; nothing more will come."""

    code: EndCode
    reason: _Reason = ""


Message: TypeAlias = Offer | Accept | Reject | Done | Landed | Renew | Abort

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Writes a message; what a peer would have to refuse is refused here.

    Raises:
        ConfigError: a field out of bounds or of the wrong type.
    """
    try:
        frame = _encoder.encode(message)
        decode(frame)
    except (ValueError, OverflowError, TypeError, RemoteProtocolError) as error:
        raise ConfigError(f"{type(message).__name__} cannot be sent: {error}") from error
    return frame


def decode(frame: bytes) -> Message:
    """Reads a message of a peer.

    Raises:
        RemoteProtocolError: too long, not a message, or a field out of bounds. Nothing else.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(
            f"transfer message of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
        )
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not a transfer message: {error}") from error
