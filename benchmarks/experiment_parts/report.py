"""docs/experiments.md and its pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiment_parts import charts, goals, ladder, prose, scenarios
from experiment_parts.cache_gain import SLO_S, best_of
from experiment_parts.deployments import HETERO, SPEC, optimum
from experiment_parts.findings import Findings
from experiment_parts.measures import first_tokens_s
from experiment_parts.policies import POLICIES
from experiment_parts.runs import Outcome, Task
from experiment_parts.workloads import length_factor

DROP_POLICIES = ("fixed", "adaptive", "max_weight", "balancer", "max_weight_balancer")
CDF_POLICIES = ("homogeneous_cost", "naive", "fixed", "adaptive", "abundant", "max_weight")
DAY_POLICIES = ("homogeneous_cost", "static", "balancer", "max_weight_balancer")


def write(folder: Path, found: Findings, path: str | None) -> None:
    """Writes the page and the pictures."""
    pictures = folder / "experiments"
    pictures.mkdir(parents=True, exist_ok=True)
    references = {
        "best t, 1.77": goals.T_ONLY_RPS,
        "best t and roles, 2.25": goals.FULL_RPS,
    }
    drop = {
        name: goals.closed_link_drop(
            POLICIES[name], drop_s=600.0, from_s=600.0, for_s=1200.0, back_s=900.0
        )
        for name in DROP_POLICIES
    }
    charts.link_drop(pictures / "link_drop.png", drop, references, 600.0)
    charts.ladder(pictures / "ladder.png", found.ladder)
    charts.first_tokens(
        pictures / "trace_ttft.png",
        _cdfs(path),
        f"{found.trace_name} at {ladder.TRACE_LOAD:g} of each deployment's own limit",
    )
    day = {name: Task(scenario="diurnal", policy=name).run() for name in DAY_POLICIES}
    end_s = next(iter(day.values())).setup.window.until_s
    factor = [(at, length_factor(at, end_s)) for at in range(0, int(end_s) + 1, 60)]
    charts.day(pictures / "day.png", day, factor)
    (folder / "experiments.md").write_text(_page(found, path, drop))


def _cdfs(path: str | None) -> dict[str, Sequence[float]]:
    series: dict[str, Sequence[float]] = {}
    for name in CDF_POLICIES:
        options = {"path": path, "load": ladder.TRACE_LOAD}
        outcome = Task(scenario="trace", policy=name, options=options).run()
        series[POLICIES[name].title] = first_tokens_s(outcome.result, outcome.setup.window)
    return series


def _page(found: Findings, path: str | None, drop: Mapping[str, Outcome]) -> str:
    parts = [
        prose.HEAD.format(
            command="python benchmarks/experiments.py --report docs"
            + (" --trace PATH" if path else ""),
            trace=found.trace_name,
            limit=optimum(HETERO).limit_rps,
            timeout=scenarios.TIMEOUT_S,
            waiting=scenarios.MAX_WAITING,
            clients=scenarios.NUM_CLIENTS,
            link_clients=goals.LINK_CLIENTS,
            model=SPEC.name,
        ),
        "## Goals\n",
        _goals(found),
        prose.GOALS,
        "## The ladder\n",
        "![ladder](experiments/ladder.png)\n",
        prose.LADDER,
        _noise(found),
        *(_scenario(found, *case) for case in _cases(found)),
        "## The link falls to 5 Gbps, at saturation\n",
        "![link drop](experiments/link_drop.png)\n",
        prose.LINK,
        _link(drop),
        "## A day of lengths\n",
        "![day](experiments/day.png)\n",
        prose.DAY,
        f"## Caches: {found.trace_name}\n",
        "![TTFT](experiments/trace_ttft.png)\n",
        prose.CACHES,
        _caches(found),
        "## Half a node\n",
        prose.FRACTIONS,
        _fractions(found),
        "## Runs behind the goals\n",
        _runs(found),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats with three digits."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if not isinstance(value, float):
        return str(value)
    if math.isinf(value):
        return "none"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


def _goals(found: Findings) -> str:
    rows = [
        (
            goal.name,
            f"{goal.value:.3f}",
            f"{'<=' if goal.at_most else '>='} {goal.goal:g}",
            "met" if goal.is_met else "**not met**",
            goal.note,
        )
        for goal in found.goals()
    ]
    references = ", ".join(f"{k} {v:.3f}" for k, v in goals.link_references().items())
    return (
        table(("goal", "measured", "asked", "", "beside it"), rows)
        + f"\nThe capacity model at 5 Gbps (req/s): {references}.\n"
    )


def _noise(found: Findings) -> str:
    rows = [
        (POLICIES[name].title, key, mean, f"{deviation:.3f}")
        for name, key, mean, deviation in ladder.spread(found.noise)
    ]
    title = "Noise: 0.9 of the limit, four seeds\n\n"
    return title + table(("policy", "measure", "mean", "standard deviation"), rows)


def _cases(found: Findings) -> list[tuple[str, float | None]]:
    return list(dict.fromkeys((r["scenario"], r["load"]) for r in found.ladder))


_COLUMNS = {
    "N_p": "num_prefill",
    "offered": "offered_rps",
    "served": "throughput_rps",
    "good 10 s": "goodput_10s_rps",
    "good 30 s": "goodput_30s_rps",
    "cost 10 s": "cost_10s",
    "cost 30 s": "cost_30s",
    "mean": "ttft_mean_s",
    "P50": "ttft_p50_s",
    "P90": "ttft_p90_s",
    "P99": "ttft_p99_s",
}
_PHASES = ("queue_s", "prefill_s", "transfer_s", "decode_wait_s")


def _scenario(found: Findings, name: str, load: float | None) -> str:
    header = (
        "policy",
        *_COLUMNS,
        "queue / prefill / transfer / slot",
        "Gbps mean / peak",
        "conversions",
        "rejected / timed out / failed / lost",
    )
    rows = []
    for r in found.ladder:
        if (r["scenario"], r["load"]) != (name, load):
            continue
        phases = " / ".join(_cell(r[phase]) for phase in _PHASES)
        egress = f"{r['egress_mean_gbps']:.1f} / {r['egress_peak_gbps']:.1f}"
        endings = " / ".join(str(r[k]) for k in ("rejected", "timed_out", "failed", "lost"))
        values = (r[key] for key in _COLUMNS.values())
        rows.append(
            (POLICIES[r["policy"]].title, *values, phases, egress, r["conversions"], endings)
        )
    title = name if load is None else f"{name}, {load:g} of the own limit"
    return f"### {title}\n\n{prose.SCENARIOS[name]}\n\n" + table(header, rows)


def _link(drop: Mapping[str, Outcome]) -> str:
    rows = []
    for name, outcome in drop.items():
        result, window = outcome.result, outcome.setup.window
        spans = (
            (300.0, 600.0),
            (660.0, 1200.0),
            (window.from_s, window.until_s),
            (window.until_s + 300.0, result.duration_s),
        )
        changes = len(result.conversions)
        rates = (result.throughput_rps(*span) for span in spans)
        rows.append((POLICIES[name].title, *rates, changes))
    header = ("policy", "before", "1-10 min after", "10-30 min after", "5 min after it is back")
    return table((*header, "changes of role"), rows)


def _caches(found: Findings) -> str:
    best = found.best_arms
    rows = [
        (b.arm, b.goodput_rps, b.rate_rps, b.num_prefill, b.threshold_tokens) for b in best.values()
    ]
    text = table(
        ("routing", f"good req/s within {SLO_S} s", "at offered req/s", "N_p", "fixed t"), rows
    )
    text += "\nThe same for every N_p and rate (good req/s):\n\n"
    splits = sorted({task.options["num_prefill"] for _, task in found.arms})
    rates = sorted({task.options["rate_rps"] for _, task in found.arms})
    lines = []
    for num_prefill in splits:
        for rate_rps in rates:
            at = best_of(found.arms, found.cache_rows, num_prefill=num_prefill, rate_rps=rate_rps)
            lines.append((num_prefill, rate_rps, *(b.goodput_rps for b in at.values())))
    return text + table(("N_p", "offered", *best), lines)


def _fractions(found: Findings) -> str:
    names = {"hetero": HETERO.name, "homogeneous": "12 H20", "homogeneous_cost": "16 H20"}
    gains = {name: found.fractional_gain(name) for name in names}
    ways = list(gains["hetero"])
    rows = [
        (names[name], *(f"{mine[way]:.3f}" if way in mine else "-" for way in ways))
        for name, mine in gains.items()
    ]
    return table(("hardware", *ways), rows)


def _runs(found: Findings) -> str:
    keys = (
        "goal",
        "run",
        "throughput_rps",
        "conversions",
        "slices",
        "rolled_back",
        "timed_out",
        "lost",
        "token_ms",
    )
    rows: list[list[Any]] = [[r.get(key) for key in keys] for r in found.goal_rows]
    return table(keys, rows)
