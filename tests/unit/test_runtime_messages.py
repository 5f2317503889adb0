"""Messages of the control channels: what they carry, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core import Request, RequestId
from prfaas.errors import ConfigError, RemoteProtocolError, RequestError
from prfaas.runtime.messages import (
    CONTROL,
    MAX_ID_CHARS,
    MAX_REASON_CHARS,
    TRANSFER,
    Answer,
    CacheBody,
    CacheChanged,
    Cancel,
    Expect,
    Finished,
    Generate,
    Prefill,
    Register,
    Submit,
    Token,
    decode,
    encode,
    encode_transfer,
    pack_tokens,
    plain_text,
    prompt_fields,
    unpack_tokens,
)
from prfaas.transfer import Renew
from prfaas.transfer.messages import MAX_ID_CHARS as MAX_TRANSFER_ID_CHARS
from prfaas.wire.frames import MAX_CONTROL_BYTES

FIELDS: dict[str, Any] = {
    "request_id": "zwölf/漢字: #1",
    "attempt": 3,
    "tokens": pack_tokens([1, 2**32 - 1]),
    "max_new_tokens": 5,
    "deadline_s": 1.5,
}
MESSAGES = [
    Register(),
    Prefill(**FIELDS, decode_node="d", decode_address="tcp://[::1]:5"),
    Expect(**FIELDS, prefill_node="p"),
    Generate(**FIELDS, tenant="t", return_logits=True),
    Submit(**(FIELDS | {"tokens": b"", "max_new_tokens": -1})),
    Cancel(request_id="r", attempt=0, reason=""),
    Token(request_id="r", attempt=2**31 - 1, index=7, token=9, logits=b"\x00\xff"),
    CacheChanged(
        events=(CacheBody(sequence=1, group_id=0, stored=(b"a" * 16,), removed=()),),
    ),
    Answer(request_id="r", tokens=(1, 2), logits=(), record={"a": 1.5, "b": None, "c": True}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back_as_they_were(message: Any) -> None:
    assert decode(encode(message)) == message


def test_families_are_told_apart_by_the_first_byte() -> None:
    renew = encode_transfer(Renew(transfer_id="t"))
    assert renew[:1] == TRANSFER
    for frame in (renew, b"", b"\x00", encode(Register())[1:]):
        with pytest.raises(RemoteProtocolError, match="starts with"):
            decode(frame)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_the_protocol_error(data: bytes) -> None:
    for frame in (data, CONTROL + data):
        try:
            decode(frame)
        except RemoteProtocolError:
            continue


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_raise_only_the_protocol_error(message: Any, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        try:
            decode(damaged)
        except RemoteProtocolError:
            continue


@pytest.mark.parametrize("claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6" * 5])
@pytest.mark.parametrize("field", ["events", "tokens", "record", "stored"])
def test_a_claimed_length_reserves_nothing(field: str, claim: bytes) -> None:
    kind = {"events": "CacheChanged", "stored": "CacheSnapshot"}.get(field, "Answer")
    head = b"\x82" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode(kind)
    with pytest.raises(RemoteProtocolError):
        decode(CONTROL + head + msgspec.msgpack.encode(field) + claim)


def test_nesting_has_a_limit() -> None:
    with pytest.raises(RemoteProtocolError):
        decode(CONTROL + b"\x91" * 100_000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_id": ""},
        {"request_id": "x" * (MAX_ID_CHARS + 1)},
        {"attempt": -1},
        {"attempt": 2**31},
        {"tokens": b""},
        {"tokens": b"abc"},
        {"max_new_tokens": 0},
        {"deadline_s": 0.0},
        {"deadline_s": math.nan},
    ],
)
def test_wrong_work_is_refused_on_both_sides(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Generate(**(FIELDS | wrong))
    body = {"type": "Generate"} | FIELDS | wrong
    with pytest.raises(RemoteProtocolError):
        decode(CONTROL + msgspec.msgpack.encode(body))


def test_work_is_named_by_request_and_attempt_within_a_transfer_id() -> None:
    work = Generate(**(FIELDS | {"request_id": "x" * MAX_ID_CHARS, "attempt": 2**31 - 1}))
    assert len(work.key) <= MAX_TRANSFER_ID_CHARS
    other = Generate(**(FIELDS | {"request_id": "a#1", "attempt": 0}))
    assert other.key == "a#1#0"
    assert other.num_tokens == 2


def test_what_no_frame_can_hold_is_our_error() -> None:
    with pytest.raises(ConfigError, match=f"a frame holds {MAX_CONTROL_BYTES}"):
        encode(Token(request_id="r", attempt=0, index=0, token=0, logits=bytes(MAX_CONTROL_BYTES)))
    with pytest.raises(ConfigError, match="Cancel cannot be sent"):
        encode(Cancel(request_id="r", attempt=0, reason="\udc80"))
    with pytest.raises(ConfigError, match="Token cannot be sent"):
        encode(Token(request_id="r", attempt=0, index=2**64, token=0, logits=b""))


def test_floats_that_are_no_numbers_survive_for_the_ledger_to_judge() -> None:
    zeros = dict.fromkeys(("received_bytes", "expected_bytes", "held_tokens"), 0)
    finished = Finished(
        request_id="r",
        attempt=0,
        **zeros,
        decode_prefilled_tokens=0,
        decode_wait_s=math.inf,
        decode_step_s=-1.0,
    )
    assert decode(encode(finished)) == finished


def test_a_request_becomes_the_fields_of_a_message() -> None:
    request = Request(request_id=RequestId("r"), tokens=[5, 6], tenant="t", return_logits=True)
    submit = Submit(attempt=0, deadline_s=2.0, **prompt_fields(request))
    assert unpack_tokens(submit.tokens) == request.tokens
    assert (submit.max_new_tokens, submit.tenant, submit.return_logits) == (16, "t", True)
    with pytest.raises(RequestError, match=r"a request of 1 tokens: .*surrogate"):
        prompt_fields(Request(request_id=RequestId("\ud800"), tokens=[5]))


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_are_packed_little_endian(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert unpack_tokens(packed) == tuple(tokens)


def test_part_of_a_token_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="5 bytes"):
        unpack_tokens(bytes(5))


def test_the_text_of_any_error_fits_a_message() -> None:
    assert plain_text(ValueError()) == "ValueError"
    text = plain_text(ValueError("\udc80" + "x" * 9999))
    assert text.startswith("?x")
    assert len(text) == MAX_REASON_CHARS
    encode(Cancel(request_id="r", attempt=0, reason=text))
