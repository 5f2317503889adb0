"""Every engine of ours keeps the contract, and the check finds those that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pools import FULL, MLA, STATE, tiny_spec
from prfaas.core import DType
from prfaas.errors import ConfigError, EngineError
from prfaas.seams import StepResult
from prfaas.spec import SlidingWindowSpec
from prfaas.testing.engine import FakeEngine, toy_spec
from prfaas.testing.engine_check import check_engine

WINDOW = SlidingWindowSpec(
    num_kv_heads=1, key_dim=4, value_dim=4, window_tokens=20, dtype=DType.FLOAT8
)


def test_the_fake_engine_keeps_the_contract() -> None:
    check_engine(FakeEngine)
    check_engine(lambda: FakeEngine(segment_tokens=1), num_segments=40, num_tail=1)


def test_the_fake_engine_takes_any_kind_of_layer() -> None:
    spec = tiny_spec(FULL, STATE, None, WINDOW, MLA, STATE)
    check_engine(lambda: FakeEngine(spec, segment_tokens=8))


def test_the_transformers_engine_keeps_the_contract() -> None:
    pytest.importorskip("transformers")
    from prfaas.integrations.transformers import TransformersEngine, random_model

    model = random_model("qwen3_5")
    check_engine(lambda: TransformersEngine(model, segment_tokens=64), tolerance=1e-3)


class Damaged(FakeEngine):
    """Does one thing wrong."""

    def __init__(self, change: Callable[[Damaged, Any], None], method: str) -> None:
        super().__init__()
        self.change = change
        self.method = method

    def open(self, request_id: Any, *args: Any, **kwargs: Any) -> None:
        super().open(request_id, *args, **kwargs)
        if self.method == "open":
            self.change(self, self._sessions[request_id])

    def prefill(self, request_id: Any, tokens: Sequence[int], *args: Any) -> StepResult:
        result = super().prefill(request_id, tokens, *args)
        if self.method == "prefill":
            self.change(self, args)
        return result


def lose_state(engine: Damaged, session: Any) -> None:
    session.states = dict.fromkeys(session.states, 0)


def lose_rows(engine: Damaged, session: Any) -> None:
    if session.num_tokens:
        session.rows[1].update(b"x")


def write_late(engine: Damaged, args: Any) -> None:
    start, memory = args[0], args[1] if len(args) > 1 else None
    if memory is not None:
        memory.rows(1, start, start + 1)[0].data[:1] = b"?"


@pytest.mark.parametrize(
    ("change", "method", "clause"),
    [
        (lose_state, "open", "resumed at 16, the logits differ"),
        (lose_rows, "open", "resumed at 16, the logits differ"),
        (write_late, "prefill", "layer 1 changed after it was ready"),
    ],
)
def test_the_check_finds_what_is_wrong(
    change: Callable[[Damaged, Any], None], method: str, clause: str
) -> None:
    with pytest.raises(AssertionError, match=clause):
        check_engine(lambda: Damaged(change, method))


def test_calls_fail_when_they_are_told_to_and_forget_the_request() -> None:
    engine = FakeEngine(fail_at={"prefill": 2, "decode": 1})
    engine.open("r")
    engine.prefill("r", [1], 0)
    with pytest.raises(EngineError, match="call 2 of prefill"):
        engine.prefill("r", [2], 1)
    assert engine.num_open == 0
    engine.open("r")
    with pytest.raises(EngineError, match="call 1 of decode"):
        engine.decode("r", 1)
    assert engine.num_open == 0


def test_states_too_small_to_notice_damage_are_refused() -> None:
    tiny = SlidingWindowSpec(
        num_kv_heads=1, key_dim=1, value_dim=1, window_tokens=9, dtype=DType.FLOAT8
    )
    with pytest.raises(ConfigError, match="less than 8 bytes"):
        FakeEngine(tiny_spec(FULL, tiny))


def test_time_is_spent_as_injected() -> None:
    spent: list[float] = []
    engine = FakeEngine(toy_spec(), prefill_s_per_token=0.5, decode_s=3.0, sleep=spent.append)
    engine.open("r")
    engine.decode("r", engine.prefill("r", [1, 2, 3, 4], 0).token)
    assert spent == [2.0, 3.0]
