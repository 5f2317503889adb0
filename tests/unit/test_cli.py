"""The command line as a whole: dispatch, exit status, one clear line per error; configurations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import prfaas
from prfaas.capacity import PrefillProfile, System
from prfaas.cli import COMMANDS, main
from prfaas.cli.config import Config, parse_config, read_config
from prfaas.cli.freeze import frozen
from prfaas.cli.progress import progress_bar
from prfaas.cli.systems import (
    lengths_of,
    model_of,
    named_system,
    output_tokens_of,
    system_of,
    trace_of,
)
from prfaas.cli.table import plain_table, print_table
from prfaas.errors import ConfigError
from prfaas.spec import ModelSpec, preset


def raw_config(**changes: dict[str, Any]) -> dict[str, Any]:
    """A small configuration; ``changes`` replace whole tables."""
    raw: dict[str, Any] = {
        "model": {"preset": "paper-1t"},
        "workload": {
            "lengths": {"mu": 9.9, "sigma": 1, "min": 128, "max": 131072},
            "output_tokens": 100,
            "rate_rps": 2.0,
        },
        "systems": {
            "fast": {"prefill": [[1024, 0.4], [131072, 7.4]], "price": 2.0},
            "slow": {
                "prefill": [[1024, 0.6], [131072, 22.0]],
                "price": 1.0,
                "batch_size": 20,
                "step_ms": 25,
            },
        },
        "clusters": {
            "far": {"kind": "prfaas", "system": "fast", "nodes": 2},
            "near": {"kind": "pd", "system": "slow", "nodes": 4},
        },
        "link": {"egress_gbps": 100},
    }
    return {**raw, **changes}


def refused(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    return str(caught.value)


def changed(path: str, value: object) -> dict[str, Any]:
    """The small configuration with one key set, at any depth."""
    raw = raw_config()
    *tables, key = path.split(".")
    table = raw
    for name in tables:
        table[name] = dict(table.get(name, {}))
        table = table[name]
    table[key] = value
    return raw


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, text in (("--version", prfaas.__version__), ("--help", "reproduce")):
        with pytest.raises(SystemExit) as caught:
            main([flag])
        assert caught.value.code == 0
        assert text in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_arguments_and_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: prfaas {name}" in capsys.readouterr().out


def test_python_m_prfaas_runs_it_and_loads_only_what_it_needs() -> None:
    code = (
        "import sys; from prfaas.cli import main\n"
        "try: main(['plan', '--help'])\n"
        "finally: print({'numpy', 'rich', 'matplotlib', 'torch', 'prfaas.cli.simulate',"
        " 'asyncio'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"
    done = subprocess.run(
        [sys.executable, "-m", "prfaas", "plan", "nowhere.toml"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("prfaas plan: nowhere.toml cannot be read: No such file")
    assert done.stderr.count("\n") == 1


def test_an_error_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("[link]\negress_gpbs = 10\n")
    for command in ("plan", "simulate"):
        assert main([command, str(file)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"prfaas {command}: {file}: [model] is missing")
        assert captured.err.count("\n") == 1


def test_ctrl_c_is_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(path: str) -> Config:
        raise KeyboardInterrupt

    monkeypatch.setattr("prfaas.cli.plan.read_config", interrupted)
    assert main(["plan", "x.toml"]) == 130
    assert capsys.readouterr().err == "prfaas plan: interrupted\n"


def test_a_file_that_is_no_toml_names_the_place(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("[link\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is no TOML: .*line 1"):
        read_config(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"bad\.toml is no TOML"):
        read_config(file)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("lnik", {}, "lnik is not a known key; did you mean 'link'? known are model, workload"),
        ("link.egress_gpbs", 1, "link.egress_gpbs is not a known key; did you mean 'egress_gbps'?"),
        ("workload.lengths.mean", 1, "workload.lengths.mean is not a known key"),
        (
            "systems.slow.stepms",
            1,
            "systems.slow.stepms is not a known key; did you mean 'step_ms'",
        ),
        (
            "systems.slow.aiconfigurator",
            {"sytem": "x"},
            "systems.slow.aiconfigurator.sytem is not a known key; did you mean 'system'?",
        ),
        ("clusters.near.xyzzy", 1, "clusters.near.xyzzy is not a known key; known are kind"),
        ("clusters.near.nodes", "8", "clusters.near.nodes is '8': expected int, got str"),
        ("clusters.near.nodes", -1, "clusters.near.nodes is -1: expected int >= 0"),
        ("clusters.near.kind", "p", "clusters.near.kind is 'p': invalid enum value 'p'; give"),
        ("systems.fast.prefill", [[1, 2], [3]], "systems.fast.prefill[1] is [3]: expected array"),
        ("systems.fast.prefill", [[1, "x"]], "systems.fast.prefill[0][1] is 'x': expected float"),
        ("systems.fast.price", 0, "systems.fast.price is 0: expected"),
        ("link.egress_gbps", -1, "link.egress_gbps is -1: expected float > 0"),
        ("link.share_of_others", 1.0, "link.share_of_others is 1.0: expected float < 1"),
        ("workload.lengths", {"mu": 1}, "workload.lengths.sigma is missing; add the key"),
        ("simulate.policy", "x", "give 'threshold' or 'max_weight'"),
        ("simulate.threshold", "x", "'best' or 'adaptive'"),
        ("systems", 3, "systems is 3; it must be tables [systems.NAME]"),
        ("systems.fast", 3, "systems.fast is 3; it must be a table"),
    ],
)
def test_a_wrong_key_or_value_is_named(path: str, value: object, text: str) -> None:
    assert text in refused(changed(path, value))


def test_a_missing_table_is_named() -> None:
    raw = raw_config()
    del raw["link"]
    assert refused(raw) == "[link] is missing; add the table"


def test_defaults_of_what_may_be_left_out() -> None:
    config = parse_config(raw_config())
    assert (config.simulate.policy, config.simulate.threshold) == ("threshold", "best")
    assert (config.link.rtt_ms, config.link.schedule) == (0.0, [])
    assert config.systems["fast"].gpus == 8


def test_a_system_takes_its_numbers_from_the_file() -> None:
    config = parse_config(raw_config())
    system = system_of(config, model_of(config), "slow")
    assert system.prefill.prefill_s(1024) == pytest.approx(0.6)
    assert (system.decode_step_s, system.batch_size) == (0.025, 20)
    assert (system.num_gpus, system.price_per_hour) == (8, 8.0)


def test_prefill_times_come_from_exactly_one_place(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("new,cached,seconds\n100,0,1\n200,0,2\n100,50,1.5\n200,50,2.5\n")
    raw = changed("systems.slow", {"prefill_table": "t.csv"})
    config = parse_config(raw, folder=str(tmp_path))
    prefill = system_of(config, model_of(config), "slow").prefill
    assert prefill.prefill_s(150) == pytest.approx(1.5)
    assert prefill.prefill_s(150, 50) == pytest.approx(2.0)

    def complaint(section: dict[str, Any]) -> str:
        broken = parse_config(changed("systems.slow", section), folder=str(tmp_path))
        with pytest.raises(ConfigError) as caught:
            system_of(broken, model_of(broken), "slow")
        return str(caught.value)

    assert "systems.slow: prefill times come from nowhere; give exactly one" in complaint({})
    both = {"prefill": [[1, 1], [2, 2]], "prefill_table": "t.csv"}
    assert "come from prefill and prefill_table" in complaint(both)
    assert "systems.slow: the prefill table" in complaint({"prefill_table": "no.csv"})
    assert "systems.slow: knots" in complaint({"prefill": [[1, 2], [2, 1]]})
    table.write_text("new,cached,seconds\n100,0,fast\n")
    assert "t.csv: line 2: seconds is 'fast'" in complaint({"prefill_table": "t.csv"})
    table.write_text("new,cached,seconds\n100,50,1\n200,50,2\n")
    assert "measure without a prefix too" in complaint({"prefill_table": "t.csv"})


def test_systems_of_the_paper_and_of_the_database() -> None:
    model = preset("paper-1t")
    h200, h20 = (named_system(name, model) for name in ("paper-h200", "paper-h20"))
    assert h200.prefill.prefill_s(8192) == pytest.approx(0.72)
    assert h200.prefill.prefill_s(30_000) < h20.prefill.prefill_s(30_000)
    assert h200.price_per_hour == 2 * (h20.price_per_hour or 0)
    assert (h20.batch_size, h20.decode_step_s) == (20, 0.025)
    with pytest.raises(ConfigError, match="'h800' is not known; known are mine, paper-h200"):
        named_system("h800", model, known=["mine"])


def test_the_database_asks_for_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prfaas.integrations.aiconfigurator", None)
    with pytest.raises(ConfigError, match=r'pip install "prfaas\[profiles\]"'):
        named_system("aiconfigurator:h200_sxm", preset("paper-1t"))


def test_a_system_of_the_database_is_frozen_with_all_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def measure(model: ModelSpec, *, system: str, backend: str, num_gpus: int) -> System:
        asked.append((model.name, system, backend, num_gpus))
        return System(
            name=system,
            prefill=PrefillProfile(((100, 1.0), (200, 2.0))),
            num_gpus=num_gpus,
            decode_step_s=0.02,
            batch_size=12,
        )

    database = ModuleType("prfaas.integrations.aiconfigurator")
    monkeypatch.setattr(database, "measure", measure, raising=False)
    monkeypatch.setitem(sys.modules, database.__name__, database)
    section = {"aiconfigurator": {"system": "h20_sxm", "gpus": 4}, "price": 3.0}
    config = parse_config(changed("systems.slow", section))
    system = system_of(config, model_of(config), "slow")
    assert asked == [("paper-1t", "h20_sxm", "sglang", 4)]
    assert (system.name, system.num_gpus, system.price_per_hour) == ("slow", 4, 12.0)
    whole = frozen(config)
    monkeypatch.setitem(sys.modules, database.__name__, None)
    assert system_of(whole, model_of(whole), "slow") == system


def test_models_by_preset_path_and_contents(tmp_path: Path) -> None:
    contents = (
        '{"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 4, '
        '"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, '
        '"dtype": "bfloat16", "linear_num_key_heads": 16, "linear_key_head_dim": 128, '
        '"linear_conv_kernel_dim": 4, "linear_num_value_heads": 32, "linear_value_head_dim": 128}'
    )
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(contents)
    for path in ("tiny", "tiny/config.json"):  # named after the folder
        config = parse_config(raw_config(model={"path": path}), folder=str(tmp_path))
        assert (model_of(config).name, len(model_of(config).layers)) == ("tiny", 4)

    def complaint(section: dict[str, Any]) -> str:
        config = parse_config(raw_config(model=section), folder=str(tmp_path))
        with pytest.raises(ConfigError) as caught:
            model_of(config)
        return str(caught.value)

    assert complaint({}) == "model has nothing; give preset or path"
    assert (
        complaint({"preset": "x", "path": "y"}) == "model has preset and path; give preset or path"
    )
    assert "cannot be read: No such file" in complaint({"path": "nowhere"})
    (tmp_path / "tiny" / "config.json").write_text("{")
    assert "is no JSON" in complaint({"path": "tiny"})
    (tmp_path / "tiny" / "config.json").write_text("[]")
    assert "holds no JSON object" in complaint({"path": "tiny"})


def test_lengths_of_a_trace_are_the_uncached_ones(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 9, "input_length": 1300, "output_length": 7, "hash_ids": [0, 1, 3]}\n'
    )
    raw = raw_config(workload={"trace": "t.jsonl"})
    config = parse_config(raw, folder=str(tmp_path))
    trace = trace_of(config)
    lengths = lengths_of(config, trace)
    assert (lengths.min_tokens, lengths.max_tokens) == (1300 - 1024, 1100)
    assert output_tokens_of(config, trace) == 6
    said = parse_config(changed("workload", {"trace": "t.jsonl", "output_tokens": 9}))
    assert output_tokens_of(said, trace) == 9


@pytest.mark.parametrize(
    ("workload", "ask", "text"),
    [
        ({}, trace_of, "workload has both or neither of lengths and trace"),
        ({"trace": "no.csv"}, trace_of, "the trace no.csv cannot be read: No such file"),
        (
            {"lengths": {"mu": 1, "sigma": 1, "min": 9, "max": 3}},
            lambda config: lengths_of(config, None),
            "workload.lengths: lengths range from 9.0 to 3.0",
        ),
        (
            {"lengths": {"mu": 1, "sigma": 1, "min": 1, "max": 3}},
            lambda config: output_tokens_of(config, None),
            "workload.output_tokens is missing",
        ),
    ],
)
def test_workloads_that_cannot_be(
    workload: dict[str, Any], ask: Callable[[Config], object], text: str
) -> None:
    config = parse_config(raw_config(workload=workload))
    with pytest.raises(ConfigError, match=text):
        ask(config)


def test_a_broken_trace_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n")
    config = parse_config(raw_config(workload={"trace": str(file)}))
    with pytest.raises(ConfigError, match=r"the trace .*t\.csv: line 2: TIMESTAMP is 'x'"):
        trace_of(config)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        trace_of(config)


def test_plain_tables_are_aligned() -> None:
    text = plain_table("title", ("", "n"), [("a", "1"), ("long", "1,000")])
    assert text.splitlines() == ["title", "          n", "a         1", "long  1,000"]


def test_a_terminal_gets_a_drawn_table_and_plain_text_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    rows = [("[bold]a", "1")]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table("title", ("", "n"), rows)
    drawn = capsys.readouterr().out
    assert "│ [bold]a │ 1 │" in drawn  # text is no markup
    monkeypatch.setitem(sys.modules, "rich.console", None)
    print_table("title", ("", "n"), rows)
    assert capsys.readouterr().out == "title\n         n\n[bold]a  1\n"


def test_progress_is_for_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("running", 10) as show:
        assert show is None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress_bar("running", 1000) as show:
        assert show is not None
        for ended in range(1001):
            show(2.0 * ended, ended)
    text = capsys.readouterr().err
    assert "\rrunning 998 of 1,000, 1,996 s" in text
    assert 90 <= text.count("running") <= 101  # about once per per cent
    assert text.endswith("\r\x1b[K")


def test_rich_progress_counts_to_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_bar("running", 10) as show:
        assert show is not None
        show(3.0, 10)
    assert "running 10 of 10, 3 s" in capsys.readouterr().err


def test_reproduce_asks_for_the_extra_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("numpy", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, package, None)
    assert main(["reproduce", "--png", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    for package in ("numpy", "matplotlib"):
        assert f'{package} is not installed; run: pip install "prfaas[cli]"' in err


def test_reproduce_explains_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--quick"]) == 0
    assert "input: fed in; fitted: the prefill curves were" in capsys.readouterr().out
