"""The benchmark of the kernels: its floors, its clocks, what it refuses; interpreted, all of it."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import bench_kernels
from kernel_bench import contests, device_run, fallbacks, floors, rates, timers
from kernel_bench.cases import Case, Peer, Sizes
from kernel_bench.contests import Contest
from kernel_bench.timers import HostTimer, Samples, pair_ratio
from kernel_paths import IS_INTERPRETING
from prfaas import kernels

TOKENS = 32_768
ONCE = HostTimer(min_rounds=1, max_rounds=1, budget_s=0.0)
CPU = torch.device("cpu")


def samples(*seconds: float) -> Samples:
    return Samples(seconds=seconds, host_seconds=seconds)


if IS_INTERPRETING:

    def test_every_operation_runs_and_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
        bench_kernels.main(["--device", "interpreter", "--quick", "--json"])
        made = json.loads(capsys.readouterr().out)
        assert set(made) == {"machine", "rows", "ratios"}
        ours = {row["case"]: row for row in made["rows"] if row["by"] == "prfaas"}
        assert all(math.isfinite(row["ms"]) and row["ms"] > 0 for row in ours.values())
        operations = {
            name
            for name, function in inspect.getmembers(kernels, inspect.isfunction)
            if "path" in inspect.signature(function).parameters
        }
        assert operations <= {row["op"] for row in ours.values()}
        assert all(math.isfinite(ratio) for ratio in made["ratios"].values())
        assert "pack_vs_memcpy" in made["ratios"]

else:

    @pytest.fixture
    def _threads_as_they_were() -> Iterator[None]:
        before = torch.get_num_threads()
        yield
        torch.set_num_threads(before)

    @pytest.mark.usefixtures("_threads_as_they_were")
    def test_contests_on_the_cpu_agree() -> None:
        from kernel_bench import cpu

        for name, build in cpu.contests(128).items():
            contest = build()
            assert contest.name == name
            rows, ratios = contests.run(contest, ONCE, (1,))
            others = {other for other, call in contest.others.items() if call is not None}
            assert others
            assert set(ratios) == {f"{name}_vs_{other}_1thread" for other in others}
            assert len(rows) == 1 + len(contest.others)

    @pytest.mark.usefixtures("_threads_as_they_were")
    @pytest.mark.parametrize("name", ["pocket", "kimi"])
    def test_models_agree(name: str) -> None:
        from kernel_bench import models

        contest, engines = models.prefill_contest(name, 130)
        rows, ratios = contests.run(contest, ONCE, (1,))
        assert set(ratios) == {f"{name}_prefill_vs_transformers_1thread"}
        assert [row["by"] for row in rows] == ["prfaas", "transformers"]
        assert [engine.effective_config()["linear_attention"] for engine in engines] == [
            "prfaas",
            "transformers",
        ]
        decoded = models.decode_rows(name, engines, 1)
        assert all(row["steps_per_s"] > 0 for row in decoded)


def test_work_of_a_delta_rule_layer() -> None:
    sizes = {"num_tokens": TOKENS, "value_heads": 32, "key_dim": 128, "value_dim": 128}
    for key_heads, is_per_channel, gate_itemsize, megabytes in (
        (32, True, 2, 1346),
        (32, True, 4, 1615),
        (32, False, 4, 1082),
        (16, False, 4, 814),
    ):
        work = floors.delta_rule(
            **sizes,
            key_heads=key_heads,
            is_per_channel=is_per_channel,
            gate_itemsize=gate_itemsize,
        )
        assert work.flops / 1e9 == pytest.approx(192, rel=2e-3)
        assert work.num_bytes / 1e6 == pytest.approx(megabytes, abs=0.6)


def test_work_of_other_prefills() -> None:
    lightning = floors.decay_attention(num_tokens=TOKENS, heads=64, key_dim=128, value_dim=128)
    assert lightning.flops / 1e9 == pytest.approx(206, rel=2e-3)
    states = 64 * 128 * 128 * 4
    assert (lightning.num_bytes - states) / 1e6 == pytest.approx(2147, abs=0.6)

    heads = {"heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128}
    whole = floors.prefill(new_tokens=TOKENS, cached_tokens=0, **heads)
    assert whole.flops / 1e9 == pytest.approx(8796, rel=1e-3)
    assert whole.num_bytes / 1e6 == pytest.approx(671, abs=0.6)
    cached = floors.prefill(new_tokens=2048, cached_tokens=30_720, **heads)
    assert cached.flops / 1e9 == pytest.approx(1065, rel=1e-3)
    assert cached.num_bytes / 1e6 == pytest.approx(168, abs=0.6)
    latent = floors.prefill(
        new_tokens=TOKENS, cached_tokens=0, heads=32, kv_heads=32, head_dim=192, value_dim=128
    )
    assert latent.flops / 1e9 == pytest.approx(10_995, rel=1e-3)
    assert latent.num_bytes / 1e6 == pytest.approx(1342, abs=0.6)

    # One token, one head, one group, P = N = 16: 2 * 64 * 16 twice, and 4 * 256.
    small = floors.ssd(num_tokens=1, heads=1, groups=1, head_dim=16, state_dim=16)
    assert small.flops == 2 * 2048 + 1024
    assert small.num_bytes == 4 * 16 * 2 + 4 + 256 * 4
    assert floors.conv1d(num_tokens=3, channels=5, width=4) == floors.Work(num_bytes=60, flops=120)


def test_work_of_decode_steps_and_copies() -> None:
    for requests, megabytes in ((1, 4.2), (64, 272)):
        step = floors.recurrent_step(
            requests=requests, heads=32, key_dim=128, value_dim=128, gates_per_head=128
        )
        assert step.num_bytes / 1e6 == pytest.approx(megabytes, rel=1.1e-2)
        assert step.flops == 7 * requests * 32 * 128 * 128
    for requests, megabytes, gigaflops in ((1, 134, 0.537), (64, 8590, 34.4)):
        decode = floors.decode(requests=requests, kv_len=TOKENS, heads=32, kv_heads=8, head_dim=128)
        assert decode.num_bytes / 1e6 == pytest.approx(megabytes, rel=2e-3)
        assert decode.flops / 1e9 == pytest.approx(gigaflops, rel=2e-3)
    for requests, megabytes, gigaflops in ((1, 37.7, 2.28), (64, 2416, 146)):
        decode = floors.mla_decode(
            requests=requests, kv_len=TOKENS, heads=32, latent_dim=512, rope_dim=64
        )
        assert decode.num_bytes / 1e6 == pytest.approx(megabytes, rel=5e-3)
        assert decode.flops / 1e9 == pytest.approx(gigaflops, rel=2e-3)
    rows = 7 * 1152 * TOKENS
    assert floors.copied(read_bytes=rows).num_bytes / 1e6 == pytest.approx(529, abs=0.6)
    coded = floors.copied(read_bytes=rows, written_bytes=rows // 2 + 7 * 4 * TOKENS)
    assert coded.num_bytes / 1e6 == pytest.approx(397, abs=0.6)


def test_the_floor_of_a_row_is_the_larger_of_two() -> None:
    machine = rates.Rates(bytes_per_s=1e9, flops_per_s=1e12)

    def figures(work: floors.Work) -> dict[str, object]:
        case = Case(op="op", work=work, run=lambda _: ())
        return device_run.figures(samples(0.5, 0.004, 0.001), case, machine)

    by_bytes = figures(floors.Work(num_bytes=2_000_000, flops=1e9))
    assert (by_bytes["bound"], by_bytes["floor_ms"]) == ("bytes", pytest.approx(2.0))
    assert by_bytes["ms"] == pytest.approx(4.0)
    assert by_bytes["share_of_floor"] == pytest.approx(0.5)
    assert by_bytes["gbytes_per_s"] == pytest.approx(0.5)
    assert by_bytes["tflops_per_s"] == pytest.approx(0.25)
    by_flops = figures(floors.Work(num_bytes=2_000_000, flops=3e9))
    assert (by_flops["bound"], by_flops["floor_ms"]) == ("flops", pytest.approx(3.0))


def test_a_ratio_is_the_median_over_rounds() -> None:
    # The load of a round hits both: 10, 2 and 2 times, though one median is 5 times the other.
    assert pair_ratio(samples(1, 2, 10), samples(10, 4, 20)) == 2
    assert pair_ratio(samples(1, 2, 4), samples(5, 2, 4)) == 1


def test_rounds_end_when_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def call() -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr(timers.time, "perf_counter", lambda: now)

    def rounds(**limits: float) -> int:
        nonlocal now
        now = 0.0
        timer = HostTimer(min_rounds=3, max_rounds=9, **limits)
        made = timer.rounds([call, call], inner=2)
        assert all(s == 1.0 for one in made for s in one.seconds)
        assert len(made[0].seconds) == len(made[1].seconds)
        return len(made[0].seconds)

    assert rounds(budget_s=0.0) == 3  # each round takes four seconds
    assert rounds(budget_s=17.0) == 5
    assert rounds(budget_s=1000.0) == 9
    assert rounds(budget_s=1000.0, limit_s=5.0) == 2
    assert rounds(budget_s=1000.0, deadline=13.0) == 4
    assert rounds(budget_s=1000.0, deadline=-1.0) == 1


def test_cuda_events_lie_around_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the device: work in the queue takes time, events note when."""
    clock = 0.0
    waited: list[float] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock

        def elapsed_time(self, later: Event) -> float:
            assert waited, "read before the device has finished"
            return 1e3 * (later.at - self.at)

    def taking(seconds: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal clock
            clock += seconds

        return call

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: waited.append(clock))
    timer = timers.CudaTimer(CPU, num_rounds=4, flush_bytes=16)
    ours, theirs = timer.rounds([taking(0.25), taking(1.0)], inner=3)
    assert ours.seconds == pytest.approx([0.25] * 4)
    assert theirs.seconds == pytest.approx([1.0] * 4)
    assert len(ours.host_seconds) == 4
    assert waited == [pytest.approx(4 * 3 * 1.25)]

    def fixed(*_: object) -> list[Samples]:
        return [samples(1.0, 2.0, 4.0), samples(8.0)]

    monkeypatch.setattr(timer, "rounds", fixed)
    measured = rates.measure_rates(timer, CPU, copy_bytes=64, matrix=16)
    assert measured == rates.Rates(bytes_per_s=2 * 64 / 2.0, flops_per_s=2 * 16**3 / 8.0)


def test_results_that_differ_stop_the_run() -> None:
    def contest(theirs: float) -> Contest:
        return Contest(
            name="op",
            what="",
            unit="tokens",
            count=10,
            ours=lambda: torch.ones(4),
            others={"them": lambda: torch.full((4,), theirs), "absent": None},
        )

    rows, ratios = contests.run(contest(1.00001), ONCE, ())
    assert rows == [{"op": "op", "what": "", "by": "absent", "skipped": "not installed"}]
    assert ratios == {}
    for wrong in (1.001, math.nan):
        with pytest.raises(SystemExit, match="op: our result differs from that of them"):
            contests.run(contest(wrong), ONCE, ())


def a_case(error: float = 0.0, peers: tuple[Peer, ...] = ()) -> Callable[..., Case]:
    """An operation that on its fast path is wrong by ``error``."""

    def run(path: str) -> tuple[torch.Tensor, ...]:
        return (torch.ones(8) + (error if path == "triton" else 0.0),)

    work = floors.Work(num_bytes=8, flops=1.0)
    return lambda sizes, device: Case(op="op", work=work, run=run, peers=peers)


def test_a_failure_of_ours_is_told_and_the_rest_still_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(sizes: Sizes, device: torch.device) -> Case:
        raise RuntimeError("no\nsecond line")

    cases = {"broken": broken, "wrong": a_case(1e-3), "good": a_case()}
    monkeypatch.setattr(device_run, "CASES", cases)
    rows, ratios, failures = device_run.run("interpreter", is_quick=True, only="")
    assert ratios == {}
    assert failures[0] == "broken: RuntimeError: no"
    assert failures[1].startswith("wrong: AssertionError: result 0 differs from the reference")
    assert ["error" in row for row in rows] == [True, True, False]

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="failed: broken: RuntimeError: no; wrong"):
        bench_kernels.main(["--device", "interpreter", "--json"])
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3
    bench_kernels.main(["--device", "interpreter", "--only", "good"])
    assert "good" in capsys.readouterr().out


def test_what_others_do_wrong_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising() -> Callable[[], torch.Tensor]:
        raise TypeError("their arguments\nchanged")

    def constant(value: float) -> Callable[[], Callable[[], torch.Tensor]]:
        return lambda: lambda: torch.full((8,), value)

    peers = (
        Peer(name="raising", package="torch", build=raising),
        Peer(name="other", package="torch", build=constant(2.0)),
        Peer(name="copy", package="torch", build=constant(2.0), compares=False),
        Peer(name="equal", package="torch", build=constant(1.0)),
        Peer(name="gpu", package="no_such_package", build=raising),
    )
    monkeypatch.setattr(device_run, "CASES", {"case": a_case(peers=peers)})
    rows, ratios, failures = device_run.run("interpreter", is_quick=True, only="")
    assert failures == []
    assert set(ratios) == {"case_vs_copy", "case_vs_equal"}
    found = {row["by"]: row for row in rows}
    assert found["raising"]["error"] == "TypeError: their arguments"
    assert "is another one" in str(found["other"]["error"])
    assert found["gpu"]["skipped"] == "needs a GPU"
    assert found["equal"]["ours_vs_it"] == ratios["case_vs_equal"]
    assert all(by in ("prfaas", "copy", "equal") or "ms" not in found[by] for by in found)


def test_arguments_that_cannot_work_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*argv: str) -> str:
        with pytest.raises(SystemExit) as stop:
            bench_kernels.arguments(argv)
        assert stop.value.code == 2
        return capsys.readouterr().err

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "unset it to run compiled" in refused("--device", "cuda")
    assert bench_kernels.arguments(["--device", "interpreter"]).device == "interpreter"
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU here" in refused("--device", "cuda")
    assert "set TRITON_INTERPRET=1" in refused("--device", "interpreter")
    assert "invalid choice" in refused("--device", "tpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS=1" in refused("--device", "cpu")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert bench_kernels.arguments([]).device == "cpu"


def test_packages_that_would_replace_their_functions_are_hidden_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    monkeypatch.setitem(sys.modules, "mamba_ssm", torch)
    with fallbacks.without_replacers():
        for name in ("fla", "mamba_ssm"):
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(name)
    assert "fla" not in sys.modules
    assert sys.modules["mamba_ssm"] is torch  # who was there is there again
    assert fallbacks.fla_function("no_such_module", "function") is None
