"""``prfaas profile``: what is timed, what is held out, what the table says."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from prfaas.capacity import PrefillProfile
from prfaas.cli import main
from prfaas.cli.files import prefill_time, read_prefill_table
from prfaas.cli.measure import Bench, between, held_out_errors, measure_grid, monotone
from prfaas.cli.profile import load_engine
from prfaas.core import BlockId, DType, GroupId, RequestId
from prfaas.errors import ConfigError
from prfaas.seams import EntryMemory, OnLayer, StepResult
from prfaas.spec import FullAttentionSpec, ModelSpec
from prfaas.testing import FakeEngine


class Clock:
    """Time that passes only when an engine computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Recorder(FakeEngine):
    """Notes what it was asked to run and what came out."""

    def __init__(self, clock: Clock, spec: ModelSpec | None = None) -> None:
        super().__init__(spec, prefill_s_per_token=0.01, sleep=clock.sleep)
        self.opened: list[int] = []
        self.segments: list[tuple[int, int]] = []
        self.tokens: list[int] = []

    def open(
        self,
        request_id: RequestId,
        num_tokens: int = 0,
        memory: EntryMemory | None = None,
        slots: Mapping[GroupId, BlockId] | None = None,
    ) -> None:
        self.opened.append(num_tokens)
        super().open(request_id, num_tokens, memory, slots)

    def prefill(
        self,
        request_id: RequestId,
        tokens: Sequence[int],
        start: int,
        memory: EntryMemory | None = None,
        slots: Mapping[GroupId, BlockId] | None = None,
        on_layer: OnLayer | None = None,
    ) -> StepResult:
        result = super().prefill(request_id, tokens, start, memory, slots, on_layer)
        self.segments.append((start, start + len(tokens)))
        self.tokens.append(result.token)
        return result


def test_only_the_new_tokens_are_timed() -> None:
    clock = Clock()
    engine = Recorder(clock)
    bench = Bench(engine=engine, num_repeats=2, clock=clock)
    assert bench.prefill_s(40, 0) == pytest.approx(0.40)
    assert engine.opened == [0, 0, 0]
    assert bench.prefill_s(40, 32) == pytest.approx(0.40)
    assert engine.opened == [0, 0, 0, 0, 32, 32, 32]
    assert engine.segments[-3:] == [(32, 48), (48, 64), (64, 72)]
    assert engine.num_open == 0


def test_a_resumed_prompt_continues_the_very_prefix() -> None:
    """All repeats and an uninterrupted prefill of the same prompt end with the same logits."""
    clock = Clock()
    whole, resumed = Recorder(clock), Recorder(clock)
    Bench(engine=whole, num_repeats=1, clock=clock).prefill_s(104, 0)
    Bench(engine=resumed, num_repeats=3, clock=clock).prefill_s(40, 64)
    last = [
        token
        for (_, end), token in zip(resumed.segments, resumed.tokens, strict=True)
        if end == 104
    ]
    assert len(last) == 4
    assert set(last) == {whole.tokens[-1]}


def test_a_model_without_states_can_be_measured() -> None:
    rows = FullAttentionSpec(num_kv_heads=1, key_dim=4, value_dim=4, dtype=DType.FLOAT16)
    spec = ModelSpec(name="rows", layers=(rows, rows), granule_tokens=16)
    clock = Clock()
    bench = Bench(engine=Recorder(clock, spec), num_repeats=1, clock=clock)
    assert bench.prefill_s(10, 16) == pytest.approx(0.10)


def test_the_median_of_the_repeats_counts_and_the_first_does_not() -> None:
    clock = Clock()
    seconds = iter([100.0, 3.0, 1.0, 2.0])
    engine = FakeEngine(sleep=lambda _: clock.sleep(next(seconds)))
    assert Bench(engine=engine, num_repeats=3, clock=clock).prefill_s(16, 0) == 2.0


@pytest.mark.parametrize(("num_new", "num_cached"), [(0, 0), (5, 3), (5, -16)])
def test_points_that_cannot_be_measured(num_new: int, num_cached: int) -> None:
    with pytest.raises(ConfigError, match="multiple of the granule of 16"):
        Bench(engine=FakeEngine()).prefill_s(num_new, num_cached)


def test_benches_refuse_no_repeats_and_no_tokens() -> None:
    with pytest.raises(ConfigError, match="num_repeats is 0"):
        Bench(engine=FakeEngine(), num_repeats=0)
    with pytest.raises(ConfigError, match="num_token_ids is 0"):
        Bench(engine=FakeEngine(), num_token_ids=0)


def test_the_grid_is_told_as_it_grows() -> None:
    clock = Clock()
    bench = Bench(engine=Recorder(clock), num_repeats=1, clock=clock)
    told: list[object] = []
    grid = measure_grid(bench, [32, 16, 16], [16, 0], told.append)
    assert [(new, cached) for new, cached, _ in grid] == [(16, 0), (32, 0), (16, 16), (32, 16)]
    assert told == grid


def test_held_out_lengths_lie_between_and_errors_are_relative() -> None:
    assert between([100, 400, 1600]) == [200, 800]
    assert between([1, 2]) == []
    profile = PrefillProfile(((100, 1.0), (400, 4.0)))
    [(measured, predicted, error)] = held_out_errors(profile, [(200, 0, 2.5)])
    assert measured == (200, 0, 2.5)
    assert predicted == pytest.approx(2.0)
    assert error == pytest.approx(-0.2)


def test_noise_is_raised_until_no_time_falls() -> None:
    grid = [(1, 0, 2.0), (2, 0, 1.0), (1, 8, 1.5), (2, 8, 3.0)]
    raised, most = monotone(grid)
    assert raised == [(1, 0, 2.0), (2, 0, 2.0), (1, 8, 2.0), (2, 8, 3.0)]
    assert most == 2.0
    assert monotone(raised) == (raised, 1.0)
    prefill_time(raised)


def test_profile_writes_what_a_plan_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    arguments = ["--lengths", "16,64", "--cached", "0,32", "--repeats", "1", "--out", str(table)]
    assert main(["profile", "--engine", "prfaas.testing:FakeEngine", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("new after") == 6  # four in the table, two held out
    assert "held-out error: median" in captured.out
    assert table.read_text().startswith("new,cached,seconds\n16,0,")
    rows = read_prefill_table(table)
    assert [(new, cached) for new, cached, _ in rows] == [(16, 0), (64, 0), (16, 32), (64, 32)]
    assert prefill_time(rows).prefill_s(32, 16) > 0


def test_engines_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_engines.py").write_text(
        "from prfaas.testing import FakeEngine\nmake = FakeEngine\nnumber = 3\nother = dict\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_engine("my_engines:make").segment_tokens == 16
    for name, text in (
        ("my_engines", "give MODULE:FACTORY"),
        (":make", "give MODULE:FACTORY"),
        ("my_engines:number", "has no callable 'number'"),
        ("my_engines:nothing", "has no callable 'nothing'"),
        ("no_engines:make", "No module named 'no_engines'"),
        ("my_engines:other", "returns a dict without spec, segment_tokens, open, prefill, close"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_engine(name)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--lengths", "16"], "--lengths has 1 lengths; give at least 2"),
        (["--lengths", "16,32", "--out", "/nowhere/t.csv", "--repeats", "1"], "cannot be written"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--engine", "prfaas.testing:FakeEngine", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("lengths", ["16,x", "-1,16", ""])
def test_lists_of_counts(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "--engine", "a:b", f"--lengths={lengths}"])
    assert "is no list of counts such as 256,1024" in capsys.readouterr().err
