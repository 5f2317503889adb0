"""What peers declare, as bytes, and what they must agree on."""

from __future__ import annotations

import contextlib

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core import Handoff, NodeId
from prfaas.errors import PeerMismatch, RemoteProtocolError
from prfaas.seams.transport import Hello
from prfaas.wire.handshake import (
    Greeting,
    compare,
    decode_greeting,
    decode_refusal,
    encode_greeting,
    encode_refusal,
)

OURS = Hello(node_id=NodeId("a"), epoch=3, fingerprint=b"\x01" * 16, model="kimi-linear")

HELLOS = st.builds(
    Hello,
    node_id=st.text(min_size=1, max_size=300).map(NodeId),
    epoch=st.integers(0, 2**63 - 1),
    fingerprint=st.binary(max_size=64),
    model=st.text(max_size=100),
    granule_tokens=st.integers(1, 2**31),
    layout=st.text(max_size=100),
    handoff=st.sampled_from(Handoff),
    protocol_version=st.integers(0, 2**16),
)
GREETINGS = st.builds(
    Greeting, hello=HELLOS, num_connections=st.integers(0, 64), token=st.binary(max_size=16)
)


@given(GREETINGS)
def test_greeting_round_trip(greeting: Greeting) -> None:
    assert decode_greeting(encode_greeting(greeting)) == greeting


def test_ids_travel_verbatim() -> None:
    name = NodeId("pod/7: über räck " + "x" * 200)
    hello = attrs.evolve(OURS, node_id=name)
    assert decode_greeting(encode_greeting(Greeting(hello=hello))).hello.node_id == name


@given(st.binary(max_size=200) | GREETINGS.map(encode_greeting), st.data())
def test_damaged_greetings_raise_only_remote_protocol_errors(
    body: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_greeting, decode_refusal):
        with contextlib.suppress(RemoteProtocolError):
            decode(bytes(damaged))


def test_deep_nesting_is_a_remote_protocol_error() -> None:
    with pytest.raises(RemoteProtocolError, match="malformed greeting"):
        decode_greeting(b"\x81\xa1x" + b"\x91" * 60_000 + b"\x00")


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": 2**63},
        {"epoch": "3"},
        {"fingerprint": bytes(65)},
        {"node_id": "x" * 1025},
        {"node_id": ""},
        {"granule_tokens": 0},
        {"handoff": "whenever"},
        {"num_connections": 65},
        {"token": bytes(17)},
    ],
)
def test_fields_are_bounded_and_strict(change: dict[str, object]) -> None:
    fields = msgspec.msgpack.decode(encode_greeting(Greeting(hello=OURS)))
    assert decode_greeting(msgspec.msgpack.encode(fields)).hello == OURS
    with pytest.raises(RemoteProtocolError, match="malformed greeting"):
        decode_greeting(msgspec.msgpack.encode(fields | change))


def test_equal_hellos_agree_whatever_their_names() -> None:
    compare(OURS, attrs.evolve(OURS, node_id=NodeId("b"), epoch=9, model="another name"))


@pytest.mark.parametrize(
    ("field", "value", "ours", "theirs"),
    [
        ("protocol_version", 2, "1", "2"),
        ("fingerprint", b"\x02" * 16, "kimi-linear (0101010101010101)", "qwen (0202020202020202)"),
        ("granule_tokens", 128, "64", "128"),
        ("layout", "token.layer", "group.layer.token", "token.layer"),
        ("handoff", Handoff.BEFORE_LAST, "after_prompt", "before_last"),
    ],
)
def test_a_difference_names_field_ours_theirs_and_remedy(
    field: str, value: object, ours: str, theirs: str
) -> None:
    other = attrs.evolve(OURS, model="qwen", **{field: value})
    with pytest.raises(PeerMismatch) as caught:
        compare(OURS, other)
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (field, ours, theirs)
    assert caught.value.remedy
    assert all(word in str(caught.value) for word in (field, ours, theirs, caught.value.remedy))


@pytest.mark.parametrize("gateway_is_ours", [True, False])
def test_an_empty_fingerprint_skips_the_cache_fields_only(gateway_is_ours: bool) -> None:
    gateway = Hello(
        node_id=NodeId("g"),
        epoch=1,
        fingerprint=b"",
        granule_tokens=1,
        layout="none",
        handoff=Handoff.BEFORE_LAST,
    )
    newer = attrs.evolve(gateway, protocol_version=2)
    for other, agrees in ((gateway, True), (newer, False)):
        sides = (other, OURS) if gateway_is_ours else (OURS, other)
        if agrees:
            compare(*sides)
        else:
            with pytest.raises(PeerMismatch, match="protocol_version"):
                compare(*sides)


def test_a_refusal_is_turned_round() -> None:
    mismatch = PeerMismatch(field="layout", ours="x" * 2000, theirs="b", remedy="agree")
    refusal = decode_refusal(encode_refusal(mismatch))
    assert (refusal.field, refusal.ours, refusal.theirs) == ("layout", "b", "x" * 1024)
    assert refusal.remedy == "agree"
