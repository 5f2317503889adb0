"""The handshake: what two peers declare, as bytes, and whether they can exchange a cache."""

from __future__ import annotations

from typing import Annotated

import attrs
import msgspec
from msgspec import Meta

from prfaas.core import Handoff, NodeId
from prfaas.errors import PeerMismatch, RemoteProtocolError
from prfaas.seams.transport import (
    MAX_FINGERPRINT_BYTES,
    MAX_GRANULE_TOKENS,
    MAX_NAME_CHARS,
    Hello,
)
from prfaas.wire.frames import TOKEN_BYTES

MAX_CONNECTIONS = 64
"""Limit of data connections per direction of one channel."""

_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
_Text = Annotated[str, Meta(max_length=1024)]


class _WireGreeting(msgspec.Struct, frozen=True, kw_only=True):
    node_id: _Name
    epoch: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    fingerprint: Annotated[bytes, Meta(max_length=MAX_FINGERPRINT_BYTES)]
    model: _Text
    granule_tokens: Annotated[int, Meta(ge=1, le=MAX_GRANULE_TOKENS)]
    layout: _Text
    handoff: Handoff
    protocol_version: Annotated[int, Meta(ge=0, le=2**16)]
    num_connections: Annotated[int, Meta(ge=0, le=MAX_CONNECTIONS)] = 0
    token: Annotated[bytes, Meta(max_length=TOKEN_BYTES)] = b""


class _WireRefusal(msgspec.Struct, frozen=True, kw_only=True):
    field: _Text
    ours: _Text
    theirs: _Text
    remedy: _Text


@attrs.frozen(kw_only=True)
class Greeting:
    """Body of HELLO and WELCOME.

    Attributes:
        hello: what the node declares.
        num_connections: data connections per direction: wished (HELLO), granted (WELCOME).
        token: names the channel in the JOIN of its data connections (WELCOME only).
    """

    hello: Hello
    num_connections: int = 0
    token: bytes = b""


_greetings = msgspec.msgpack.Decoder(_WireGreeting)
_refusals = msgspec.msgpack.Decoder(_WireRefusal)
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode_greeting(greeting: Greeting) -> bytes:
    hello = greeting.hello
    wire = _WireGreeting(
        **attrs.asdict(hello, recurse=False),
        num_connections=greeting.num_connections,
        token=greeting.token,
    )
    return msgspec.msgpack.encode(wire)


def decode_greeting(body: bytes) -> Greeting:
    """Raises: RemoteProtocolError for anything but a well-formed greeting within its limits."""
    try:
        wire = _greetings.decode(body)
    except _DECODE_ERRORS as error:
        raise RemoteProtocolError(f"peer sent a malformed greeting: {error}") from error
    hello = Hello(
        node_id=NodeId(wire.node_id),
        epoch=wire.epoch,
        fingerprint=wire.fingerprint,
        model=wire.model,
        granule_tokens=wire.granule_tokens,
        layout=wire.layout,
        handoff=wire.handoff,
        protocol_version=wire.protocol_version,
    )
    return Greeting(hello=hello, num_connections=wire.num_connections, token=wire.token)


def encode_refusal(mismatch: PeerMismatch) -> bytes:
    """The refusing side's view, turned round for the refused one."""
    limit = 1024
    wire = _WireRefusal(
        field=mismatch.field[:limit],
        ours=mismatch.theirs[:limit],
        theirs=mismatch.ours[:limit],
        remedy=mismatch.remedy[:limit],
    )
    return msgspec.msgpack.encode(wire)


def decode_refusal(body: bytes) -> PeerMismatch:
    """Raises: RemoteProtocolError."""
    try:
        wire = _refusals.decode(body)
    except _DECODE_ERRORS as error:
        raise RemoteProtocolError(f"peer sent a malformed refusal: {error}") from error
    return PeerMismatch(field=wire.field, ours=wire.ours, theirs=wire.theirs, remedy=wire.remedy)


def compare(ours: Hello, theirs: Hello) -> None:
    """Checks that two nodes can work together.

    An empty fingerprint on either side says that no cache is exchanged on the channel (a gateway
    talks to a worker); the fields that describe the cache are then not compared.

    Raises: PeerMismatch for the first difference.
    """
    if ours.protocol_version != theirs.protocol_version:
        raise PeerMismatch(
            field="protocol_version",
            ours=str(ours.protocol_version),
            theirs=str(theirs.protocol_version),
            remedy="run the same release of prfaas on both sides",
        )
    if not ours.fingerprint or not theirs.fingerprint:
        return
    if ours.fingerprint != theirs.fingerprint:
        raise PeerMismatch(
            field="fingerprint",
            ours=_model(ours),
            theirs=_model(theirs),
            remedy="serve the same model with the same cache dtypes and layers on both sides",
        )
    for field, remedy in (
        ("granule_tokens", "configure the same granule on both sides; prefix keys depend on it"),
        ("layout", "configure the same layout tag on both sides"),
        ("handoff", "configure the same handoff on both sides; a state cannot be rewound"),
    ):
        mine, its = getattr(ours, field), getattr(theirs, field)
        if mine != its:
            raise PeerMismatch(field=field, ours=_text(mine), theirs=_text(its), remedy=remedy)


def _model(hello: Hello) -> str:
    return f"{hello.model or 'unnamed model'} ({hello.fingerprint.hex()[:16]})"


def _text(value: object) -> str:
    return value.value if isinstance(value, Handoff) else str(value)
