"""The main promise: a distributed run gives what one process gives, logit for logit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

pytest.importorskip("transformers")

from cluster.sabotage import DAMAGES, KINDS, sabotage
from clusters import BLOCK, Deployment, deployment
from prfaas.core import Handoff, Request, RequestId, Role
from prfaas.integrations.transformers import TransformersEngine, random_model
from prfaas.runtime.attempt import Generation
from prfaas.runtime.node import LandingHook
from reference import greedy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

FAMILIES = ("qwen3_5", "kimi_linear")
NUM_NEW = 4
TOLERANCE = 1e-3
REMOTE, LOCAL = 0, 1_000_000  # thresholds that force a route


@pytest.fixture(scope="module")
def models() -> dict[str, object]:
    return {family: random_model(family) for family in FAMILIES}


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(256), k=num_tokens)


def run(
    family: str,
    prompts: Sequence[Sequence[int]],
    *,
    threshold: int,
    handoff: Handoff = Handoff.AFTER_PROMPT,
    landing_hook: LandingHook | None = None,
    num_new: int = NUM_NEW,
    roles: dict[str, Role] | None = None,
    names: tuple[str, ...] = ("remote", "local", "decode"),
) -> list[Generation]:
    """One request after the other through a fresh deployment, which must be empty at the end."""

    async def work() -> list[Generation]:
        async with deployment(
            lambda: TransformersEngine(random_model(family), segment_tokens=BLOCK),
            threshold=threshold,
            handoff=handoff,
            landing_hook=landing_hook,
            roles=roles,
            names=names,
        ) as d:
            done = [await one(d, i, tokens) for i, tokens in enumerate(prompts)]
            await settle(d)
            d.check_empty()
            return done

    async def one(d: Deployment, index: int, tokens: Sequence[int]) -> Generation:
        request = Request(
            request_id=RequestId(f"request {index}/ü:"),
            tokens=tokens,
            max_new_tokens=num_new,
            return_logits=True,
        )
        return await d.gateway.generate(request)

    return asyncio.run(work())


async def settle(d: Deployment) -> None:
    """Messages that end a request at its workers may still be under way."""
    async with asyncio.timeout(5):
        while any(worker.num_jobs for worker in d.workers.values()):
            await asyncio.sleep(0.005)


def difference(generation: Generation, tokens: Sequence[int], model: object) -> float:
    """Largest logit difference to the same segments in one process; tokens must be equal."""
    new, logits = greedy(model, tokens, len(generation.tokens), segment_tokens=BLOCK)
    ours = np.stack([np.frombuffer(step, np.float32) for step in generation.logits])
    if list(generation.tokens) != new:
        return float("inf")
    return float(np.abs(ours - logits.numpy()).max())


@pytest.mark.parametrize("threshold", [REMOTE, LOCAL], ids=["remote", "local"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_length_and_hit_is_bit_identical(
    models: dict[str, object], family: str, threshold: int
) -> None:
    cold = [prompt(n) for n in (1, BLOCK - 1, BLOCK, BLOCK + 1)]
    long = prompt(5 * BLOCK + 7, seed=1)
    fork = long[: 4 * BLOCK] + prompt(BLOCK, seed=2)
    prompts = [*cold, long, fork, long]
    done = run(family, prompts, threshold=threshold)
    for generation, tokens in zip(done, prompts, strict=True):
        assert difference(generation, tokens, models[family]) == 0.0, len(tokens)
        record = generation.record
        assert record["offloaded"] == (threshold == REMOTE)
        assert record["decode_prefilled_tokens"] == 0
        assert record["received_bytes"] == record["expected_bytes"]
        assert record["cached_tokens"] + record["prefilled_tokens"] == len(tokens)
    cold_run, partial, full = (generation.record for generation in done[-3:])
    assert cold_run["cached_tokens"] == 0
    assert partial["cached_tokens"] == 4 * BLOCK
    assert partial["held_tokens"] == 4 * BLOCK
    assert full["cached_tokens"] == 5 * BLOCK
    assert full["held_tokens"] == 5 * BLOCK
    assert full["received_bytes"] < cold_run["received_bytes"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_prompt_is_bit_identical_and_agrees_with_one_piece(
    models: dict[str, object], family: str
) -> None:
    tokens = prompt(8_000 + 13)
    (generation,) = run(family, [tokens], threshold=REMOTE, num_new=2)
    assert difference(generation, tokens, models[family]) == 0.0
    new, logits = greedy(models[family], tokens, 2)
    ours = np.stack([np.frombuffer(step, np.float32) for step in generation.logits])
    assert list(generation.tokens) == new
    assert np.abs(ours - logits.numpy()).max() <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
def test_H09_state_before_the_last_token_is_replayed_once(
    models: dict[str, object], family: str, num_tokens: int
) -> None:
    tokens = prompt(num_tokens)
    done = run(family, [tokens, tokens], threshold=REMOTE, handoff=Handoff.BEFORE_LAST)
    new, logits = greedy(models[family], tokens, NUM_NEW)
    for generation in done:
        ours = np.stack([np.frombuffer(step, np.float32) for step in generation.logits])
        assert list(generation.tokens) == new
        # The last token runs through the step kernel instead of the chunk kernel.
        assert np.abs(ours - logits.numpy()).max() <= TOLERANCE
        assert generation.record["decode_prefilled_tokens"] <= 1


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_damage_in_transit_fails_the_same_comparison(
    models: dict[str, object], family: str, kind: str, damage: str
) -> None:
    tokens = prompt(2 * BLOCK + 9)
    (generation,) = run(family, [tokens], threshold=REMOTE, landing_hook=sabotage(kind, damage))
    assert difference(generation, tokens, models[family]) > TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_node_alone_serves_from_end_to_end(models: dict[str, object], family: str) -> None:
    prompts = [prompt(n) for n in (1, BLOCK, 3 * BLOCK + 5)]
    done = run(family, prompts, threshold=LOCAL, names=("decode",), roles={"decode": Role.MIXED})
    for generation, tokens in zip(done, prompts, strict=True):
        assert difference(generation, tokens, models[family]) == 0.0
        assert generation.record["prefill_node"] == generation.record["decode_node"] == "decode"


def test_H26_unequal_block_sizes_need_no_conversion(models: dict[str, object]) -> None:
    long = prompt(5 * BLOCK + 7)
    prompts = [long, long[: 4 * BLOCK] + prompt(BLOCK, seed=2), long]

    async def work() -> list[Generation]:
        async with deployment(
            lambda: TransformersEngine(random_model("qwen3_5"), segment_tokens=BLOCK),
            threshold=REMOTE,
            options={"remote": {"block_size": 2 * BLOCK}, "decode": {"block_size": 3 * BLOCK}},
        ) as d:
            done = []
            for i, tokens in enumerate(prompts):
                request = Request(
                    request_id=RequestId(str(i)),
                    tokens=tokens,
                    max_new_tokens=NUM_NEW,
                    return_logits=True,
                )
                done.append(await d.gateway.generate(request))
            await settle(d)
            d.check_empty()
            return done

    done = asyncio.run(work())
    for generation, tokens in zip(done, prompts, strict=True):
        assert difference(generation, tokens, models["qwen3_5"]) == 0.0
    hits = [(g.record["cached_tokens"], g.record["held_tokens"]) for g in done]
    assert hits == [(0, 0), (4 * BLOCK, 3 * BLOCK), (4 * BLOCK, 3 * BLOCK)]


def test_tenants_share_nothing(models: dict[str, object]) -> None:
    tokens = prompt(3 * BLOCK)

    async def work() -> list[int]:
        async with deployment(
            lambda: TransformersEngine(random_model("qwen3_5"), segment_tokens=BLOCK)
        ) as d:
            cached = []
            for i, tenant in enumerate(("x", "y", "x")):
                request = Request(request_id=RequestId(str(i)), tokens=tokens, tenant=tenant)
                generation = await d.gateway.generate(request)
                cached.append(generation.record["cached_tokens"])
            return cached

    assert asyncio.run(work()) == [0, 0, 2 * BLOCK]
