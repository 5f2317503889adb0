"""``prfaas simulate`` and ``prfaas replay``: figures, logs, differences, other settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest

from prfaas.capacity import plan_deployment
from prfaas.cli import main
from prfaas.cli.config import Config, parse_config, read_config
from prfaas.cli.decisions import open_log
from prfaas.cli.freeze import frozen
from prfaas.cli.plan import problem_of
from prfaas.cli.replay import first_difference
from prfaas.cli.scenario import run_of
from prfaas.cli.simulate import with_overrides
from prfaas.cli.summary import summarise
from prfaas.core import ClusterKind, NodeId, Role
from prfaas.errors import ConfigError

CONFIG = """
[model]
preset = "paper-1t"
[workload]
lengths = {mu = 9.9, sigma = 1.0, min = 128, max = 131072}
output_tokens = 100
rate_rps = 1.0
[systems.fast]
prefill = [[1024, 0.44], [8192, 0.72], [130000, 7.4]]
price = 2.0
[systems.slow]
prefill_table = "slow.csv"
batch_size = 20
step_ms = 24.7
price = 1.0
[clusters.far]
kind = "prfaas"
system = "fast"
nodes = 2
[clusters.near]
kind = "pd"
system = "slow"
nodes = 4
[link]
egress_gbps = 100
[simulate]
requests = 80
ttft_slo_s = 5
"""
TABLE = "new,cached,seconds\n1024,0,0.59\n8192,0,1.55\n130000,0,22.3\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "slow.csv").write_text(TABLE)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def edited(file: Path, **simulate: Any) -> Config:
    """The configuration of the file with other values in [simulate] and [workload]."""
    workload = {k: simulate.pop(k) for k in ("trace", "lengths", "rate_rps") if k in simulate}
    raw = {
        "model": {"preset": "paper-1t"},
        "workload": {
            "lengths": {"mu": 9.9, "sigma": 1, "min": 128, "max": 131072},
            "output_tokens": 100,
            "rate_rps": 1.0,
            **workload,
        },
        "systems": {"s": {"prefill": [[1024, 0.5], [130000, 9]], "batch_size": 20, "step_ms": 20}},
        "clusters": {
            "far": {"kind": "prfaas", "system": "s", "nodes": 1},
            "near": {"kind": "pd", "system": "s", "nodes": 3},
        },
        "link": {"egress_gbps": 10},
        "simulate": {"requests": 30, **simulate},
    }
    raw["workload"] = {k: v for k, v in raw["workload"].items() if v is not None}
    return parse_config(raw, folder=str(file.parent))


def test_the_figures_in_a_table_and_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(file), "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert captured.err == ""
    assert summary["num_requests"] == summary["num_served"] == 80
    assert summary["num_lost"] == summary["num_failed"] == 0
    assert 0.5 < summary["served_rps"] < 1.5
    assert 0 < summary["goodput_rps"] < summary["served_rps"]
    assert summary["mean_ttft_s"] <= summary["p90_ttft_s"] <= summary["p99_ttft_s"]
    assert 0 < summary["offload_share"] < 1
    cost = (2 * 8 * 2.0 + 4 * 8 * 1.0) / 3600 / summary["served_rps"] * 1e6
    assert summary["cost_per_million"] == pytest.approx(cost)
    assert 0 < summary["busy_prefill"]["near"] < 4
    assert summary["busy_decode"]["far"] == 0
    assert main(["simulate", str(file)]) == 0
    text = capsys.readouterr().out
    for part in (f"{summary['mean_ttft_s']:.2f}", "within the SLO", "far: nodes busy"):
        assert part in text


def test_rates_leave_out_warming_up_and_emptying(file: Path) -> None:
    run = run_of(read_config(str(file)))
    result = run.start()
    summary = summarise(run, result)
    until_s = run.arrivals[-1].arrived_s
    from_s = until_s / 10
    records = list(result.records())
    served = [r for r in records if from_s < r.ended_s <= until_s]
    good = [r for r in served if r.ttft_s <= 5]
    late = [r.ttft_s for r in records if r.arrived_s >= from_s]
    assert len(good) < len(served) < len(records)
    assert any(r.ttft_s <= 5 for r in records if r.ended_s > until_s)
    assert summary.served_rps == pytest.approx(len(served) / (until_s - from_s))
    assert summary.goodput_rps == pytest.approx(len(good) / (until_s - from_s))
    assert len(late) < len(records)
    assert summary.mean_ttft_s == pytest.approx(sum(late) / len(late))


def test_seed_and_rate_of_the_command_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for more in ([], ["--seed", "1"], ["--rate", "0.1"]):
        assert main(["simulate", str(file), "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, seeded, slow = found
    assert plain["mean_ttft_s"] != seeded["mean_ttft_s"]
    assert slow["served_rps"] < 0.2
    assert main(["simulate", str(file), "--rate", "0"]) == 2
    assert "--rate is 0.0; it must be greater than 0" in capsys.readouterr().err


def test_a_replay_repeats_every_decision(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    assert main(["simulate", str(file), "--log", str(log), "--seed", "7"]) == 0
    # The log needs neither the configuration nor the table of prefill times.
    file.unlink()
    (tmp_path / "slow.csv").unlink()
    capsys.readouterr()
    assert main(["replay", str(log)]) == 0
    assert capsys.readouterr().out == "all 80 decisions are the same\n"
    lines = log.read_text().splitlines()
    assert len(lines) == 81
    header = json.loads(lines[0])
    assert header["config"]["simulate"]["seed"] == 7
    row = json.loads(lines[40])
    row["cached_tokens"] += 1
    log.write_text("\n".join([*lines[:40], json.dumps(row), *lines[41:]]))
    assert main(["replay", str(log)]) == 1
    assert "decision 40 (request '39'): cached_tokens was 1, is 0" in capsys.readouterr().out
    assert main(["replay", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["difference"].startswith("decision 40")
    log.write_text("\n".join(lines[:50]))
    assert main(["replay", str(log)]) == 1
    assert "decision 50 is only in the replay" in capsys.readouterr().out


def test_other_figures_or_another_version_are_told(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    assert main(["simulate", str(file), "--log", str(log)]) == 0
    lines = log.read_text().splitlines()
    header = json.loads(lines[0])
    header["summary"]["egress_bps"] += 1
    header["prfaas_version"] = "0.0.1"
    log.write_text("\n".join([json.dumps(header), *lines[1:]]))
    assert main(["replay", str(log)]) == 1
    text = capsys.readouterr().out
    assert "all decisions are the same, but the figures are not; the log is of prfaas 0.0.1" in text


def test_the_same_arrivals_under_other_settings(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    assert main(["simulate", str(file), "--log", str(log)]) == 0
    capsys.readouterr()
    settings = ["--threshold", "1e9", "--roles", "2/2"]
    assert main(["replay", str(log), *settings, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["logged"]["offload_share"] > 0
    assert report["changed"]["offload_share"] == 0
    assert report["changed"]["num_requests"] == 80
    assert main(["replay", str(log), "--policy", "max_weight", "--balancer", "throughput"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[1].split() == ["logged", "changed"]
    threshold = next(line for line in text.splitlines() if line.startswith("threshold t"))
    assert threshold.endswith(" -")


def test_replay_refuses_what_it_cannot_read(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    assert main(["simulate", str(file), "--log", str(log)]) == 0
    lines = log.read_text().splitlines()

    def complaint(*arguments: str) -> str:
        assert main(["replay", *arguments]) == 2
        return capsys.readouterr().err

    assert "nowhere cannot be read: No such file" in complaint("nowhere")
    assert "run.toml is no log of prfaas simulate: line 1" in complaint(str(file))
    assert "--roles x: 'x' is no split" in complaint(str(log), "--roles", "x")
    assert "no pd cluster 'far'" in complaint(str(log), "--roles", "far=1/1")
    two = lines[0].replace('"near":{', '"also":{"kind":"pd","system":"slow","nodes":1},"near":{')
    both = tmp_path / "both.jsonl"
    both.write_text(two)
    assert "the pd clusters are also, near; give" in complaint(str(both), "--roles", "1/1")
    assert "9 prefill and 9 decode; make them" in complaint(str(log), "--roles", "near=9/9")
    assert "--threshold is 'x'; give tokens" in complaint(str(log), "--threshold", "x")
    weighed = ("--policy", "max_weight", "--threshold", "5")
    assert "policy max_weight has no threshold; add" in complaint(str(log), *weighed)
    log.write_text("\n".join([*lines[:4], "{", *lines[5:]]))
    assert "log.jsonl: line 5: " in complaint(str(log))
    log.write_text(lines[0].replace('"prfaas_log":1', '"prfaas_log":9'))
    assert "is a log of version 9, this is version 1" in complaint(str(log))


def test_a_log_that_cannot_be_written(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--json"]):
        assert main(["simulate", str(file), "--log", str(file.parent / "no" / "l"), *more]) == 2
        captured = capsys.readouterr()
        assert "cannot be written: No such file" in captured.err
        assert "served" in captured.out  # what was simulated is not lost


def test_a_frozen_configuration_names_no_files(file: Path) -> None:
    config = read_config(file)
    whole = frozen(config)
    assert whole.systems["slow"].prefill_table is None
    assert whole.systems["slow"].prefill_rows == [
        (1024, 0, 0.59),
        (8192, 0, 1.55),
        (130000, 0, 22.3),
    ]
    assert whole.systems["slow"].step_ms == 24.7
    assert frozen(whole) == whole
    named = edited(file)
    assert set(frozen(named).systems) == {"s"}


def test_a_trace_is_played_at_a_rate_and_must_not_change(file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, i + 2]}
        for i in range(10)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    config = edited(file, trace="t.jsonl", lengths=None, rate_rps=None, requests=25)
    made = run_of(frozen(config))
    assert made.scenario.spec.granule_tokens == 512
    assert len(made.arrivals) == 25
    assert made.arrivals[9].arrived_s == pytest.approx(9.0)
    assert len({a.request_id for a in made.arrivals}) == 25
    assert {a.output_tokens for a in made.arrivals} == {100}
    assert made.arrivals[0].granule_hashes[0] != made.arrivals[10].granule_hashes[0]
    faster = run_of(edited(file, trace="t.jsonl", lengths=None, rate_rps=2.0, requests=10))
    assert faster.arrivals[9].arrived_s == pytest.approx(4.5)
    short = edited(file, trace="t.jsonl", lengths=None, rate_rps=None, duration_s=3.5, requests=10)
    assert len(run_of(short).arrivals) == 4
    kept = frozen(config)
    trace.write_text(trace.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"t\.jsonl has changed: its SHA-256 is not"):
        run_of(kept)


def test_roles_and_threshold_come_from_the_planner_unless_given(file: Path) -> None:
    planned = run_of(edited(file))
    assert planned.roles["near"][0] + planned.roles["near"][1] == 3
    assert planned.threshold_tokens is not None
    assert 128 < planned.threshold_tokens < 131_072
    assert run_of(edited(file, threshold=5000)).threshold_tokens == 5000
    config = edited(file)
    clusters = {**config.clusters}
    for given, roles in (
        ({"prefill": 1}, (1, 2)),
        ({"decode": 1}, (2, 1)),
        ({"prefill": 2, "decode": 1}, (2, 1)),
    ):
        raw = {"kind": "pd", "system": "s", "nodes": 3, **given}
        clusters["near"] = parse_config(
            {
                "model": {},
                "workload": {},
                "clusters": {"near": raw},
                "link": {"egress_gbps": 1},
            }
        ).clusters["near"]
        made = run_of(with_clusters(config, clusters))
        assert made.roles["near"] == roles
        nodes = [n for n in made.scenario.nodes if n.kind is ClusterKind.PD]
        assert [n.role for n in nodes].count(Role.PREFILL) == roles[0]


def test_the_best_threshold_is_that_of_the_roles(file: Path) -> None:
    config = read_config(file)
    problem = problem_of(config, None)
    found = {}
    for point in plan_deployment(problem).expectation.by_split:
        near = msgspec.structs.replace(config.clusters["near"], prefill=int(point.num_prefill))
        made = run_of(with_clusters(config, {**config.clusters, "near": near}))
        assert made.threshold_tokens == round(point.threshold_tokens)
        found[point.num_prefill] = made.threshold_tokens
    assert found[1] < found[2] < found[3]


def test_prfaas_clusters_share_the_link(file: Path) -> None:
    file.write_text(CONFIG.replace("egress_gbps = 100", "egress_gbps = 2\nshare_of_others = 0.2"))
    config = read_config(file)
    one = run_of(config)
    half = msgspec.structs.replace(config.clusters["far"], nodes=1)
    none = msgspec.structs.replace(config.clusters["far"], nodes=0)
    two = run_of(with_clusters(config, {**config.clusters, "far": half, "far2": half}))
    idle = run_of(with_clusters(config, {**config.clusters, "far2": none}))
    assert one.threshold_tokens == two.threshold_tokens == idle.threshold_tokens
    assert one.threshold_tokens is not None


def test_policies_assume_what_others_leave_of_the_link(file: Path) -> None:
    text = CONFIG.replace("min = 128", "min = 60000")  # prompts that are worth a good link
    offloaded = []
    for link in ("10", "10\nshare_of_others = 0.99"):
        file.write_text(text.replace("egress_gbps = 100", f"egress_gbps = {link}"))
        config = with_overrides(read_config(file), policy="max_weight")
        offloaded.append(run_of(config).start().decisions[0].offloaded)
    assert offloaded == [True, False]


def with_clusters(config: Config, clusters: dict[str, Any]) -> Config:
    return msgspec.structs.replace(config, clusters=clusters)


def test_the_link_its_schedule_and_the_share_of_others(file: Path) -> None:
    text = CONFIG.replace(
        "egress_gbps = 100",
        "egress_gbps = 100\nrtt_ms = 20\nshare_of_others = 0.5\nschedule = [[10, 4]]",
    )
    file.write_text(text)
    link = run_of(read_config(file)).scenario.link
    assert link is not None
    assert link.schedule == ((0.0, 50e9), (10.0, 2e9))
    assert link.rtt_s == 0.02
    file.write_text(text.replace("[[10, 4]]", "[[0, 4], [9, 8]]"))
    link = run_of(read_config(file)).scenario.link
    assert link is not None
    assert link.schedule == ((0.0, 2e9), (9.0, 4e9))


def test_an_adaptive_threshold_moves(file: Path) -> None:
    made = run_of(edited(file, threshold="adaptive", requests=300, rate_rps=3.0))
    seen = {decision.threshold_tokens for decision in made.start().decisions}
    assert len(seen) > 1
    fixed = run_of(edited(file, threshold=4000, requests=50))
    assert {decision.threshold_tokens for decision in fixed.start().decisions} == {4000}


def test_clients_saturate_the_clusters(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(CONFIG.replace("requests = 80", "requests = 300\nclients = 60"))
    assert main(["simulate", str(file), "--json"]) == 0
    saturated = json.loads(capsys.readouterr().out)["served_rps"]
    assert saturated > 1.4


def test_a_rate_is_needed_and_so_are_arrivals(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(CONFIG.replace("rate_rps = 1.0", ""))
    assert main(["simulate", str(file)]) == 2
    assert "workload.rate_rps is missing" in capsys.readouterr().err
    file.write_text(CONFIG.replace("requests = 80", "duration_s = 1e-9"))
    assert main(["simulate", str(file)]) == 2
    assert "no request arrives within duration_s" in capsys.readouterr().err


def test_overrides_leave_the_rest_alone(file: Path) -> None:
    config = read_config(file)
    assert with_overrides(config) == config
    assert with_overrides(config, seed=3).simulate.requests == 80


def test_the_first_difference_names_every_field(file: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert main(["simulate", str(file), "--log", str(log), "--json"]) == 0
    with open_log(log) as opened:
        decisions = list(opened.decisions)
    assert first_difference(decisions, decisions) is None
    other = attrs.evolve(decisions[3], decode_node=NodeId("x"), threshold_tokens=1)
    text = first_difference(decisions, [*decisions[:3], other, *decisions[4:]])
    assert text is not None
    assert "decision 4" in text
    assert "decode_node was" in text
    assert "threshold_tokens was" in text
    assert first_difference(decisions, decisions[:-1]) == "decision 80 is only in the log"
