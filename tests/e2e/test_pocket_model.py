"""The model that the demo ships: small, readable, and sensitive to every kind of its cache."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cluster.models import POCKET, load_model
from cluster.sabotage import DAMAGES, KINDS, sabotage
from cluster.workload import chapters
from clusters import BLOCK, deployment
from prfaas.core import Request, RequestId
from prfaas.integrations.transformers import TransformersEngine
from prfaas.runtime.node import LandingHook
from reference import greedy

pytestmark = pytest.mark.e2e

PROSE = next(text for text in (c.prose(500) for c in chapters()[20:]) if len(text) > 400)
PROMPT = tuple(PROSE.encode())
MAX_BYTES = 8 << 20


@pytest.fixture(scope="module")
def model() -> object:
    return load_model("pocket")


def offload(model: object, landing_hook: LandingHook | None) -> tuple[list[int], np.ndarray]:
    async def work() -> tuple[list[int], np.ndarray]:
        async with deployment(
            lambda: TransformersEngine(load_model("pocket"), segment_tokens=BLOCK),
            threshold=0,
            landing_hook=landing_hook,
        ) as d:
            request = Request(
                request_id=RequestId("r"), tokens=PROMPT, max_new_tokens=4, return_logits=True
            )
            done = await d.gateway.generate(request)
            return list(done.tokens), np.stack(
                [np.frombuffer(step, np.float32) for step in done.logits]
            )

    return asyncio.run(work())


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in Path(POCKET).iterdir()) <= MAX_BYTES


def test_it_predicts_text_better_than_byte_pairs_do(model: object) -> None:
    text = "".join(chapter.text for chapter in chapters()[10:14]).encode()[:2048]
    pairs, singles = Counter(pairwise(text)), Counter(text[:-1])
    bigram = -sum(n / (len(text) - 1) * math.log(n / singles[a]) for (a, _), n in pairs.items())
    tokens = torch.tensor([list(text)])
    with torch.inference_mode():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).item()
    assert loss < bigram  # although the pairs were counted on this very text


def test_its_text_reads_like_text(model: object) -> None:
    new, _ = greedy(model, PROMPT, 60)
    text = bytes(new).decode("ascii")
    assert text.isprintable() or "\n" in text
    assert sum(c.isalpha() or c == " " for c in text) > 40


def test_offloaded_it_is_bit_identical(model: object) -> None:
    tokens, logits = offload(model, None)
    new, expected = greedy(model, PROMPT, 4, segment_tokens=BLOCK)
    assert tokens == new
    assert np.array_equal(logits, expected.numpy())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_to_any_kind_of_cache_shows(model: object, kind: str, damage: str) -> None:
    _, logits = offload(model, sabotage(kind, damage))
    _, expected = greedy(model, PROMPT, 4, segment_tokens=BLOCK)
    assert np.abs(logits - expected.numpy()).max() > 0.05
