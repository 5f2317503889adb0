"""The picture of a run: the link and the threshold over time, TTFT by phase, bytes per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from cluster.report import DASH, Row, Totals, format_count, format_size

Series = Mapping[str, Sequence[tuple[float, float | None]]]
"""Points over time in seconds, on the clock of a row's ``arrived_s``: threshold (tokens),
link_true, link_estimate and egress (bps)."""

LOCAL, REMOTE, INK, PALE = "#e08a2e", "#2b6cb0", "#2d3339", "#b9c0c8"
PHASES = (  # label, key of the row, colour, after the first token
    ("queue", "queue_s", PALE, False),
    ("prefill", "prefill_s", REMOTE, False),
    ("transfer", "transfer_s", "#63b3a4", True),
    ("decode wait", "decode_wait_s", LOCAL, True),
)
STYLE = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": "#6b747d",
    "axes.edgecolor": "#9aa3ad",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#e3e6ea",
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
}


def plot(path: str | Path, rows: Sequence[Row], totals: Totals, series: Series) -> None:
    """Write a PNG of four panels; what was not measured is left out."""
    with rc_context(STYLE):
        tall = max(4.0, 1.2 + 0.17 * len(rows))
        figure = Figure(figsize=(13, 4.2 + tall), dpi=130, layout="constrained")
        panels = figure.subplots(2, 2, height_ratios=[4.0, tall])
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
        same = f"{totals.get('identical') or 0}/{totals.get('total') or 0} outputs identical"
        title = f"Prefill in one cluster, decode in another: {totals.get('model') or DASH}, {same}"
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.012, ha="left")
        _plot_link(panels[0][0], series)
        _plot_threshold(panels[0][1], rows, series)
        _plot_phases(panels[1][0], rows)
        _plot_bytes(panels[1][1], rows)
        figure.savefig(path)


def _plot_link(axes: Axes, series: Series) -> None:
    axes.set(xlabel="seconds", ylabel="Mbit/s")
    egress = _points(series, "egress", 1e-6)
    if egress:
        times, rates = zip(*egress, strict=True)
        axes.fill_between(times, rates, step="post", color=REMOTE, alpha=0.25, linewidth=0)
        axes.step(times, rates, where="post", color=REMOTE, linewidth=0.8, label="egress")
    _step(axes, _points(series, "link_true", 1e-6), _end_s(series), "capacity", color=INK)
    estimate = _points(series, "link_estimate", 1e-6)
    _step(axes, estimate, _end_s(series), "estimate", color=LOCAL, dashes=(4, 1.5))
    axes.margins(x=0.01)
    axes.grid(axis="y")
    _finish(axes, "The link between the clusters")


def _plot_threshold(axes: Axes, rows: Sequence[Row], series: Series) -> None:
    axes.set(xlabel="seconds", ylabel="tokens", yscale="log")
    _step(axes, _points(series, "threshold"), _end_s(series), "threshold t", color=INK)
    for remote, colour, label in ((True, REMOTE, "offloaded"), (False, LOCAL, "prefilled locally")):
        dots = [
            (row["arrived_s"], max(1, tokens))
            for row in rows
            if bool(row.get("offloaded")) is remote
            and row.get("arrived_s") is not None
            and (tokens := _uncached_tokens(row)) is not None
        ]
        if dots:
            axes.scatter(
                *zip(*dots, strict=True), s=40, color=colour, ec="white", label=label, zorder=3
            )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y")
    _finish(axes, "Uncached tokens against the threshold")


def _plot_phases(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set(xlabel="seconds from arrival; hatched: after the first token; blue names: offloaded")
    lines, left = range(len(rows)), [0.0] * len(rows)
    for label, key, colour, after in PHASES if rows else ():
        lengths = [row.get(key) or 0.0 for row in rows]
        axes.barh(
            lines,
            lengths,
            left=left,
            height=0.72,
            color=colour,
            alpha=0.75 if after else 1.0,
            hatch="////" if after else None,
            edgecolor="white",
            linewidth=0,
            label=label,
        )
        left = [a + b for a, b in zip(left, lengths, strict=True)]
    _name_lines(axes, [str(row.get("request_id", DASH)) for row in rows])
    for name, row in zip(axes.get_yticklabels(), rows, strict=True):
        name.set_color(REMOTE if row.get("offloaded") else INK)
    _finish(axes, "Time to first token by phase")


def _plot_bytes(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set(xlabel="bytes of one request, log scale; in brackets its tokens", xscale="log")
    shipped = [
        row
        for row in rows
        if row.get("offloaded") and row.get("received_bytes") and row.get("dense_bytes")
    ]
    lines = range(len(shipped))
    hybrid = [row["received_bytes"] for row in shipped]
    dense = [row["dense_bytes"] for row in shipped]
    if shipped:
        axes.hlines(lines, hybrid, dense, color=PALE, linewidth=2.5, zorder=1)
        axes.scatter(hybrid, lines, s=44, color=REMOTE, label="shipped")
        axes.scatter(
            dense,
            lines,
            s=44,
            color="white",
            ec=INK,
            lw=1.4,
            label="with full attention everywhere",
        )
    for line, (few, many) in enumerate(zip(hybrid, dense, strict=True)):
        place = {"xytext": (9, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{many / few:.1f}x", (max(few, many), line), **place)
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: format_size(value).replace(".0 ", " "))
    axes.xaxis.set_minor_formatter(NullFormatter())
    _name_lines(axes, [f"{r['request_id']} ({format_count(r.get('num_tokens'))})" for r in shipped])
    _finish(axes, "Bytes shipped per offloaded request", "no request was offloaded")


def _name_lines(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(max(1, len(names)) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _finish(axes: Axes, title: str, without_data: str = "no measurement") -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=22)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=4,
            handlelength=1.6,
            borderpad=0.2,
            borderaxespad=0.2,
            columnspacing=1.4,
        )
    else:
        axes.set(xticks=[], yticks=[], xlabel="", ylabel="")
        axes.minorticks_off()
        axes.text(0.5, 0.5, without_data, ha="center", va="center", transform=axes.transAxes)


def _step(
    axes: Axes, points: Sequence[tuple[float, float]], end_s: float, label: str, **style: object
) -> None:
    """A level that holds until the next point, the last one until the end."""
    if points:
        times, levels = zip(*points, (end_s, points[-1][1]), strict=True)
        axes.step(times, levels, where="post", linewidth=1.8, label=label, **style)


def _points(series: Series, name: str, scale: float = 1.0) -> list[tuple[float, float]]:
    return [(t_s, value * scale) for t_s, value in series.get(name) or () if value is not None]


def _end_s(series: Series) -> float:
    return max((t_s for points in series.values() for t_s, _ in points), default=0.0)


def _uncached_tokens(row: Row) -> int | None:
    """What the router compared with the threshold."""
    if row.get("routed_tokens") is not None:
        return int(row["routed_tokens"])
    num_tokens = row.get("num_tokens")
    return None if num_tokens is None else int(num_tokens) - int(row.get("cached_tokens") or 0)
