"""Chained granule hashes: one truth in every process, nothing shared across tenants."""

from __future__ import annotations

import array
import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core import DType
from prfaas.errors import ConfigError, RequestError
from prfaas.hashing import HashChain, block_hashes, hash_granules, root_hash
from prfaas.spec import preset

ROOT = root_hash(bytes(range(16)), b"tenant")
TOKEN_IDS = st.integers(0, 2**32 - 1)


def slow_hashes(root, tokens, granule_tokens):
    """The definition, one granule at a time."""
    hashes = []
    for start in range(0, len(tokens) - granule_tokens + 1, granule_tokens):
        granule = tokens[start : start + granule_tokens]
        hashes.append(
            hashlib.blake2b(
                struct.pack(f"<{granule_tokens}I", *granule),
                digest_size=16,
                salt=hashes[-1] if hashes else root,
                person=b"prfaas.granule.1",
            ).digest()
        )
    return tuple(hashes)


def test_golden_vector_h35():
    assert ROOT.hex() == "12585beaac850f83becb56f2d3937aa0"
    hashes = hash_granules(ROOT, [0, 1, 2, 65_535, 4_294_967_295, 7, 8], 3)
    assert [digest.hex() for digest in hashes] == [
        "17c4c914fa011a57293f78480a986dd8",
        "1450cfd517e79378dd240c6593c44218",
    ]


def test_two_interpreters_agree_whatever_their_hash_seed_h35():
    """H35: block keys of two processes with different PYTHONHASHSEED are equal."""
    script = (
        "from prfaas.spec import preset; from prfaas.hashing import *; "
        "root = root_hash(preset('paper-1t').fingerprint(), b'x'); "
        "print([h.hex() for h in hash_granules(root, range(200), 64)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    root = root_hash(preset("paper-1t").fingerprint(), b"x")
    assert outputs == {f"{[h.hex() for h in hash_granules(root, range(200), 64)]}\n"}


def test_model_dtype_and_layout_are_part_of_the_root_h35():
    models = (
        preset("paper-1t"),
        preset("kimi-linear-48b"),
        preset("paper-1t", kv_dtype=DType.FLOAT8),
        preset("paper-1t", state_dtype=DType.BFLOAT16),
    )
    assert len({root_hash(model.fingerprint()) for model in models}) == len(models)


def test_tenants_never_share_a_hash_but_one_tenant_does_h34():
    tokens = list(range(256))
    fingerprint = preset("paper-1t").fingerprint()
    x, y, x_again, nobody = (
        hash_granules(root_hash(fingerprint, salt), tokens, 64) for salt in (b"x", b"y", b"x", b"")
    )
    assert x == x_again
    assert len({*x, *y, *nobody}) == 12


def test_fingerprint_and_salt_cannot_be_shifted_into_each_other():
    assert root_hash(b"ab", b"c") != root_hash(b"a", b"bc")


@given(st.lists(TOKEN_IDS, max_size=50), st.integers(1, 9))
def test_hashes_follow_the_definition(tokens, granule_tokens):
    assert hash_granules(ROOT, tokens, granule_tokens) == slow_hashes(ROOT, tokens, granule_tokens)


@given(st.lists(st.lists(TOKEN_IDS, max_size=20), max_size=8), st.integers(1, 9))
def test_a_chain_grown_in_pieces_equals_one_pass(pieces, granule_tokens):
    chain = HashChain(root=ROOT, granule_tokens=granule_tokens)
    completed = []
    for piece in pieces:
        completed += chain.extend(piece)
        chain.check()
    tokens = [token for piece in pieces for token in piece]
    assert chain.num_tokens == len(tokens)
    assert chain.hashes == tuple(completed) == slow_hashes(ROOT, tokens, granule_tokens)


@given(st.lists(TOKEN_IDS, min_size=8, max_size=40), st.data())
def test_changing_a_token_changes_every_hash_from_its_granule_on(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[at] ^= 1
    before, after = hash_granules(ROOT, tokens, 4), hash_granules(ROOT, changed, 4)
    assert before[: at // 4] == after[: at // 4]
    assert not set(before[at // 4 :]) & set(after[at // 4 :])


def test_block_hashes_are_those_of_the_last_granules():
    granules = hash_granules(ROOT, list(range(70)), 10)
    assert block_hashes(granules, 1) == granules
    assert block_hashes(granules, 3) == (granules[2], granules[5])
    assert block_hashes(granules, 8) == ()
    with pytest.raises(ConfigError, match="granules_per_block is 0"):
        block_hashes(granules, 0)


@pytest.mark.parametrize(
    "tokens",
    [
        (5, 6, 7),
        range(5, 8),
        array.array("I", [5, 6, 7]),
        array.array("q", [5, 6, 7]),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.uint32),
        np.array([5, 0, 6, 0, 7, 0], dtype=np.uint32)[::2],
        np.array([5, 6, 7], dtype=np.uint16),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_any_sequence_of_ints_hashes_as_a_list(tokens):
    assert hash_granules(ROOT, tokens, 1) == hash_granules(ROOT, [5, 6, 7], 1)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([5, True], r"token 1 is True \(bool\)"),
        ([5, 6.0], r"token 1 is 6.0 \(float\)"),
        ([np.float64(5)], r"token 0 is .*5.0.* \(float64\)"),
        ([5, -1], "token 1 is -1"),
        ([2**32], "token 0 is 4294967296"),
        ([5, 2**70], "token 1 is 1180591620717411303424"),
        ([5, 6, None], r"token 2 is None \(NoneType\)"),
        (np.array([5.0]), r"token 0 is 5.0 \(float\)"),
        (np.array([-1]), "token 0 is -1"),
        (np.array([[5, 6]]), "token 0 is .5, 6."),
        (np.array([[5, 6]], dtype=np.uint32), "token 0 is .5, 6."),
        (np.array([True]), r"token 0 is True \(bool\)"),
        ("abc", "tokens is a str"),
        (b"abc", "tokens is a bytes"),
    ],
)
def test_what_is_not_a_token_id_is_refused_by_position_and_nothing_is_appended(tokens, message):
    chain = HashChain(root=ROOT, granule_tokens=1)
    chain.extend([1, 2])
    with pytest.raises(RequestError, match=message):
        chain.extend(tokens)
    assert chain.num_tokens == 2
    assert chain.hashes == hash_granules(ROOT, [1, 2], 1)


def test_a_caller_cannot_change_the_chain_through_its_own_buffer():
    tokens = array.array("I", [1, 2, 3])
    chain = HashChain(root=ROOT, granule_tokens=4)
    chain.extend(tokens)
    tokens[0] = 9
    chain.extend([4])
    assert chain.hashes == hash_granules(ROOT, [1, 2, 3, 4], 4)


@pytest.mark.parametrize(
    ("root", "granule_tokens"), [(b"short", 64), ("x" * 16, 64), (ROOT, 0), (ROOT, True)]
)
def test_a_chain_is_checked_at_the_door(root, granule_tokens):
    with pytest.raises(ConfigError):
        hash_granules(root, [1], granule_tokens)


def test_a_chain_keeps_its_root_and_granule():
    chain = HashChain(root=ROOT, granule_tokens=2)
    with pytest.raises(AttributeError):
        chain.granule_tokens = 3
    chain.extend([1, 2, 3])
    assert "<1 hashes>" in repr(chain)
