"""The study's plots."""

from __future__ import annotations

from pathlib import Path

from _study_report import chips, short_name
from _study_results import LINKS_GBPS, WORTH, Results


def draw(found: Results, folder: Path) -> None:
    """Write gain_by_link.png and prices.png."""
    folder.mkdir(parents=True, exist_ok=True)
    _gain_by_link(found, folder / "gain_by_link.png")
    _prices(found, folder / "prices.png")


def _gain_by_link(found: Results, file: Path) -> None:
    from matplotlib.figure import Figure

    paying = [row for row in found.rows if row.peak.gain >= WORTH]
    models = list(dict.fromkeys(row.pair.dear.model for row in paying))
    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True).flat
    for axes, model in zip(panels, models, strict=False):
        for i, row in enumerate(row for row in paying if row.pair.dear.model == model):
            who = "dear" if row.dear_prefills else "cheap"
            weights = short_name(row.pair).rpartition(" ")[2]
            label = f"{chips(row.pair)} {weights} at {row.peak.price:.1f}, {who} prefills"
            axes.plot(LINKS_GBPS, row.by_link, marker="os^vDPX*<>"[i], ms=4, lw=1, label=label)
        axes.axhline(WORTH, color="grey", lw=0.8)
        axes.set(xscale="log", title=model, ylim=(0.8, 2.0))
        axes.set_xticks(LINKS_GBPS, [str(gbps) for gbps in LINKS_GBPS])
        axes.minorticks_off()
        axes.legend(fontsize=7, loc="upper left")
    figure.supxlabel("link of a fleet that costs 16 instances of the cheap system, Gbit/s")
    figure.supylabel("rate over the better homogeneous fleet")
    figure.savefig(file, dpi=100)


def _prices(found: Results, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    axes = figure.subplots()
    shown = list(reversed(found.rows))
    for y, row in enumerate(shown):
        if row.window:
            low, high = row.window
            colour = "tab:blue" if row.dear_prefills else "tab:orange"
            axes.plot([low, max(high, low * 1.01)], [y, y], color=colour, lw=6)
        gain = f"{row.peak.gain:.2f}" if row.window else "-"
        axes.text(24, y, gain, va="center", ha="center", fontsize=8)
        axes.plot(row.prefill_speed, y, "k|", ms=9)
        axes.plot(row.decode_speed, y, "kx", ms=5)
    axes.set_yticks(range(len(shown)), [f"{short_name(r.pair)}: {chips(r.pair)}" for r in shown])
    axes.tick_params(axis="y", labelsize=8)
    axes.set(
        xscale="log",
        xlim=(0.55, 28),
        xlabel="price of a dear GPU over a cheap one; right: the most that is gained",
        title="Prices at which prefill apart gains 5 %, 100 Gbit/s\n"
        "orange: cheap chip prefills; blue: dear chip prefills; | prefill speed, x decode speed",
    )
    axes.set_xticks([1, 2, 3, 4, 6, 10, 20], ["1", "2", "3", "4", "6", "10", "20"])
    axes.minorticks_off()
    axes.axvspan(1, 6, color="grey", alpha=0.08)
    figure.savefig(file, dpi=110)
