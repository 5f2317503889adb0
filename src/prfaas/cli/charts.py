"""Figures 5a and 5b and Table 3 of arXiv 2604.15039 as charts: ours as lines, theirs as markers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prfaas.capacity import kv_throughput_bps
from prfaas.errors import MissingExtra
from prfaas.paper import implied_profile
from prfaas.paper.curves import local_split_sweep, threshold_sweep
from prfaas.paper.tables import CLAIMS, LENGTHS_PRINTED, MODELS, TABLE_3, TABLE_6
from prfaas.spec import preset

_SIZE_INCHES = (6.4, 4.2)
_DPI = 150
_BLUE, _ORANGE, _GREEN, _GREY = "#1f6fb4", "#d9822b", "#2a9d6f", "#8a8f98"
_LABEL_SHIFT_POINTS = {"kimi-linear-48b": 5, "mimo-v2-flash": -6}  # they end at one height
_MARKER = {"color": "black", "marker": "o", "linestyle": "none", "zorder": 5}


def write_charts(folder: Path) -> list[Path]:
    """Write ``fig5a.png``, ``fig5b.png`` and ``table3.png``; create the folder if it is missing.

    Raises:
        MissingExtra: matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(package="matplotlib", extra="cli") from error
    folder.mkdir(parents=True, exist_ok=True)
    charts: dict[str, Callable[[Any], None]] = {
        "fig5a": _draw_splits,
        "fig5b": _draw_thresholds,
        "table3": _draw_table_3,
    }
    written = []
    for name, draw in charts.items():
        figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        draw(axes)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1])
    return written


def _draw_splits(axes: Any) -> None:
    points = local_split_sweep()
    nums = [point.num_prefill for point in points]
    fixed = [point.at_published_threshold_rps for point in points]
    column = TABLE_6["PrfaaS-PD"]
    axes.plot(nums, [point.best_rps for point in points], color=_BLUE, label="ours, best t")
    axes.plot(nums, fixed, color=_ORANGE, linestyle="--", label="ours, t = 19.4K")
    if column.num_prefill is not None:
        at = column.num_prefill.value
        axes.plot(at, column.max_rate_rps.value, label="published optimum", **_MARKER)
    axes.set(
        title="Figure 5a: splits of the 8 local instances",
        xlabel="local prefill instances $N_p$  ($N_d = 8 - N_p$)",
        ylabel="maximum rate $\\Lambda_{max}$ (requests/s)",
        ylim=(0, 4),
    )
    axes.legend(frameon=False)


def _draw_thresholds(axes: Any) -> None:
    points = threshold_sweep(range(2_000, 60_001, 500))
    thousands = [point.threshold_tokens / 1000 for point in points]
    stages = (
        ("PrfaaS bound, its share $p$", "prfaas_rps", _BLUE),
        ("local prefill bound, share $1 - p$", "prefill_rps", _ORANGE),
        ("decode bound", "decode_rps", _GREY),
    )
    for label, field, color in stages:
        rates = [getattr(point, field) for point in points]
        axes.plot(thousands, rates, color=color, linestyle="--", linewidth=1.2, label=label)
    maxima = [point.requests_per_s for point in points]
    axes.plot(thousands, maxima, color=_GREEN, linewidth=2.4, label="ours, $\\Lambda_{max}$")
    peak = CLAIMS["threshold"].value, TABLE_6["PrfaaS-PD"].max_rate_rps.value
    axes.plot(*peak, label="published optimum", **_MARKER)
    axes.set(
        title="Figure 5b: routing thresholds at $N_p = 3$",
        xlabel="threshold t (1000 tokens)",
        ylabel="rate (requests/s)",
        xlim=(0, 60),
        ylim=(0, 6),
    )
    axes.legend(frameon=False, fontsize="small", loc="center right", bbox_to_anchor=(1, 0.5))


def _draw_table_3(axes: Any) -> None:
    tokens = list(LENGTHS_PRINTED.values())
    ratio = tokens[-1] / tokens[0]
    between = [tokens[0] * ratio ** (i / 60) for i in range(61)]
    colors = (_BLUE, _GREEN, _ORANGE, _GREY, "#a23b72", "#6c4fb3")
    for (name, title), color in zip(MODELS.items(), colors, strict=True):
        model, profile = preset(name), implied_profile(name)
        rates = [kv_throughput_bps(model, profile, round(n)) / 1e9 for n in between]
        markers = [value.value for value in TABLE_3[name].values()]
        axes.plot(between, rates, color=color)
        axes.plot(tokens, markers, color=color, marker="o", linestyle="none")
        axes.annotate(
            title,
            (tokens[-1], markers[-1]),
            xytext=(8, _LABEL_SHIFT_POINTS.get(name, 0)),
            textcoords="offset points",
            color=color,
            fontsize="small",
            va="center",
            annotation_clip=False,
        )
    axes.set(
        title="Table 3: KV throughput of 8 H200\n"
        "markers: published; lines: our sizes over the times implied",
        xlabel="prompt length (tokens)",
        ylabel="KV throughput (Gbps)",
        xscale="log",
        yscale="log",
    )
    axes.set_xticks(tokens, list(LENGTHS_PRINTED))
    axes.minorticks_off()
    axes.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
