"""What gateway, workers and clients say to each other on control channels.

Every message is a tagged msgpack map. One byte before it tells the family, so that messages of
`prfaas.transfer` travel on the same channel.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from prfaas.core import Request
from prfaas.errors import ConfigError, RemoteProtocolError, RequestError
from prfaas.transfer import Message as TransferMessage
from prfaas.transfer import encode as encode_event
from prfaas.wire.frames import MAX_CONTROL_BYTES

CONTROL = b"\x01"
TRANSFER = b"\x02"
MAX_ID_CHARS = 1000
"""With the attempt's number it still fits into a transfer id."""
MAX_REASON_CHARS = 2000


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class _OfRequest(_Message, frozen=True, kw_only=True):
    """A message about one attempt at one request; ids travel verbatim."""

    request_id: str
    attempt: int

    def __post_init__(self) -> None:
        if not 0 < len(self.request_id) <= MAX_ID_CHARS or not 0 <= self.attempt < 2**31:
            raise ConfigError(
                f"request_id of {len(self.request_id)} characters, attempt {self.attempt}; "
                f"an id has 1 to {MAX_ID_CHARS} characters, attempts count from 0 to 2**31"
            )

    @property
    def key(self) -> str:
        """Names this attempt on a worker; also its transfer id."""
        return f"{self.request_id}#{self.attempt}"


class _Prompt(_OfRequest, frozen=True, kw_only=True):
    """A prompt. ``tokens`` are little-endian u32, ``deadline_s`` counts from now."""

    tokens: bytes
    max_new_tokens: int
    tenant: str = ""
    return_logits: bool = False
    deadline_s: float


class _Work(_Prompt, frozen=True, kw_only=True):
    """A prompt that the gateway has checked already."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tokens or len(self.tokens) % 4 or self.max_new_tokens < 1:
            raise ConfigError(
                f"{len(self.tokens)} bytes of tokens, {self.max_new_tokens} new tokens; work has "
                "at least one 4-byte token and makes at least one"
            )
        if not self.deadline_s > 0:
            raise ConfigError(f"deadline_s is {self.deadline_s}; it must be above 0")

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class Prefill(_Work, frozen=True, kw_only=True):
    """Gateway to prefill node: compute this prompt and put its cache into the decode node."""

    decode_node: str
    decode_address: str


class Expect(_Work, frozen=True, kw_only=True):
    """Gateway to decode node: a cache will be offered; take it and decode."""

    prefill_node: str


class Generate(_Work, frozen=True, kw_only=True):
    """Gateway to a MIXED node: prefill and decode here."""


class Cancel(_OfRequest, frozen=True, kw_only=True):
    """Gateway to worker: forget this attempt. Client to gateway: forget this request."""

    reason: str


class Expecting(_OfRequest, frozen=True, kw_only=True):
    """Decode node: blocks are reserved, ``held_tokens`` rows need not travel."""

    held_tokens: int


class Prefilled(_OfRequest, frozen=True, kw_only=True):
    """Prefill node: the prompt is computed. The first token goes ahead of the cache.

    ``token`` is None where the handoff leaves the last prompt token to the decode node. ``logits``
    is empty unless asked for.
    """

    token: int | None
    logits: bytes
    cached_tokens: int
    prefilled_tokens: int
    queue_s: float
    prefill_s: float


class Sent(_OfRequest, frozen=True, kw_only=True):
    """Prefill node: the decode node has the whole entry.

    ``transfer_s`` runs from the end of the prefill.
    """

    sent_bytes: int
    transfer_s: float


class Token(_OfRequest, frozen=True, kw_only=True):
    """Decode node: token number ``index`` (0 is the first)."""

    index: int
    token: int
    logits: bytes


class Finished(_OfRequest, frozen=True, kw_only=True):
    """Decode node: all tokens are out."""

    received_bytes: int
    expected_bytes: int
    held_tokens: int
    decode_prefilled_tokens: int
    decode_wait_s: float
    decode_step_s: float


class Failed(_OfRequest, frozen=True, kw_only=True):
    """Worker: this attempt ended here. ``at_fault`` names the node that should be avoided, if one.

    ``busy`` says that nothing was begun and that the same node may take it a little later.
    """

    stage: str
    reason: str
    retryable: bool
    at_fault: str = ""
    busy: bool = False


class Register(_Message, frozen=True, kw_only=True):
    """Gateway to worker, first message: introduce yourself and report to me."""


class NodeInfo(_Message, frozen=True, kw_only=True):
    """Worker to gateway, first answer: who this is and how its cache is cut."""

    node_id: str
    cluster_id: str
    kind: str
    role: str
    epoch: int
    block_size: int
    max_active: int | None = None
    num_slots: int | None = None


class SetRole(_Message, frozen=True, kw_only=True):
    """Gateway to worker: admit this kind of work from now on.

    ``prefill_budget`` bounds the prompt tokens per decode step of a MIXED node; 0 sets no bound.
    """

    role: str
    plan_epoch: int
    prefill_budget: int = 0


class RoleSet(_Message, frozen=True, kw_only=True):
    """Worker to every gateway: this is the role from now on, whatever was asked for.

    ``phase`` is a `ChangePhase`: the work of an earlier role may have to end first.
    """

    role: str
    plan_epoch: int
    phase: str = "done"


class CacheBody(msgspec.Struct, frozen=True, kw_only=True):
    """One `CacheEvent` on the wire."""

    sequence: int
    group_id: int
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class CacheChanged(_Message, frozen=True, kw_only=True):
    """Worker: its prefix cache changed."""

    events: tuple[CacheBody, ...]


class Rates(_Message, frozen=True, kw_only=True):
    """Prefill worker: link samples as (bytes, seconds since start, seconds since end), and packets
    that it sent, with those of them that it sent again."""

    deliveries: tuple[tuple[int, float, float], ...]
    num_packets: int = 0
    num_resent: int = 0


class CacheSnapshot(_Message, frozen=True, kw_only=True):
    """Worker: everything its cache can serve after event ``sequence``."""

    sequence: int
    stored: dict[int, tuple[bytes, ...]]


class AskSnapshot(_Message, frozen=True, kw_only=True):
    """Gateway: events of this worker were lost."""


class AskStatus(_Message, frozen=True, kw_only=True):
    """Anyone to gateway or worker."""


class Status(_Message, frozen=True, kw_only=True):
    """Counts and the effective configuration of one node."""

    node_id: str
    counts: dict[str, int]
    config: dict[str, str]


class Submit(_Prompt, frozen=True, kw_only=True):
    """Client to gateway. Not checked yet, so that a wrong one is answered and not cut off."""


class Progress(_Message, frozen=True, kw_only=True):
    """Gateway to client: a request changed its phase."""

    request_id: str
    phase: str


class Answer(_Message, frozen=True, kw_only=True):
    """Gateway to client: the request is over. ``error`` is empty when it succeeded."""

    request_id: str
    tokens: tuple[int, ...]
    logits: tuple[bytes, ...]
    record: dict[str, str | int | float | bool | None]
    error: str = ""


class Watch(_Message, frozen=True, kw_only=True):
    """Gateway to client, about ten times a second: what moves."""

    threshold_tokens: int
    link_bps: float | None
    num_active: int


Message: TypeAlias = (
    Prefill
    | Expect
    | Generate
    | Cancel
    | Expecting
    | Prefilled
    | Sent
    | Token
    | Finished
    | Failed
    | Register
    | NodeInfo
    | SetRole
    | RoleSet
    | CacheChanged
    | CacheSnapshot
    | AskSnapshot
    | Rates
    | AskStatus
    | Status
    | Submit
    | Progress
    | Answer
    | Watch
)
Work: TypeAlias = Prefill | Expect | Generate
"""What a gateway gives to a worker to do."""
Said: TypeAlias = Expecting | Prefilled | Sent | Token | Finished | Failed
"""What a worker says about an attempt."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One control frame.

    Raises:
        ConfigError: it would exceed a frame, or holds what the format cannot (a lone surrogate, an
            integer beyond 64 bits).
    """
    try:
        frame = CONTROL + _ENCODER.encode(message)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{type(message).__name__} cannot be sent: {error}") from error
    if len(frame) > MAX_CONTROL_BYTES:
        raise ConfigError(
            f"{type(message).__name__} takes {len(frame)} bytes, a frame holds "
            f"{MAX_CONTROL_BYTES}; ask for less at a time"
        )
    return frame


def encode_transfer(message: TransferMessage) -> bytes:
    """One frame of the transfer family. Raises ConfigError as `prfaas.transfer.encode` does."""
    return TRANSFER + encode_event(message)


def decode(frame: bytes) -> Message:
    """The message of a control frame. Raises RemoteProtocolError for anything else."""
    if frame[:1] != CONTROL:
        raise RemoteProtocolError(f"a control frame starts with {CONTROL!r}, got {frame[:1]!r}")
    try:
        return _DECODER.decode(memoryview(frame)[1:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"the peer sent a message we cannot read: {error}") from error


def prompt_fields(request: Request) -> dict[str, Any]:
    """What every message about a request's prompt carries, but for attempt and deadline.

    Raises:
        RequestError: no message can carry the request.
    """
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "tokens": pack_tokens(request.tokens),
        "max_new_tokens": request.max_new_tokens,
        "tenant": request.tenant,
        "return_logits": request.return_logits,
    }
    try:
        encode(Submit(attempt=0, deadline_s=request.deadline_s, **fields))
    except ConfigError as error:
        raise RequestError(f"a request of {request.num_tokens} tokens: {error}") from error
    return fields


def plain_text(error: BaseException) -> str:
    """An error's text, short enough and fit for a message."""
    text = str(error) or type(error).__name__
    return text[:MAX_REASON_CHARS].encode(errors="replace").decode()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    words = array.array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Inverse of `pack_tokens`. Raises RemoteProtocolError for a part of a token."""
    if len(data) % 4:
        raise RemoteProtocolError(f"{len(data)} bytes are not a list of 4-byte token ids")
    words = array.array("I")
    words.frombytes(data)
    if sys.byteorder == "big":
        words.byteswap()
    return tuple(words)
