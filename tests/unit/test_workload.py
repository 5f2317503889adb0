"""The demo's prompts: real text, the kinds that a run needs, the same for a seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import cluster
from cluster.workload import SIZES, SYSTEM_PROMPT, Prompt, chapters, make_workload

EXAMPLES = Path(cluster.__file__).parents[1]
SEEDS = range(20)


def by_id(prompts: list[Prompt]) -> dict[str, Prompt]:
    return {prompt.request_id: prompt for prompt in prompts}


@pytest.mark.parametrize(("size", "count"), [("quick", 14), ("full", 28)])
def test_each_size_has_every_kind(size: str, count: int) -> None:
    prompts = make_workload(0, size=size)
    kinds = Counter(prompt.kind for prompt in prompts)
    assert len(by_id(prompts)) == len(prompts) == count
    assert kinds["document"] == SIZES[size].num_documents >= 4
    assert kinds["chat"] == sum(SIZES[size].conversations)
    assert kinds["short"] == SIZES[size].num_shorts
    assert sorted(len(p.tokens) for p in prompts if p.kind == "tiny") == [1, 63, 64, 65]
    assert kinds["repeat"] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_lengths_keep_their_ranges(seed: int) -> None:
    prompts = make_workload(seed, size="full")
    documents = [len(p.tokens) for p in prompts if p.kind == "document"]
    shorts = [len(p.tokens) for p in prompts if p.kind == "short"]
    assert 2900 < min(documents) <= max(documents) <= 9000
    assert max(documents) >= 8000
    assert 30 <= min(shorts) <= max(shorts) <= 400
    assert len(set(documents)) > 3
    assert len(set(shorts)) > 3


def test_documents_and_shorts_share_no_block() -> None:
    prompts = make_workload(0, size="full")
    kinds = ("document", "short", "tiny")
    alone = [p for p in prompts if p.kind in kinds and len(p.text) >= 64]
    assert len({p.text[:64] for p in alone}) == len(alone)


@pytest.mark.parametrize("seed", SEEDS)
def test_order_lets_every_request_follow_its_predecessor(seed: int) -> None:
    prompts = make_workload(seed, size="full", arrivals_per_s=5.0)
    arrived: set[str] = set()
    for prompt in prompts:
        assert prompt.after is None or prompt.after in arrived
        arrived.add(prompt.request_id)
    times = [prompt.arrival_s for prompt in prompts]
    assert times[0] == 0.0
    assert times == sorted(times)


def test_turns_extend_the_turn_before() -> None:
    prompts = make_workload(3, size="full")
    named = by_id(prompts)
    chats = [p for p in prompts if p.kind == "chat"]
    assert 500 < len(SYSTEM_PROMPT) < 700
    assert all(p.text.startswith(SYSTEM_PROMPT.encode()) for p in chats)
    assert all(p.text.endswith(b"\n\nAssistant:") for p in chats)
    followers = [p for p in chats if p.after]
    assert len(followers) == 6
    for turn in followers:
        before = named[turn.after or ""]
        assert turn.text.startswith(before.text)
        added = turn.text[len(before.text) :].decode()
        answer, message = added.split("\nUser: ")
        assert len(answer.strip()) > 20
        assert len(message) > 80
    assert len({p.text for p in chats if not p.after}) == 3


def test_the_repeat_is_exact() -> None:
    prompts = make_workload(0)
    (repeat,) = [p for p in prompts if p.kind == "repeat"]
    assert repeat.text == by_id(prompts)[repeat.after or ""].text


@pytest.mark.parametrize("max_tokens", [65, 100, 700, 5000])
def test_prompts_are_cut_to_the_limit(max_tokens: int) -> None:
    prompts = make_workload(0, size="full", max_tokens=max_tokens)
    assert max_tokens - 20 < max(len(p.tokens) for p in prompts) <= max_tokens
    assert min(len(p.tokens) for p in prompts) == 1
    named = by_id(prompts)
    assert all(p.text.startswith(named[p.after].text) for p in prompts if p.after)


def test_tokens_are_the_bytes_of_ascii_text() -> None:
    for prompt in make_workload(0):
        assert bytes(prompt.tokens) == prompt.text
        assert prompt.text.isascii()


def test_a_rate_scales_the_arrivals_alone() -> None:
    slow, fast = make_workload(7, arrivals_per_s=1.0), make_workload(7, arrivals_per_s=4.0)
    assert [p.text for p in slow] == [p.text for p in fast]
    assert [p.arrival_s for p in slow] == pytest.approx([4 * p.arrival_s for p in fast])
    assert 5 < slow[-1].arrival_s < 40


def test_seeds_differ_and_repeat_in_another_process() -> None:
    assert make_workload(1) != make_workload(2)
    code = (
        "import zlib; from cluster.workload import make_workload;"
        "print(zlib.crc32(repr([(p, p.text) for p in make_workload(1)]).encode()))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(EXAMPLES), "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_chapters_are_real_text() -> None:
    found = chapters()
    assert len(found) > 60
    assert sum(len(chapter.text) for chapter in found) > 300_000
    assert len({chapter.title for chapter in found}) == len(found)
    assert max(len(chapter.title) for chapter in found) <= 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "huge"}, "known are quick, full"),
        ({"max_tokens": 64}, "shortest limit is 65"),
        ({"arrivals_per_s": 0.0}, "above 0"),
    ],
)
def test_what_makes_no_workload_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_workload(0, **arguments)
