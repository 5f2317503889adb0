"""The vocabulary: requests are checked at the door, and the door says why."""

from __future__ import annotations

import pytest

from prfaas.core import (
    MAX_TOKEN_ID,
    DType,
    Handoff,
    Request,
    RequestId,
    Role,
    cdiv,
    round_down,
)
from prfaas.errors import ConfigError, MissingExtra, PeerMismatch, PrfaasError, RequestError
from prfaas.hashing import block_hashes, hash_blocks, hash_granules, root_hash
from prfaas.seams import Hello, Plan, RoutedRequest


def request(**changes: object) -> Request:
    fields = {"request_id": RequestId("r"), "tokens": (1, 2, 3), **changes}
    return Request(**fields)  # type: ignore[arg-type]


def test_a_request_keeps_its_prompt_as_a_tuple() -> None:
    made = request(tokens=[0, MAX_TOKEN_ID])
    assert made.tokens == (0, MAX_TOKEN_ID)
    assert made.num_tokens == 2
    assert "<2 tokens>" in repr(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ()}, "the prompt is empty"),
        ({"tokens": "abc"}, "got str; tokenize first"),
        ({"tokens": b"abc"}, "got bytes; tokenize first"),
        ({"tokens": None}, "got NoneType"),
        ({"tokens": 5}, "got int"),
        ({"tokens": (1, 2.0)}, r"token 1 is 2.0 \(float\)"),
        ({"tokens": (True,)}, r"token 0 is True \(bool\)"),
        ({"tokens": (1, 2, -1)}, "token 2 is -1"),
        ({"tokens": (MAX_TOKEN_ID + 1,)}, f"from 0 to {MAX_TOKEN_ID}"),
        ({"request_id": ""}, "non-empty string"),
        ({"request_id": 7}, "non-empty string"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": 1.5}, "whole number"),
        ({"deadline_s": 0}, "greater than 0"),
        ({"deadline_s": float("nan")}, "deadline_s is nan; it must be a finite number"),
        ({"deadline_s": float("inf")}, "finite"),
        ({"deadline_s": 10**400}, "finite"),
        ({"deadline_s": True}, "deadline_s is True"),
        ({"deadline_s": "5"}, "deadline_s is '5'"),
        ({"deadline_s": None}, "deadline_s is None"),
        ({"tenant": None}, "tenant is None; it must be a string"),
        ({"tenant": b"acme"}, "tenant is b'acme'"),
        ({"return_logits": 1}, "return_logits is 1; it must be True or False"),
        ({"return_logits": "no"}, "return_logits is 'no'"),
    ],
)
def test_a_bad_request_is_refused_with_the_value_and_the_limit(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        request(**changes)
    assert isinstance(caught.value, PrfaasError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("deadline_s", [1, 0.5, 1e9])
def test_a_deadline_is_any_real_number_of_seconds(deadline_s: float) -> None:
    assert request(deadline_s=deadline_s).deadline_s == deadline_s


def test_roles_admit_what_they_say() -> None:
    assert [(r.prefills, r.decodes) for r in Role] == [(True, False), (False, True), (True, True)]


def test_the_handoff_says_how_many_tokens_travel() -> None:
    assert Handoff.AFTER_PROMPT.num_tokens(5) == 5
    assert Handoff.BEFORE_LAST.num_tokens(5) == 4


def test_dtypes_know_their_size() -> None:
    assert {d.label: d.itemsize for d in DType} == {
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "float8_e4m3": 1,
    }


def test_rounding() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [round_down(n, 4) for n in (0, 3, 4, 7)] == [0, 0, 4, 4]


def test_hash_blocks_is_the_block_hashes_of_the_granules() -> None:
    tokens = tuple(range(1000))
    granules = hash_granules(root_hash(b"model", b"tenant"), tokens, 64)
    blocks = hash_blocks(b"model", tokens, granule_tokens=64, block_size=128, salt=b"tenant")
    assert blocks == block_hashes(granules, 2)
    assert len(blocks) == 7
    with pytest.raises(ConfigError, match="multiple of the 64-token granule"):
        hash_blocks(b"model", tokens, granule_tokens=64, block_size=100)


def test_values_of_the_seams_are_checked_at_the_door() -> None:
    with pytest.raises(ConfigError, match="fingerprint"):
        Hello(node_id="n", epoch=1, fingerprint="text")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="epoch"):
        Hello(node_id="n", epoch=2**63, fingerprint=b"")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1 token"):
        RoutedRequest(request_id=RequestId("r"), num_tokens=0)
    with pytest.raises(ConfigError, match="low <= high"):
        Plan(epoch=1, roles={}, threshold_band=(2, 1))


def test_errors_name_both_sides_and_the_remedy() -> None:
    error = PeerMismatch(field="granule_tokens", ours="64", theirs="32", remedy="use one model")
    assert str(error) == "peers differ in granule_tokens: ours 64, theirs 32; use one model"
    missing = MissingExtra(package="torch", extra="transformers")
    assert isinstance(missing, ImportError)
    assert 'pip install "prfaas[transformers]"' in str(missing)
