"""``prfaas plan``: tables, JSON, flags, the picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from prfaas.cli import main
from prfaas.cli.config import read_config
from prfaas.cli.plan import problem_of

CONFIG = """
[model]
preset = "paper-1t"
[workload]
lengths = {mu = 9.9, sigma = 1.0, min = 128, max = 131072}
output_tokens = 1024
[systems.h20]
prefill = [[1024, 0.59], [8192, 1.55], [32000, 4.93], [131072, 22.3]]
batch_size = 20
step_ms = 25
price = 1.0
[clusters.far]
kind = "prfaas"
system = "paper-h200"
nodes = 4
[clusters.near]
kind = "pd"
system = "h20"
nodes = 8
[link]
egress_gbps = 100
rtt_ms = 10
"""
CLUSTERS = ["--remote", "paper-h200", "--local", "paper-h200", "--link-gbps", "100"]
FLAGS = ["plan", "--model", "paper-1t", *CLUSTERS, "--remote-nodes", "2", "--local-nodes", "2"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "plan.toml"
    file.write_text(CONFIG)
    return file


def test_the_tables_show_both_forms_and_the_json_the_same(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config)]) == 0
    text = capsys.readouterr().out
    assert main(["plan", str(config), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    mean, exact = plan["mean"]["best"], plan["expectation"]["best"]
    assert mean["requests_per_s"] == pytest.approx(3.2, abs=0.1)  # paper, Table 6: 3.24
    assert exact["requests_per_s"] < mean["requests_per_s"]
    row = next(line for line in text.splitlines() if line.startswith("highest rate"))
    assert row.split()[-2:] == [
        f"{mean['requests_per_s']:.3f}",
        f"{exact['requests_per_s']:.3f}",
    ]
    roles = next(line for line in text.splitlines() if line.startswith("N_prfaas"))
    assert roles.endswith("4 / 3 / 5")
    for part in ("naive heterogeneous", "egress bps", "far", "cost per hour", "prfaas compute"):
        assert part in text


def test_link_values_reach_the_planner(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(CONFIG.replace("egress_gbps = 100", "egress_gbps = 8\nshare_of_others = 0.5"))
    assert main(["plan", str(config), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["mean"]["best"]
    assert best["egress_bps"] == pytest.approx(4e9, rel=0.01)
    assert max(s["utilisation"] for s in best["stages"] if s["stage"] == "egress") > 0.99
    assert problem_of(read_config(config), None).rtt_s == 0.01


def test_flags_alone_describe_a_deployment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["mean"]["best"]
    assert (best["num_prfaas"], best["num_prefill"] + best["num_decode"]) == (2, 2)


def test_the_remote_nodes_are_chosen_for_the_rate_or_for_its_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bought = {}
    for objective in ("rate", "price"):
        more = ["--local", "paper-h20", "--max-remote-nodes", "3", "--objective", objective]
        assert main([*FLAGS, *more]) == 0
        assert ": remote 0 to 3 x paper-h200, local 2 x paper-h20," in capsys.readouterr().out
        assert main([*FLAGS, *more, "--json"]) == 0
        bought[objective] = json.loads(capsys.readouterr().out)["mean"]["best"]
    assert bought["rate"]["num_prfaas"] == 3
    assert bought["price"]["num_prfaas"] == 2
    assert bought["price"]["requests_per_price"] > bought["rate"]["requests_per_price"]


def test_a_trace_gives_the_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{i},m,{1000 + 100 * i},10,0,l" for i in range(30)]
    file = tmp_path / "burst.csv"
    file.write_text(
        "\n".join(["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *rows])
    )
    assert main([*FLAGS, "--trace", str(file)]) == 0
    assert "30 requests of burst, mean 2,450 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["plan", "--model", "x"],
            "also --remote, --local, --remote-nodes, --local-nodes, --link-",
        ),
        ([*FLAGS[:2], "nosuch", *FLAGS[3:]], "'nosuch' is no preset and no such file exists"),
        ([*FLAGS, "--link-gbps", "-1"], "link.egress_gbps is -1.0: expected"),
        ([*FLAGS, "--local", "x"], "system 'x' is not known"),
        ([*FLAGS, "--output-tokens", "0"], "workload.output_tokens is 0: expected"),
        ([*FLAGS, "--max-remote-nodes", "0"], "--max-remote-nodes is 0; it must be at least 1"),
    ],
)
def test_wrong_flags(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_a_pd_system_must_decode(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(CONFIG.replace("step_ms = 25\n", ""))
    assert main(["plan", str(config)]) == 2
    assert "clusters.near decodes, so systems.h20 needs step_ms and" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["prefill = 1", "decode = 1"])
def test_a_prfaas_cluster_has_no_roles(
    key: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(CONFIG.replace("nodes = 4", f"nodes = 4\n{key}"))
    assert main(["plan", str(config)]) == 2
    assert "clusters.far is of kind prfaas and all its nodes prefill" in capsys.readouterr().err


def test_flags_do_not_change_a_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (
        ("--model", "paper-1t"),
        ("--remote", "paper-h20"),
        ("--local", "paper-h20"),
        ("--remote-nodes", "1"),
        ("--local-nodes", "1"),
        ("--link-gbps", "1"),
        ("--trace", "t"),
        ("--output-tokens", "1"),
    ):
        assert main(["plan", str(config), flag, value]) == 2
        assert f"{flag} beside {config}: the file describes" in capsys.readouterr().err


def test_the_price_of_every_system_is_asked_for_by_its_key(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(CONFIG.replace("price = 1.0\n", ""))
    assert main(["plan", str(config), "--objective", "price"]) == 2
    assert "--objective price needs systems.h20.price; add it" in capsys.readouterr().err


def test_what_a_plan_does_not_know_is_said(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config), "--json"]) == 0
    assert capsys.readouterr().err == ""
    config.write_text(CONFIG.replace("paper-1t", "kimi-linear-48b"))
    assert main(["plan", str(config), "--json"]) == 0
    said = "note: paper-h200 took their times with paper-1t, not with kimi-linear-48b; give"
    assert capsys.readouterr().err.startswith(said)
    own = "[systems.paper-h200]\nprefill = [[1024, 0.4], [131072, 7.4]]\n[clusters.far]"
    config.write_text(CONFIG.replace("paper-1t", "kimi-linear-48b").replace("[clusters.far]", own))
    assert main(["plan", str(config), "--json"]) == 0
    assert capsys.readouterr().err == ""
    config.write_text(CONFIG.replace("nodes = 8", "nodes = 8\nprefill = 1"))
    assert main(["plan", str(config), "--json"]) == 0
    assert "note: the plan chooses the roles of near; prefill and" in capsys.readouterr().err


def test_the_picture(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    assert main(["plan", str(config), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", str(config), "--png", str(tmp_path / "no" / "x.png")]) == 2
    assert "x.png cannot be written: No such file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", str(config), "--png", str(picture)]) == 2
    assert 'matplotlib is not installed; run: pip install "prfaas[cli]"' in capsys.readouterr().err
