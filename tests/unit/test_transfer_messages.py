"""Messages between the two sides of a transfer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core import GroupId, RequestId, TransferId
from prfaas.errors import ConfigError, RemoteProtocolError
from prfaas.seams.transport import WindowRef
from prfaas.transfer import (
    Abort,
    Accept,
    Done,
    EndCode,
    Landed,
    Message,
    Offer,
    Reject,
    Renew,
    decode,
    encode,
)
from prfaas.transfer.messages import MAX_ENTRY_BYTES, MAX_MESSAGE_BYTES

OFFER: dict[str, Any] = {
    "type": "offer",
    "transfer_id": "t",
    "request_id": "r",
    "num_tokens": 100,
    "kv_tokens": 100,
    "state_tokens": 100,
    "num_senders": 2,
    "group_bytes": {0: 10, 1: 0},
    "lease_s": 5.0,
}
ACCEPT: dict[str, Any] = {
    "type": "accept",
    "transfer_id": "t",
    "window_token": b"w",
    "window_bytes": 10,
    "start_token": 0,
}
DONE: dict[str, Any] = {"type": "done", "transfer_id": "t", "sender_rank": 0, "sent_bytes": 0}
ABORT: dict[str, Any] = {"type": "abort", "transfer_id": "t", "code": "failed", "reason": ""}

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
IDS = TEXT.map(TransferId)
COUNTS = st.integers(0, 2**32)
SIZES = st.integers(0, MAX_ENTRY_BYTES)
CODES = st.sampled_from(EndCode)


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    num_tokens = draw(COUNTS)
    return Offer(
        transfer_id=draw(IDS),
        request_id=RequestId(draw(TEXT)),
        num_tokens=num_tokens,
        kv_tokens=num_tokens,
        state_tokens=draw(st.sampled_from([num_tokens, None])),
        num_senders=draw(st.integers(1, 1024)),
        group_bytes=draw(
            st.dictionaries(st.integers(0, 255).map(GroupId), SIZES, min_size=1, max_size=256)
        ),
        lease_s=draw(st.floats(0, 3600, exclude_min=True)),
    )


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    offers(),
    st.builds(
        Accept,
        transfer_id=IDS,
        window_token=st.binary(min_size=1, max_size=64),
        window_bytes=SIZES,
        start_token=COUNTS,
    ),
    st.builds(Reject, transfer_id=IDS, code=CODES, reason=TEXT),
    st.builds(
        Done,
        transfer_id=IDS,
        sender_rank=st.integers(0, 1023),
        sent_bytes=SIZES,
        first_token=st.none() | st.integers(0, 2**32 - 1),
    ),
    st.builds(Landed, transfer_id=IDS),
    st.builds(Renew, transfer_id=IDS),
    st.builds(Abort, transfer_id=IDS, code=CODES, reason=TEXT),
)


@given(MESSAGES)
def test_messages_survive_the_wire(message: Message) -> None:
    frame = encode(message)
    assert len(frame) <= MAX_MESSAGE_BYTES
    assert decode(frame) == message


def test_the_wire_form_is_fixed() -> None:
    done = Done(transfer_id=TransferId("t"), sender_rank=1, sent_bytes=300, first_token=7)
    fields = b"\xa4type\xa4done\xabtransfer_id\xa1t\xabsender_rank\x01\xaasent_bytes\xcd\x01\x2c"
    assert encode(done) == b"\x85" + fields + b"\xabfirst_token\x07"
    assert encode(msgspec.structs.replace(done, first_token=None)) == b"\x84" + fields


@pytest.mark.parametrize("text", ["a" * 200, "x/y:z 1", "äöü/日本語:🙂", " "])
def test_h27_ids_survive_verbatim(text: str) -> None:
    offer = msgspec.structs.replace(decode_map(OFFER), request_id=text, transfer_id=text)
    decoded = decode(encode(offer))
    assert isinstance(decoded, Offer)
    assert (decoded.request_id, decoded.transfer_id) == (text, text)


def test_accept_carries_the_window() -> None:
    accept = decode_map(ACCEPT)
    assert isinstance(accept, Accept)
    assert accept.window == WindowRef(b"w", 10)


def decode_map(fields: dict[str, Any]) -> Message:
    return decode(msgspec.msgpack.encode(fields))


WRONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((OFFER, {"num_tokens": n, "kv_tokens": n, "state_tokens": n}) for n in (-1, 2**32 + 1)),
    (OFFER, {"num_tokens": "100"}),
    (OFFER, {"num_tokens": True, "kv_tokens": True, "state_tokens": None}),
    (OFFER, {"num_tokens": 100.5}),
    (OFFER, {"kv_tokens": 99}),
    (OFFER, {"kv_tokens": 99, "state_tokens": 99}),
    (OFFER, {"num_senders": 0}),
    (OFFER, {"num_senders": 1025}),
    (OFFER, {"group_bytes": {}}),
    (OFFER, {"group_bytes": {-1: 1}}),
    (OFFER, {"group_bytes": {256: 1}}),
    (OFFER, {"group_bytes": {"0": 1}}),
    (OFFER, {"group_bytes": {0: -1}}),
    (OFFER, {"group_bytes": {0: MAX_ENTRY_BYTES + 1}}),
    (OFFER, {"group_bytes": [1, 2]}),
    (OFFER, {"lease_s": 0.0}),
    (OFFER, {"lease_s": float("nan")}),
    (OFFER, {"lease_s": float("inf")}),
    (OFFER, {"transfer_id": ""}),
    (OFFER, {"transfer_id": "x" * 1025}),
    (OFFER, {"request_id": b"r"}),
    (OFFER, {"unknown": 1}),
    (OFFER, {"type": "landed"}),
    (OFFER, {"type": "nonsense"}),
    (ACCEPT, {"window_token": b""}),
    (ACCEPT, {"window_token": b"x" * 8193}),
    (ACCEPT, {"window_bytes": -1}),
    (ACCEPT, {"window_bytes": 2**63}),
    (ACCEPT, {"start_token": -1}),
    (DONE, {"sender_rank": 1024}),
    (DONE, {"sender_rank": -1}),
    (DONE, {"sent_bytes": -1}),
    (DONE, {"first_token": -1}),
    (DONE, {"first_token": 2**32}),
    (ABORT, {"code": "because"}),
    (ABORT, {"reason": "x" * 2001}),
]


@pytest.mark.parametrize(("fields", "change"), WRONG)
def test_wrong_fields_are_refused(fields: dict[str, Any], change: dict[str, Any]) -> None:
    decode_map(fields)
    with pytest.raises(RemoteProtocolError, match="not a transfer message"):
        decode_map(fields | change)


@pytest.mark.parametrize("fields", [OFFER, ACCEPT, DONE, ABORT])
def test_missing_fields_are_refused(fields: dict[str, Any]) -> None:
    for name in fields.keys() - {"reason"}:
        with pytest.raises(RemoteProtocolError):
            decode_map({key: value for key, value in fields.items() if key != name})


def test_h09_a_state_of_other_tokens_than_the_rows_is_refused() -> None:
    for state_tokens in (99, 101):
        with pytest.raises(RemoteProtocolError, match=f"state_tokens is {state_tokens}, kv_tokens"):
            decode_map(OFFER | {"state_tokens": state_tokens})
    without_state = decode_map(OFFER | {"state_tokens": None})
    assert isinstance(without_state, Offer)
    with pytest.raises(ConfigError, match="a state cannot be rewound"):
        msgspec.structs.replace(decode_map(OFFER), state_tokens=99)


@pytest.mark.parametrize(
    "change",
    [{"lease_s": -1.0}, {"num_senders": 0}, {"request_id": "\ud800"}, {"group_bytes": {0: 2**70}}],
)
def test_what_a_peer_would_refuse_is_not_sent(change: dict[str, Any]) -> None:
    offer = msgspec.structs.replace(decode_map(OFFER), **change)
    with pytest.raises(ConfigError, match="Offer cannot be sent"):
        encode(offer)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_remote_protocol_error(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(frame)


@given(MESSAGES, st.data())
def test_damaged_messages_raise_only_remote_protocol_error(
    message: Message, data: st.DataObject
) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    try:
        decoded = decode(bytes(frame[:cut]))
    except RemoteProtocolError:
        return
    assert decode(encode(decoded)) == decoded


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",  # a list that claims 2^32 items
        b"\xdf\xff\xff\xff\xff",  # a map that claims 2^32 items
        b"\x82\xa4type\xa4done\xabtransfer_id\xdb\xff\xff\xff\xff",  # text that claims 4 GiB
        b"\x82\xa4type\xa6landed\xabtransfer_id\xa1\xff",  # not UTF-8
        b"\x91" * MAX_MESSAGE_BYTES,
        b"\x81\xa4type" + b"\x81" * 60_000,
        b"\x82\xa4type\xa6landed\xa1x" + b"\x91" * 60_000,
    ],
)
def test_h31_hostile_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(frame)


def test_a_frame_that_no_message_needs_is_not_even_read() -> None:
    with pytest.raises(RemoteProtocolError, match="message of 65537 bytes; at most 65536"):
        decode(b"\x00" * (MAX_MESSAGE_BYTES + 1))
