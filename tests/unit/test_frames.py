"""The frame codec: any chunking gives the same frames, and no bytes do harm."""

from __future__ import annotations

import contextlib
import pickle
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import RemoteProtocolError
from prfaas.wire.frames import (
    HEADER_BYTES,
    MAX_PUT_BYTES,
    PUT_HEADER_BYTES,
    Direction,
    Frame,
    FrameDecoder,
    Kind,
    NackReason,
    PutHeader,
    decode_ack,
    decode_header,
    decode_join,
    decode_nack,
    decode_put,
    encode_ack,
    encode_frame,
    encode_join,
    encode_nack,
    encode_put,
)

STREAM_KINDS = tuple(kind for kind in Kind if kind is not Kind.PUT)
U64 = st.integers(0, 2**64 - 1)
TOKENS = st.binary(min_size=16, max_size=16)


def bodies(kind: Kind) -> st.SearchStrategy[bytes]:
    size = {Kind.JOIN: 17, Kind.ACK: 8, Kind.NACK: 9, Kind.BYE: 0}.get(kind)
    return st.binary(max_size=300) if size is None else st.binary(min_size=size, max_size=size)


FRAMES = st.sampled_from(STREAM_KINDS).flatmap(
    lambda kind: st.builds(Frame, st.just(kind), bodies(kind))
)
PUTS = st.builds(
    PutHeader,
    token=TOKENS,
    offset=U64,
    num_bytes=st.integers(0, MAX_PUT_BYTES),
    sequence=U64,
    checksum=st.none() | U64,
)


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    places = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(12)))
    return [data[i:j] for i, j in zip([0, *places], [*places, len(data)], strict=True)]


@given(st.lists(FRAMES, max_size=8), st.randoms(use_true_random=False))
def test_any_chunking_gives_the_same_frames(sent: list[Frame], rng: random.Random) -> None:
    data = b"".join(encode_frame(frame.kind, frame.body) for frame in sent)
    decoder = FrameDecoder(STREAM_KINDS)
    received = [frame for piece in cut(data, rng) for frame in decoder.feed(piece)]
    assert received == sent


@given(PUTS)
def test_put_header_round_trip(put: PutHeader) -> None:
    header = encode_put(put)
    assert len(header) == PUT_HEADER_BYTES
    assert decode_put(header) == put


@given(TOKENS, st.sampled_from(Direction), U64, st.sampled_from(NackReason))
def test_small_bodies_round_trip(
    token: bytes, direction: Direction, sequence: int, reason: NackReason
) -> None:
    data = encode_join(token, direction) + encode_ack(sequence) + encode_nack(sequence, reason)
    join, ack, nack = FrameDecoder((Kind.JOIN, Kind.ACK, Kind.NACK)).feed(data)
    assert decode_join(join.body) == (token, direction)
    assert decode_ack(ack.body) == sequence
    assert decode_nack(nack.body) == (sequence, reason)


def test_layout_is_the_documented_one() -> None:
    assert encode_frame(Kind.CONTROL, b"hi") == b"PRFS\x01\x05\x00\x00\x02" + bytes(7) + b"hi"
    put = PutHeader(token=b"t" * 16, offset=1, num_bytes=2, sequence=3, checksum=4)
    fields = b"t" * 16 + struct.pack("<QQQ", 1, 3, 4)
    assert encode_put(put) == b"PRFS\x01\x06\x01\x00" + struct.pack("<Q", 42) + fields


def decode_everything(data: bytes) -> None:
    for frame in FrameDecoder(STREAM_KINDS).feed(data):
        decoders = {Kind.JOIN: decode_join, Kind.ACK: decode_ack, Kind.NACK: decode_nack}
        if frame.kind in decoders:
            decoders[frame.kind](frame.body)


@given(st.binary(max_size=200), st.lists(FRAMES, max_size=2), st.data())
def test_random_bytes_raise_only_remote_protocol_errors(
    noise: bytes, sent: list[Frame], data: st.DataObject
) -> None:
    stream = bytearray(b"".join(encode_frame(frame.kind, frame.body) for frame in sent) + noise)
    for _ in range(data.draw(st.integers(0, 3))):
        if stream:
            stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_everything, lambda b: decode_put(b[:PUT_HEADER_BYTES].ljust(56, b"\0"))):
        with contextlib.suppress(RemoteProtocolError):
            decode(bytes(stream))


@given(PUTS, st.integers(0, 7), st.integers(0, 255))
def test_damaged_put_headers_raise_only_remote_protocol_errors(
    put: PutHeader, place: int, value: int
) -> None:
    header = bytearray(encode_put(put))
    header[place] = value
    try:
        decoded = decode_put(header)
    except RemoteProtocolError:
        return
    assert header[:7] == encode_put(decoded)[:7]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\n", "GET "),
        (pickle.dumps({"a": 1}).ljust(16, b"."), "starts with"),
        (b"PRFS\x02\x05\x00\x00" + bytes(8), "frame version 2"),
        (b"PRFS\x01\x63\x00\x00" + bytes(8), "kind 99"),
        (b"PRFS\x01\x05\x01\x00" + bytes(8), "flags 0x1"),
        (b"PRFS\x01\x05\x00\x00" + struct.pack("<Q", 2**63), str(2**63)),
        (b"PRFS\x01\x05\x00\x00" + struct.pack("<Q", (8 << 20) + 1), "the limit is 8388608"),
        (b"PRFS\x01\x07\x00\x00" + struct.pack("<Q", 9), "ACK of 9 bytes; it has 8"),
        (b"PRFS\x01\x06\x00\x00" + struct.pack("<Q", 40), "PUT, which has no place here"),
    ],
)
def test_a_bad_header_is_refused_before_a_body_comes(data: bytes, said: str) -> None:
    decoder = FrameDecoder(Kind)
    with pytest.raises(RemoteProtocolError, match=said):
        list(decoder.feed(data))


@pytest.mark.parametrize("length", [39, 40 + MAX_PUT_BYTES + 1, 2**63])
def test_put_lengths_are_bounded(length: int) -> None:
    put = PutHeader(token=bytes(16), offset=0, num_bytes=0, sequence=0, checksum=None)
    header = bytearray(encode_put(put))
    header[8:16] = struct.pack("<Q", length)
    with pytest.raises(RemoteProtocolError, match="announced PUT"):
        decode_put(header)


def test_put_flags_and_kind_are_checked() -> None:
    put = PutHeader(token=bytes(16), offset=0, num_bytes=0, sequence=0, checksum=None)
    header = bytearray(encode_put(put))
    header[6] = 2
    with pytest.raises(RemoteProtocolError, match="flags 0x2"):
        decode_put(header)
    with pytest.raises(RemoteProtocolError, match="CONTROL on a connection for PUT"):
        decode_put(encode_frame(Kind.CONTROL, bytes(40)))


def test_unknown_reasons_and_directions_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="reason 77"):
        decode_nack(bytes(8) + b"\x4d")
    with pytest.raises(RemoteProtocolError, match="direction 2"):
        decode_join(bytes(16) + b"\x02")


def test_a_kind_that_is_not_expected_is_refused() -> None:
    header = encode_frame(Kind.HELLO)
    assert decode_header(header, (Kind.HELLO,), 0) == (Kind.HELLO, 0)
    with pytest.raises(RemoteProtocolError, match="HELLO, which has no place here"):
        list(FrameDecoder((Kind.CONTROL,)).feed(header))


def test_frames_before_the_fault_are_delivered_and_nothing_after_it() -> None:
    decoder = FrameDecoder((Kind.CONTROL,))
    frames_ = decoder.feed(encode_frame(Kind.CONTROL, b"first") + b"x" * HEADER_BYTES)
    assert next(frames_).body == b"first"
    with pytest.raises(RemoteProtocolError):
        next(frames_)
    with pytest.raises(RemoteProtocolError):
        list(decoder.feed(encode_frame(Kind.CONTROL, b"second")))


def test_memory_is_bounded() -> None:
    limit = 1000
    decoder = FrameDecoder((Kind.CONTROL,), max_body_bytes=limit)
    piece = encode_frame(Kind.CONTROL, bytes(limit)) * 3
    for _ in range(20):
        assert len(list(decoder.feed(piece[:2500]))) + len(list(decoder.feed(piece[2500:]))) == 3
        assert len(decoder._buffer) == 0
    list(decoder.feed(encode_frame(Kind.CONTROL, bytes(limit))[:-1]))
    assert repr(decoder) == f"<FrameDecoder {HEADER_BYTES + limit - 1} bytes held>"
    with pytest.raises(RemoteProtocolError):
        list(decoder.feed(b"\0" + bytes(HEADER_BYTES)))
    with pytest.raises(RemoteProtocolError):
        decoder.feed(bytes(10_000)).__next__()
    assert len(decoder._buffer) == 0
    assert repr(decoder) == "<FrameDecoder broken>"
