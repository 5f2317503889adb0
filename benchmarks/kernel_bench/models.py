"""Whole models behind the engine: transformers' own linear attention against ours."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy
import torch

from kernel_bench.contests import Contest
from kernel_bench.fallbacks import without_replacers
from prfaas.core import RequestId

with without_replacers():  # when these modules are made, transformers chooses whose code they call
    import transformers.models.kimi_linear.modeling_kimi_linear
    import transformers.models.qwen3_5.modeling_qwen3_5  # noqa: F401

    from prfaas.integrations.transformers import TransformersEngine, random_model

POCKET_MODEL = Path(__file__).parents[2] / "examples" / "pocket_model"
SEGMENT_TOKENS = 256
VOCAB_SIZE = 256
REQUEST = RequestId("bench")


def pocket(linear_attention: str) -> TransformersEngine:
    return TransformersEngine.from_pretrained(
        str(POCKET_MODEL), segment_tokens=SEGMENT_TOKENS, linear_attention=linear_attention
    )


def kimi(linear_attention: str) -> TransformersEngine:
    return TransformersEngine(
        random_model("kimi_linear"),
        segment_tokens=SEGMENT_TOKENS,
        linear_attention=linear_attention,
    )


MODELS = {"pocket": pocket, "kimi": kimi}


def prompt(num_tokens: int) -> list[int]:
    made = torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(5))
    return made.tolist()


def prefill(engine: TransformersEngine, tokens: list[int]) -> torch.Tensor:
    """The prompt in segments, as a node runs it; the logits after it. Leaves the request open."""
    engine.close(REQUEST)
    engine.open(REQUEST)
    for start in range(0, len(tokens), SEGMENT_TOKENS):
        made = engine.prefill(REQUEST, tokens[start : start + SEGMENT_TOKENS], start)
    assert made.logits is not None
    return torch.from_numpy(numpy.frombuffer(made.logits, dtype=numpy.float32).copy())


def prefill_contest(name: str, num_tokens: int) -> tuple[Contest, list[TransformersEngine]]:
    """Two loaded copies of a model."""
    engines = [MODELS[name](kind) for kind in ("prfaas", "transformers")]
    tokens = prompt(num_tokens)
    contest = Contest(
        name=f"{name}_prefill",
        what=f"prompt of {num_tokens} tokens in segments of {SEGMENT_TOKENS}",
        unit="tokens",
        count=num_tokens,
        ours=lambda: prefill(engines[0], tokens),
        others={"transformers": lambda: prefill(engines[1], tokens)},
    )
    return contest, engines


def decode_rows(
    name: str, engines: list[TransformersEngine], num_steps: int
) -> list[dict[str, Any]]:
    """Decode steps in turns on the requests that the prefill left open: ours, theirs."""
    seconds: list[list[float]] = [[], []]
    for number in range(num_steps + 2):
        for engine, samples in zip(engines, seconds, strict=True):
            start = time.perf_counter()
            engine.decode(REQUEST, number % VOCAB_SIZE)
            samples.append(time.perf_counter() - start)
    rows: list[dict[str, Any]] = []
    for by, samples in zip(("prfaas", "transformers"), seconds, strict=True):
        median = statistics.median(samples[2:])  # the first two warm up
        row: dict[str, Any] = {"op": f"{name}_decode", "what": "batch 1", "by": by}
        row |= {"threads": torch.get_num_threads(), "steps_per_s": 1 / median}
        rows.append({**row, "median_ms": median * 1e3, "num_samples": num_steps})
    return rows
