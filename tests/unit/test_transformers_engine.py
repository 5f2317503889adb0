"""The transformers engine: identity of weights, positions, refusals, failures, copies."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from prfaas.core import BlockId, GroupId, NodeId, RequestId
from prfaas.errors import ConfigError, EngineError, LocalProtocolError, PeerMismatch
from prfaas.integrations.transformers import (
    FAMILIES,
    TransformersEngine,
    random_model,
)
from prfaas.integrations.transformers.engine import weights_digest
from prfaas.seams import Hello, StepResult
from prfaas.testing.engine_check import BlockMemory
from prfaas.wire.handshake import compare

STEP = 64
PROMPT = [(7 * i * i + 3 * i + 1) % 61 for i in range(STEP + 9)]
A, B = RequestId("a"), RequestId("b")


class Spy:
    """Stands before a model: notes the positions of each call, or raises."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = model.config
        self.positions: list[list[int]] = []
        self.error: Exception | None = None

    def __call__(self, **inputs: Any) -> Any:
        positions = inputs["position_ids"]
        assert positions.shape == inputs["input_ids"].shape
        self.positions.append(positions[0].tolist())
        if self.error is not None:
            raise self.error
        return self._model(**inputs)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen3_5")


@pytest.fixture
def engine(model: Any) -> TransformersEngine:
    return TransformersEngine(model, segment_tokens=STEP)


@pytest.fixture
def spy(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy(engine._model)
    monkeypatch.setattr(engine, "_model", spy)
    return spy


def slots_of(engine: TransformersEngine, slot: int) -> dict[GroupId, BlockId]:
    groups = engine.spec.groups
    return {group.group_id: BlockId(slot) for group in groups if not group.is_token_kind}


def pooled(engine: TransformersEngine, key: RequestId) -> tuple[BlockMemory, StepResult]:
    """Prefills the prompt into a pool, its state into slot 0; leaves the request open."""
    memory = BlockMemory(engine.spec, len(PROMPT))
    engine.open(key)
    engine.prefill(key, PROMPT[:STEP], 0, memory)
    return memory, engine.prefill(key, PROMPT[STEP:], STEP, memory, slots_of(engine, 0))


def decoded(engine: TransformersEngine, key: RequestId, first: StepResult) -> list[StepResult]:
    results = [first]
    for _ in range(3):
        results.append(engine.decode(key, results[-1].token))
    return results[1:]


def hello(model: Any) -> Hello:
    spec = TransformersEngine(model).spec
    return Hello(node_id=NodeId("n"), epoch=1, fingerprint=spec.fingerprint(), model=spec.name)


def test_two_seeds_are_two_models_and_their_nodes_do_not_connect(model: Any) -> None:
    ours = hello(model)
    compare(ours, hello(random_model("qwen3_5", seed=0)))
    with pytest.raises(PeerMismatch, match="fingerprint"):
        compare(ours, hello(random_model("qwen3_5", seed=1)))


def test_one_value_changed_is_another_revision() -> None:
    model = random_model("qwen3_5")
    digest = weights_digest(model)
    for parameter in list(model.parameters())[::9]:
        value = parameter.detach().view(-1)[:256]
        value[-1] += 1e-3
        assert weights_digest(model) != digest
        value[-1] -= 1e-3
        digest = weights_digest(model)


def test_positions_are_told_to_the_model(engine: TransformersEngine, spy: Spy) -> None:
    end = len(PROMPT)
    memory, first = pooled(engine, A)
    engine.decode(A, first.token)
    engine.decode(A, 1)
    engine.open(B, end, memory, slots_of(engine, 0))
    engine.prefill(B, [1, 2, 3], end)
    engine.decode(B, 1)
    assert spy.positions == [
        [*range(STEP)],
        [*range(STEP, end)],
        [end],
        [end + 1],
        [end, end + 1, end + 2],
        [end + 3],
    ]


@pytest.mark.parametrize("segment_tokens", [0, -64, 32, 63, 65, 96])
def test_segments_are_multiples_of_the_kernels_chunk(model: Any, segment_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"segment_tokens is {segment_tokens}; .* multiple of 64"):
        TransformersEngine(model, segment_tokens=segment_tokens)


def test_calls_out_of_order_change_nothing(engine: TransformersEngine, spy: Spy) -> None:
    engine.open(A)
    whole = engine.prefill(A, PROMPT, 0)
    engine.open(B)
    engine.prefill(B, PROMPT[:5], 0)
    with pytest.raises(LocalProtocolError, match="at least 1 token"):
        engine.prefill(B, [], 5)
    for start in (0, 4, 6):
        with pytest.raises(LocalProtocolError, match=f"holds 5 tokens, .* starts at {start}"):
            engine.prefill(B, PROMPT[5:], start)
    with pytest.raises(LocalProtocolError, match="already open"):
        engine.open(B)
    with pytest.raises(LocalProtocolError, match="'c' is not open"):
        engine.prefill(RequestId("c"), [1], 0)
    with pytest.raises(LocalProtocolError, match="names no memory"):
        engine.open(RequestId("c"), 5)
    assert engine.num_open == 2
    assert len(spy.positions) == 2
    assert engine.prefill(B, PROMPT[5:], 5).token == whole.token


def test_a_failure_of_the_model_ends_its_request_and_no_other(
    engine: TransformersEngine, spy: Spy
) -> None:
    engine.open(A)
    expected = decoded(engine, A, engine.prefill(A, PROMPT, 0))
    engine.close(A)
    engine.open(A)
    first = engine.prefill(A, PROMPT, 0)
    memory = BlockMemory(engine.spec, len(PROMPT))
    before = memory.content(len(PROMPT), slots_of(engine, 0))
    steps = (
        lambda: engine.prefill(B, [3, 4, 5], 2, memory, slots_of(engine, 0)),
        lambda: engine.decode(B, 3),
    )
    for step in steps:
        engine.open(B)
        engine.prefill(B, [1, 2], 0)
        spy.error = RuntimeError("out of memory")
        with pytest.raises(EngineError, match=r"'b', tokens 2 to \d: out of memory; .* closed"):
            step()
        spy.error = None
        assert engine.num_open == 1
        with pytest.raises(LocalProtocolError, match="not open"):
            engine.decode(B, 3)
    assert decoded(engine, A, first) == expected
    assert memory.content(len(PROMPT), slots_of(engine, 0)) == before


def test_a_layer_that_cannot_be_read_is_refused_with_those_that_can() -> None:
    config = transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"DynamicSlidingWindowLayer; .* DynamicLayer, LinearAtt"):
        TransformersEngine(model)


def test_decoding_does_not_change_the_pool(engine: TransformersEngine) -> None:
    memory, first = pooled(engine, A)
    slots, end = slots_of(engine, 0), len(PROMPT)
    before = memory.content(end, slots)
    expected = decoded(engine, A, first)
    assert memory.content(end, slots) == before
    engine.open(B, end, memory, slots)
    decoded(engine, B, first)
    assert memory.content(end, slots) == before
    engine.close(B)
    engine.open(B, end, memory, slots)
    memory.scribble()
    assert decoded(engine, B, first) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_what_one_engine_pools_another_continues_bit_by_bit(family: str) -> None:
    here = TransformersEngine(random_model(family), segment_tokens=STEP)
    elsewhere = TransformersEngine(random_model(family), segment_tokens=STEP)
    assert here.spec.fingerprint() == elsewhere.spec.fingerprint()
    memory, first = pooled(here, A)
    elsewhere.open(B, len(PROMPT), memory, slots_of(here, 0))
    assert decoded(elsewhere, B, first) == decoded(here, A, first)
