"""The pictures of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiment_parts.measures import quantile, throughput_series
from experiment_parts.policies import POLICIES
from experiment_parts.runs import Outcome

COLORS = ("#8a8f98", "#1f6fb4", "#d9822b", "#2a9d6f", "#a23b72", "#6c4fb3")
PIECE_S = 60.0
_DPI = 130


def _figure(height: float, rows: int = 1, columns: int = 1, **shared: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, height), dpi=_DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def link_drop(
    path: Path, runs: Mapping[str, Outcome], references: Mapping[str, float], drop_s: float
) -> None:
    """Throughput, t, backlog and N_p over time."""
    figure, axes = _figure(8.6, 4, sharex=True)
    rates, thresholds, backlogs, roles = axes[:, 0]
    end_s = max(outcome.result.duration_s for outcome in runs.values())
    back_s = next(iter(runs.values())).setup.window.until_s
    for (name, outcome), color in zip(runs.items(), COLORS, strict=False):
        series = throughput_series(outcome.result, PIECE_S, end_s)[:-1]
        title = POLICIES[name].title
        rates.plot(*zip(*series, strict=True), color=color, linewidth=1.6, label=title)
        at = [s.at_s for s in outcome.samples]
        backlog = [s.backlog_bytes / 2**30 for s in outcome.samples]
        if POLICIES[name].router == "threshold":
            tokens = [s.threshold_tokens / 1000 for s in outcome.samples]
            thresholds.plot(at, tokens, color=color, linewidth=1.2)
        backlogs.plot(at, backlog, color=color, linewidth=1.0)
        roles.step(at, [s.num_prefill for s in outcome.samples], where="post", color=color)
    for label, rps in references.items():
        rates.hlines(rps, drop_s, back_s, color="black", linestyle=":", linewidth=1.0)
        rates.annotate(
            label,
            (drop_s, rps),
            xytext=(-4, 0),
            textcoords="offset points",
            va="center",
            ha="right",
            fontsize="small",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    for one in (rates, thresholds, backlogs, roles):
        one.axvspan(drop_s, back_s, color="black", alpha=0.04)
    rates.set(ylabel="served (req/s)", ylim=(0, 5.2), title="Saturated; 5 of 100 Gbps while shaded")
    rates.legend(frameon=False, fontsize="small", ncols=2, loc="upper center")
    thresholds.set(ylabel="t (1000 tokens)", ylim=(0, None))
    backlogs.set(ylabel="link backlog (GiB)", ylim=(0, None))
    roles.set(ylabel="planned $N_p$", xlabel="simulated seconds", ylim=(0, 8))
    figure.savefig(path)


def ladder(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Saturation throughput, and what 1000 good requests cost at 0.9 of the own limit."""
    figure, axes = _figure(4.6, 1, 2, sharey=True)
    left, right = axes[0]
    names = list(POLICIES)[::-1]
    saturated = {r["policy"]: r for r in rows if r["scenario"] == "saturated"}
    loaded = {r["policy"]: r for r in rows if r["scenario"] == "steady" and r["load"] == 0.9}
    panels = (
        (left, saturated, "throughput_rps", "served at saturation (req/s)", "{:.2f}"),
        (right, loaded, "cost_10s", "H20-instance hours per 1000 requests\nwithin 10 s", "{:.2f}"),
    )
    for axis, source, key, label, form in panels:
        values = [source[name][key] for name in names]
        colors = [COLORS[0] if name.startswith("homogeneous") else COLORS[1] for name in names]
        bars = axis.barh([POLICIES[name].title for name in names], values, color=colors)
        axis.bar_label(bars, [form.format(v) for v in values], padding=3, fontsize="small")
        axis.set(xlabel=label, xlim=(0, 1.18 * max(values)))
        axis.grid(visible=False, axis="y")
    left.tick_params(axis="y", labelsize="small")
    figure.savefig(path)


def first_tokens(path: Path, series: Mapping[str, Sequence[float]], title: str) -> None:
    """CDF of the seconds until decoding began."""
    figure, axes = _figure(4.4)
    axis = axes[0, 0]
    shares = [i / 400 for i in range(400)]
    for (name, values), color in zip(series.items(), COLORS, strict=False):
        axis.plot([quantile(values, s) for s in shares], shares, color=color, label=name)
    for slo_s in (10, 30):
        axis.axvline(slo_s, color="black", linestyle=":", linewidth=0.9)
    axis.set(xscale="log", xlabel="seconds until decoding began", ylabel="share of requests")
    axis.set(title=title, xlim=(0.3, 200), ylim=(0, 1))
    axis.set_xticks([0.5, 1, 2, 5, 10, 30, 100], ["0.5", "1", "2", "5", "10", "30", "100"])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize="small", loc="lower right")
    figure.savefig(path)


def day(path: Path, runs: Mapping[str, Outcome], factor: Sequence[tuple[float, float]]) -> None:
    """N_p and throughput over a day of lengths."""
    figure, axes = _figure(5.4, 3, sharex=True)
    lengths, roles, rates = axes[:, 0]
    lengths.plot(*zip(*factor, strict=True), color="black")
    for (name, outcome), color in zip(runs.items(), COLORS, strict=False):
        at = [s.at_s for s in outcome.samples]
        roles.step(at, [s.num_prefill for s in outcome.samples], where="post", color=color)
        series = throughput_series(outcome.result, 120.0, factor[-1][0])
        rates.plot(*zip(*series, strict=True), color=color, label=POLICIES[name].title)
    lengths.set(ylabel="length factor", ylim=(0, 2.2))
    roles.set(ylabel="planned $N_p$", ylim=(0, 8))
    rates.set(ylabel="served (req/s)", xlabel="simulated seconds", ylim=(0, None))
    rates.legend(frameon=False, fontsize="small")
    figure.savefig(path)
