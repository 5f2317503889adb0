"""What gateway, workers and clients say to each other on control channels.

Every message is a tagged msgpack map. One byte before it tells the family, so that transfer events of
`prfaas.transfer.messages` travel on the same channel.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from prfaas.errors import RemoteProtocolError

CONTROL = b"\x01"
TRANSFER = b"\x02"
MAX_ID_CHARS = 1024


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class _OfRequest(_Message, frozen=True, kw_only=True):
    """A message about one attempt at one request; ids travel verbatim."""

    request_id: str
    attempt: int

    def __post_init__(self) -> None:
        if not 0 < len(self.request_id) <= MAX_ID_CHARS or self.attempt < 0:
            raise ValueError(
                f"request_id of {len(self.request_id)} characters, attempt {self.attempt}; "
                f"an id has 1 to {MAX_ID_CHARS} characters, attempts count from 0"
            )

    @property
    def key(self) -> str:
        """Names this attempt on a worker; also its transfer id."""
        return f"{self.request_id}#{self.attempt}"


class _Work(_OfRequest, frozen=True, kw_only=True):
    """Something to do for a prompt. ``tokens`` are little-endian u32, ``deadline_s`` counts from now."""

    tokens: bytes
    max_new_tokens: int
    tenant: str = ""
    return_logits: bool = False
    deadline_s: float


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
    """Gateway to worker: forget this attempt."""

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
    """Prefill node: the decode node has the whole entry. ``transfer_s`` runs from the end of prefill."""

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
    """Worker: this attempt ended here. ``at_fault`` names the node that should be avoided, if one."""

    stage: str
    reason: str
    retryable: bool
    at_fault: str = ""


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


class SetRole(_Message, frozen=True, kw_only=True):
    """Gateway to worker: admit this kind of work from now on."""

    role: str
    plan_epoch: int


class RoleSet(_Message, frozen=True, kw_only=True):
    role: str
    plan_epoch: int


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
    """Prefill worker: link samples as (bytes, seconds since start, seconds since end)."""

    deliveries: tuple[tuple[int, float, float], ...]


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


class Submit(_Work, frozen=True, kw_only=True):
    """Client to gateway."""


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
Work: TypeAlias = Prefill | Expect | Generate | Submit

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One control frame."""
    return CONTROL + _ENCODER.encode(message)


def decode(frame: bytes) -> Message:
    """The message of a control frame. Raises RemoteProtocolError for anything else."""
    if frame[:1] != CONTROL:
        raise RemoteProtocolError(f"a control frame starts with {CONTROL!r}, got {frame[:1]!r}")
    try:
        return _DECODER.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"the peer sent a message we cannot read: {error}") from error


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    words = array.array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Inverse of `pack_tokens`. Raises RemoteProtocolError unless it is a whole, non-empty list."""
    if not data or len(data) % 4:
        raise RemoteProtocolError(f"{len(data)} bytes are not a list of 4-byte token ids")
    words = array.array("I")
    words.frombytes(data)
    if sys.byteorder == "big":
        words.byteswap()
    return tuple(words)
