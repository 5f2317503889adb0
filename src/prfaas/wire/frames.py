"""The frame codec: one byte format for every transport.

A frame is a header of 16 bytes and a body. Integers are little endian::

    0   4 bytes   magic "PRFS"
    4   1 byte    frame version
    5   1 byte    kind
    6   2 bytes   flags
    8   8 bytes   bytes in the body

The body of a PUT starts with 40 bytes of fields (window token 16, offset 8, sequence 8, xxh3_64
checksum 8) and ends with the payload. A receiver decodes header and fields alone, with
`decode_put`, and reads the payload straight into the window that they name.

Nothing that a peer sends can raise anything but RemoteProtocolError.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Collection, Iterator

import attrs

from prfaas.errors import RemoteProtocolError

MAGIC = b"PRFS"
FRAME_VERSION = 1
"""Layout of the header; what the frames mean is versioned by the handshake."""
TOKEN_BYTES = 16
HEADER_BYTES = 16
PUT_HEADER_BYTES = 56
MAX_CONTROL_BYTES = 8 << 20
"""Limit of a control frame: prompts travel in them (a million tokens is about 4 MiB)."""
MAX_HANDSHAKE_BYTES = 64 << 10
MAX_PUT_BYTES = 16 << 20

_HEADER = struct.Struct("<4sBBHQ")
_PUT = struct.Struct("<4sBBHQ16sQQQ")
_PUT_FIELDS_BYTES = PUT_HEADER_BYTES - HEADER_BYTES
_JOIN = struct.Struct("<16sB")
_ACK = struct.Struct("<Q")
_NACK = struct.Struct("<QB")
_CHECKED = 1


class Kind(enum.IntEnum):
    """What a frame says."""

    HELLO = 1  # dialler: who I am
    WELCOME = 2  # listener: who I am, you are in
    REFUSE = 3  # listener: why you are not
    JOIN = 4  # dialler, on a fresh connection: it belongs to that channel
    CONTROL = 5  # a frame of the channel's user
    PUT = 6  # bytes for a window
    ACK = 7  # they are at their destination
    NACK = 8  # they are not, and why
    BYE = 9  # no frame follows


class NackReason(enum.IntEnum):
    """Why a put did not land."""

    UNKNOWN_WINDOW = 1  # never exposed to this peer, or withdrawn
    OUT_OF_BOUNDS = 2
    CHECKSUM = 3


class Direction(enum.IntEnum):
    """Which way the puts of a data connection go."""

    TO_LISTENER = 0
    TO_DIALLER = 1


@attrs.frozen
class Frame:
    """A decoded frame other than a PUT. ``body`` has the length that its kind demands."""

    kind: Kind
    body: bytes


@attrs.frozen(kw_only=True)
class PutHeader:
    """What precedes the payload of a PUT.

    Attributes:
        token: the window, as its owner named it.
        offset: first byte in the window.
        num_bytes: payload length.
        sequence: the sender's number for this frame, repeated in ACK and NACK.
        checksum: xxh3_64 of the payload; None if the sender computed none.
    """

    token: bytes
    offset: int
    num_bytes: int
    sequence: int
    checksum: int | None


_BODY_BYTES = {Kind.JOIN: _JOIN.size, Kind.ACK: _ACK.size, Kind.NACK: _NACK.size, Kind.BYE: 0}


def encode_header(kind: Kind, num_bytes: int) -> bytes:
    """Header alone, for a body that is sent from where it lies."""
    return _HEADER.pack(MAGIC, FRAME_VERSION, kind, 0, num_bytes)


def encode_frame(kind: Kind, body: bytes = b"") -> bytes:
    """Header and body of any frame but a PUT."""
    return encode_header(kind, len(body)) + body


def encode_join(token: bytes, direction: Direction) -> bytes:
    return encode_frame(Kind.JOIN, _JOIN.pack(token, direction))


def encode_ack(sequence: int) -> bytes:
    return encode_frame(Kind.ACK, _ACK.pack(sequence))


def encode_nack(sequence: int, reason: NackReason) -> bytes:
    return encode_frame(Kind.NACK, _NACK.pack(sequence, reason))


def encode_put(put: PutHeader) -> bytes:
    """Header and fields of a PUT; the payload follows on the wire."""
    flags, checksum = (0, 0) if put.checksum is None else (_CHECKED, put.checksum)
    length = put.num_bytes + _PUT_FIELDS_BYTES
    return _PUT.pack(
        MAGIC, FRAME_VERSION, Kind.PUT, flags, length, put.token, put.offset, put.sequence, checksum
    )


def decode_header(
    header: bytes | bytearray, accept: Collection[Kind], max_body_bytes: int
) -> tuple[Kind, int]:
    """Kind and body length of a frame, from its first 16 bytes.

    Raises: RemoteProtocolError for another magic or version, flags, a kind that is not in
    ``accept``, a length above the limit, or a length that the kind cannot have.
    """
    magic, version, code, flags, num_bytes = _HEADER.unpack_from(header)
    kind = _kind(magic, version, code)
    if kind not in accept or kind is Kind.PUT:
        raise RemoteProtocolError(f"peer sent {kind.name}, which has no place here")
    if flags:
        raise RemoteProtocolError(f"peer sent {kind.name} with flags {flags:#x}; it has none")
    if num_bytes > max_body_bytes:
        raise RemoteProtocolError(
            f"peer announced {kind.name} of {num_bytes} bytes; the limit is {max_body_bytes}"
        )
    exact = _BODY_BYTES.get(kind)
    if exact is not None and num_bytes != exact:
        raise RemoteProtocolError(f"peer sent {kind.name} of {num_bytes} bytes; it has {exact}")
    return kind, num_bytes


def decode_put(header: bytes | bytearray) -> PutHeader:
    """A PUT's header and fields, from its first 56 bytes. Raises: RemoteProtocolError."""
    magic, version, code, flags, length, token, offset, sequence, checksum = _PUT.unpack(header)
    kind = _kind(magic, version, code)
    if kind is not Kind.PUT:
        raise RemoteProtocolError(f"peer sent {kind.name} on a connection for PUT")
    num_bytes = length - _PUT_FIELDS_BYTES
    if not 0 <= num_bytes <= MAX_PUT_BYTES:
        raise RemoteProtocolError(
            f"peer announced PUT of {num_bytes} bytes; the limits are 0 and {MAX_PUT_BYTES}"
        )
    if flags & ~_CHECKED:
        raise RemoteProtocolError(f"peer sent PUT with flags {flags:#x}; only 0x1 is defined")
    return PutHeader(
        token=token,
        offset=offset,
        num_bytes=num_bytes,
        sequence=sequence,
        checksum=checksum if flags & _CHECKED else None,
    )


def decode_join(body: bytes) -> tuple[bytes, Direction]:
    """Channel token and direction of a JOIN's body. Raises: RemoteProtocolError."""
    token, direction = _JOIN.unpack(body)
    try:
        return token, Direction(direction)
    except ValueError:
        raise RemoteProtocolError(
            f"peer joined with direction {direction}; there are 0 and 1"
        ) from None


def decode_ack(body: bytes) -> int:
    """Sequence number of an ACK's body."""
    sequence: int = _ACK.unpack(body)[0]
    return sequence


def decode_nack(body: bytes) -> tuple[int, NackReason]:
    """Sequence number and reason of a NACK's body. Raises: RemoteProtocolError."""
    sequence, reason = _NACK.unpack(body)
    try:
        return sequence, NackReason(reason)
    except ValueError:
        raise RemoteProtocolError(f"peer gave NACK reason {reason}, which is unknown") from None


def _kind(magic: bytes, version: int, code: int) -> Kind:
    if magic != MAGIC:
        raise RemoteProtocolError(f"peer sent {magic!r} where a frame starts with {MAGIC!r}")
    if version != FRAME_VERSION:
        raise RemoteProtocolError(f"peer speaks frame version {version}; ours is {FRAME_VERSION}")
    try:
        return Kind(code)
    except ValueError:
        raise RemoteProtocolError(f"peer sent frame kind {code}, which is unknown") from None


class FrameDecoder:
    """Cuts a byte stream into frames; holds at most one incomplete frame.

    Args:
        accept: kinds that may come on this stream; a PUT never may.
        max_body_bytes: limit of one frame's body.
    """

    def __init__(
        self, accept: Collection[Kind], *, max_body_bytes: int = MAX_CONTROL_BYTES
    ) -> None:
        self._accept = accept
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()
        self._error: RemoteProtocolError | None = None

    def __repr__(self) -> str:
        state = "broken" if self._error else f"{len(self._buffer)} bytes held"
        return f"<FrameDecoder {state}>"

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Takes ``data`` and yields the frames that are now complete.

        Raises: RemoteProtocolError, behind the frames that precede the fault; from then on always.
        """
        if self._error is None:
            self._buffer += data
        return self._frames()

    def _frames(self) -> Iterator[Frame]:
        if self._error is not None:
            raise self._error
        buffer = self._buffer
        try:
            while len(buffer) >= HEADER_BYTES:
                kind, num_bytes = decode_header(buffer, self._accept, self._max_body_bytes)
                stop = HEADER_BYTES + num_bytes
                if len(buffer) < stop:
                    return
                body = bytes(memoryview(buffer)[HEADER_BYTES:stop])
                del buffer[:stop]
                yield Frame(kind, body)
        except RemoteProtocolError as error:
            self._error = error
            self._buffer.clear()
            raise
