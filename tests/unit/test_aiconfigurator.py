"""Profiles from the kernel database, with a stand-in for the package and numbers read from it."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest

from prfaas.capacity import PrefillProfile, PrefillSurface
from prfaas.core import DType
from prfaas.errors import ConfigError
from prfaas.spec import preset

MODULE = "prfaas.integrations.aiconfigurator"
SAMPLE = Path(__file__).parents[2] / "benchmarks" / "study_profiles.json"
QWEN, DENSE = "Qwen/Qwen3.5-397B-A17B", "MiniMaxAI/MiniMax-M2.5"


@attrs.define
class Database:
    """What the package answers: the sampled curve, and steps of 4 + batch ms up to a batch."""

    fits: int = 40
    error: Exception | None = None
    noise: dict[int, float] = attrs.field(factory=dict)
    calls: list[dict[str, Any]] = attrs.field(factory=list)
    curve: PrefillProfile = attrs.field(init=False)

    @curve.default
    def _sampled(self) -> PrefillProfile:
        instances = json.loads(SAMPLE.read_text())["instances"]
        row = next(
            row
            for row in instances
            if (row["checkpoint"], row["weights"], row["system"]) == (QWEN, "bfloat16", "H200")
        )
        return PrefillProfile(tuple((new, s) for new, cached, s in row["prefill"] if not cached))

    def cli_estimate(self, model: str, system: str, **call: Any) -> SimpleNamespace:
        self.calls.append({"model": model, "system": system, **call})
        print("a remark")
        warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
        logging.getLogger("aiconfigurator").warning("fallback")
        if self.error is not None:
            raise self.error
        isl, batch = call["isl"], call["batch_size"]
        seconds = self.curve.prefill_s(isl - call["prefix"], call["prefix"])
        return SimpleNamespace(
            ttft=1000 * seconds + self.noise.get(isl, 0.0),
            tpot=4.0 + batch,
            backend_version="0.5.14",
            summary=SimpleNamespace(check_oom=lambda: batch > self.fits),
        )


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A package of the same call surface."""
    found = Database()
    names = ("aiconfigurator", "cli", "cli.api", "sdk", "sdk.common")
    modules = {
        name: ModuleType(name if name == "aiconfigurator" else f"aiconfigurator.{name}")
        for name in names
    }
    modules["cli.api"].cli_estimate = found.cli_estimate  # type: ignore[attr-defined]
    common: Any = modules["sdk.common"]
    common.DefaultHFModels = {QWEN, DENSE, "Qwen/Qwen3-32B"}
    common.SupportedSystems = {"h200_sxm", "b200_sxm"}
    for module in modules.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield found
    sys.modules.pop(MODULE, None)


@pytest.fixture
def module(database: Database) -> Any:
    return importlib.import_module(MODULE)


def test_without_the_package_the_error_names_the_command() -> None:
    code = f"import sys; sys.modules['aiconfigurator'] = None\nimport {MODULE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingExtra" in done.stderr
    assert 'pip install "prfaas[profiles]"' in done.stderr


def test_the_sampled_times_are_those_of_the_package(module: Any) -> None:
    rows = module.Instance(checkpoint=QWEN, system="h200_sxm").prefill_rows((1024, 32_000, 130_000))
    assert [round(1000 * seconds) for _, _, seconds in rows] == [61, 920, 4236]
    assert [row[:2] for row in rows] == [(1024, 0), (32_000, 0), (130_000, 0)]


def test_a_cached_prefix_is_part_of_the_prompt(module: Any, database: Database) -> None:
    module.Instance(checkpoint=QWEN, system="h200_sxm", version="1").prefill_rows((512,), (0, 4096))
    asked = [(call["isl"], call["prefix"], call["batch_size"]) for call in database.calls]
    assert asked == [(512, 0, 1), (4608, 4096, 1)]
    assert {call["mode"] for call in database.calls} == {"static_ctx"}


def test_times_never_fall_with_more_tokens_of_either_kind(module: Any, database: Database) -> None:
    database.noise = {2048: 100.0, 1024 + 4096: -50.0}
    instance = module.Instance(checkpoint=QWEN, system="h200_sxm")
    rows = instance.prefill_rows((1024, 2048, 2304), (0, 4096))
    times = {row[:2]: row[2] for row in rows}
    assert times[2304, 0] == times[2048, 0]
    assert times[1024, 4096] == times[1024, 0]
    PrefillSurface(rows)


def test_the_newest_data_are_looked_for_once(module: Any, database: Database) -> None:
    instance = module.Instance(checkpoint=QWEN, system="h200_sxm")
    instance.prefill_rows((1024, 2048, 4096))
    assert [call["backend_version"] for call in database.calls] == [None, *["0.5.14"] * 3]
    assert instance.pinned().version == "0.5.14"


def test_layout_and_precision_reach_the_package(module: Any, database: Database) -> None:
    layout = {"num_gpus": 16, "expert_parallel": 2, "weights": "fp8_block", "kv": "fp8"}
    module.Instance(checkpoint=QWEN, system="h200_sxm", version="1", **layout).prefill_rows((512,))
    call = database.calls[0]
    assert (call["tp_size"], call["moe_tp_size"], call["moe_ep_size"]) == (16, 8, 2)
    assert (call["gemm_quant_mode"], call["moe_quant_mode"]) == ("fp8_block", "fp8_block")
    assert (call["kvcache_quant_mode"], call["backend_name"]) == ("fp8", "sglang")


def test_by_default_every_gpu_holds_whole_experts(module: Any, database: Database) -> None:
    module.Instance(checkpoint=QWEN, system="h200_sxm", num_gpus=4, version="1").prefill_rows((9,))
    call = database.calls[0]
    assert (call["tp_size"], call["moe_tp_size"], call["moe_ep_size"]) == (4, 1, 4)


def test_decode_steps_go_up_to_the_largest_batch_that_fits(module: Any, database: Database) -> None:
    found = module.Instance(checkpoint=QWEN, system="h200_sxm").decode_steps(5000, (1, 8, 16, 64))
    batches = [batch for batch, _ in found.steps]
    assert batches == sorted(batches)
    assert {1, 8, 16} < set(batches)
    assert batches[-1] == 40
    assert dict(found.steps)[8] == pytest.approx(0.012)
    decoded = [call for call in database.calls if call["mode"] == "static_gen"]
    assert {(call["isl"], call["osl"]) for call in decoded} == {(5000, 2)}


def test_no_larger_batch_is_tried_where_all_fit(module: Any, database: Database) -> None:
    found = module.Instance(checkpoint=QWEN, system="h200_sxm").decode_steps(5000, (1, 8))
    assert [batch for batch, _ in found.steps] == [1, 8]


@pytest.mark.parametrize(
    ("step_s", "batch"), [(0.0049, 0), (0.005, 1), (0.0085, 4), (0.012, 8), (0.02, 16), (9.0, 16)]
)
def test_the_largest_batch_within_a_step(module: Any, step_s: float, batch: int) -> None:
    steps = module.DecodeSteps(context_tokens=1, steps=((1, 0.005), (8, 0.012), (16, 0.020)))
    assert steps.batch_within(step_s) == batch


def test_steps_are_linear_between_batches(module: Any) -> None:
    steps = module.DecodeSteps(context_tokens=1, steps=((2, 0.006), (8, 0.012)))
    assert [steps.step_s(batch) for batch in (1, 2, 5, 8, 9)] == pytest.approx(
        [0.006, 0.006, 0.009, 0.012, 0.012]
    )


def test_a_decode_profile_is_the_line_through_the_steps(module: Any) -> None:
    line = tuple((batch, 0.004 + 0.001 * batch) for batch in (1, 4, 16))
    profile = module.DecodeSteps(context_tokens=1, steps=line).profile()
    assert profile.base_s == pytest.approx(0.004)
    assert profile.per_request_s == pytest.approx(0.001)


def test_a_decode_profile_starts_above_zero(module: Any) -> None:
    bent = module.DecodeSteps(context_tokens=1, steps=((1, 0.001), (2, 0.001), (64, 1.0)))
    assert bent.profile().base_s == pytest.approx(0.0005)


def test_one_batch_is_no_decode_profile(module: Any) -> None:
    with pytest.raises(ConfigError, match="1 batches fit at 7 tokens"):
        module.DecodeSteps(context_tokens=7, steps=((1, 0.005),)).profile()


def test_measure_gives_the_planner_an_instance(module: Any, database: Database) -> None:
    system = module.measure(preset("qwen3.5-397b"), system="b200_sxm", num_gpus=4)
    assert (system.name, system.num_gpus) == ("b200_sxm", 4)
    assert (system.batch_size, system.decode_step_s) == (21, pytest.approx(0.025))
    assert system.prefill.prefill_s(32_000) == pytest.approx(0.920, abs=1e-3)
    assert system.prefill.prefill_s(1024, 32_000) > system.prefill.prefill_s(1024)
    assert {call["system"] for call in database.calls} == {"b200_sxm"}


def test_memory_bounds_the_batch(module: Any, database: Database) -> None:
    database.fits = 10
    system = module.measure(preset("qwen3.5-397b"), system="b200_sxm")
    assert (system.batch_size, system.decode_step_s) == (10, pytest.approx(0.014))


@pytest.mark.parametrize(("dtype", "mode"), [(DType.BFLOAT16, "bfloat16"), (DType.FLOAT8, "fp8")])
def test_times_are_of_the_cache_that_is_shipped(
    module: Any, database: Database, dtype: DType, mode: str
) -> None:
    module.measure(preset("minimax-m2.5", kv_dtype=dtype), system="h200_sxm")
    assert {call["kvcache_quant_mode"] for call in database.calls} == {mode}
    assert {call["model"] for call in database.calls} == {DENSE}


def test_an_slo_that_no_batch_meets_leaves_the_system_without_decode(module: Any) -> None:
    system = module.measure(preset("qwen3.5-397b"), system="h200_sxm", step_s=0.004)
    assert (system.batch_size, system.decode_step_s) == (None, None)


def test_a_model_that_does_not_fit_is_refused(module: Any, database: Database) -> None:
    database.fits = 0
    with pytest.raises(ConfigError, match=f"{QWEN} does not fit 8 h200_sxm at 27486 tokens"):
        module.measure(preset("qwen3.5-397b"), system="h200_sxm")


def test_a_model_is_found_by_the_name_of_its_folder(module: Any) -> None:
    folder = attrs.evolve(preset("qwen3-235b"), name="qwen3-32b")
    assert module.checkpoint_of(folder) == "Qwen/Qwen3-32B"


@pytest.mark.parametrize(
    ("model", "system", "backend", "known"),
    [
        ("kimi-linear-48b", "h200_sxm", "sglang", "no model .*kimi-linear.*qwen3-32b"),
        ("qwen3.5-397b", "h300", "sglang", "no system 'h300'; it has b200_sxm, h200_sxm"),
        ("qwen3.5-397b", "h200_sxm", "x", "no backend 'x'; it has sglang, trtllm, vllm"),
        ("deepseek-v3", "h200_sxm", "sglang", "no model 'deepseek-ai/DeepSeek-V3'"),
    ],
)
def test_what_the_database_cannot_know_is_refused_before_it_is_asked(
    module: Any, database: Database, model: str, system: str, backend: str, known: str
) -> None:
    with pytest.raises(ConfigError, match=known):
        module.measure(preset(model), system=system, backend=backend)
    assert database.calls == []


@pytest.mark.parametrize("experts", [0, 3])
def test_experts_must_divide_the_gpus(module: Any, experts: int) -> None:
    with pytest.raises(ConfigError, match=f"expert_parallel is {experts} on 8 GPUs"):
        module.Instance(checkpoint=QWEN, system="h200_sxm", expert_parallel=experts)


@pytest.mark.parametrize("error", [RuntimeError("MoE data missing\nmore"), ValueError("no flops")])
def test_missing_data_are_a_configuration_error(
    module: Any, database: Database, error: Exception
) -> None:
    database.error = error
    with pytest.raises(ConfigError, match=r"no data for .* on 8 h200_sxm with sglang") as caught:
        module.measure(preset("qwen3.5-397b"), system="h200_sxm")
    assert "more" not in str(caught.value).split(";")[0]
    assert caught.value.__cause__ is error


def test_the_package_speaks_to_nobody(
    module: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    module.Instance(checkpoint=QWEN, system="h200_sxm").prefill_rows((512,))
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert logging.root.manager.disable == logging.NOTSET


def test_plan_runs_on_two_systems_of_the_database(
    module: Any, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    from prfaas.cli import main

    flags = "--model qwen3.5-397b --remote aiconfigurator:b200_sxm --local aiconfigurator:h200_sxm"
    nodes = "--remote-nodes 2 --local-nodes 4 --link-gbps 100 --json"
    assert main(["plan", *flags.split(), *nodes.split()]) == 0
    plan = json.loads(capsysbinary.readouterr().out)
    assert plan["expectation"]["best"]["num_prfaas"] == 2
    assert plan["expectation"]["best"]["requests_per_s"] > 0
