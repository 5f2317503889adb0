"""Pictures of a plan: the rate against the threshold and against the roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.capacity import FormPlan, ThresholdPoint
from prfaas.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REMOTE, _LOCAL, _DECODE, _RATE = "tab:blue", "tab:orange", "tab:green", "black"


def draw_plan(form: FormPlan, path: Path) -> None:
    """Write a PNG with two panels: rate against t, and rate against N_p.

    Raises:
        MissingExtra: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(package="matplotlib", extra="cli") from error
    # A figure of its own instead of pyplot: no global state and no window system.
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_thresholds(left, form)
    _draw_splits(right, form)
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _draw_thresholds(axes: Axes, form: FormPlan) -> None:
    points, best = form.by_threshold, form.best
    top = 1.6 * max(point.requests_per_s for point in points)
    curves: tuple[tuple[str, str, Callable[[ThresholdPoint], float | None]], ...] = (
        ("remote prefill and link", _REMOTE, lambda point: point.prfaas_rps),
        ("local prefill", _LOCAL, lambda point: point.prefill_rps),
        ("decode", _DECODE, lambda point: point.decode_rps),
    )
    for label, color, value in curves:
        known = [(point.threshold_tokens, value(point)) for point in points]
        _line(axes, [(t, rate) for t, rate in known if rate is not None], label, color, 1.5)
    _line(axes, [(p.threshold_tokens, p.requests_per_s) for p in points], "the rate", _RATE, 2.5)
    if best.threshold_tokens is not None:
        axes.plot([best.threshold_tokens], [best.requests_per_s], "o", color=_RATE)
        axes.annotate(
            f"t = {best.threshold_tokens:,.0f}\n{best.requests_per_s:.2f} req/s",
            (best.threshold_tokens, best.requests_per_s),
            textcoords="offset points",
            xytext=(26, -8),
        )
    axes.set_ylim(0, top or 1)
    axes.set_xlabel("threshold t, uncached tokens")
    axes.set_ylabel(f"requests per second, {form.form.value} form")
    axes.set_title(
        f"Rate against the threshold, N_p = {best.num_prefill:g}, N_d = {best.num_decode:g}"
    )
    axes.legend(loc="center right")


def _draw_splits(axes: Axes, form: FormPlan) -> None:
    clusters = dict.fromkeys(point.cluster_id for point in form.by_split)
    for cluster_id in clusters:
        points = [point for point in form.by_split if point.cluster_id == cluster_id]
        _line(
            axes,
            [(point.num_prefill, point.requests_per_s) for point in points],
            cluster_id,
            None,
            1.5,
            marker="o",
        )
        highest = max(points, key=lambda point: point.requests_per_s)
        axes.annotate(
            f"{highest.requests_per_s:.2f} req/s",
            (highest.num_prefill, highest.requests_per_s),
            textcoords="offset points",
            xytext=(0, 6),
            ha="center",
        )
    axes.set_ylim(0, 1.15 * max((p.requests_per_s for p in form.by_split), default=1.0) or 1)
    axes.set_xlabel("local prefill instances N_p, threshold chosen anew for each")
    axes.set_ylabel("requests per second")
    axes.set_title("Rate against the roles")
    axes.legend()


def _line(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    label: str,
    color: str | None,
    width: float,
    marker: str | None = None,
) -> None:
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        label=label,
        color=color,
        linewidth=width,
        marker=marker,
    )
