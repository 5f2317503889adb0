"""What the demo shows of a run, checked on made-up runs and on runs that measured nothing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from rich.console import Console

from cluster.report import PHASES, Progress, format_size, print_report


def row(number: int, *, offloaded: bool, **changes: Any) -> dict[str, Any]:
    return {
        "request_id": f"document-{number}",
        "kind": "document",
        "num_tokens": 8196,
        "reason": "long" if offloaded else "short",
        "offloaded": offloaded,
        "attempts": 1,
        "cached_tokens": 0,
        "prefilled_tokens": 8196,
        "routed_tokens": 8196,
        "arrived_s": float(number),
        "received_bytes": 4_400_000,
        "expected_bytes": 4_400_000,
        "dense_bytes": 17_600_000,
        "decode_prefilled_tokens": 1,
        "queue_s": 0.25,
        "prefill_s": 1.5,
        "transfer_s": 0.125,
        "decode_wait_s": 0.0625,
        "ttft_s": 1.75,
        "total_s": 3.5,
        "identical": True,
        "max_logit_diff": 0.0,
        **changes,
    }


ROWS = [row(number, offloaded=number % 2 == 0) for number in range(1, 15)]
TOTALS = {
    "identical": 14,
    "total": 14,
    "max_logit_diff": 3.1e-7,
    "offloaded": 7,
    "decode_prefilled_tokens": 7,
    "shipped_bytes": 31_200_000,
    "dense_bytes": 124_800_000,
    "egress_bps": 50e6,
    "link_bps_true": 200e6,
    "link_bps_estimated": 190e6,
    "threshold_tokens": 1024,
    "leaked_blocks": 0,
    "wall_s": 42.0,
    "model": "pocket",
}
SAMPLES = [{"request_id": "document-2", "prompt": "[b]Q?\n", "text": b"a [red]class\x00 \xc3\xa9"}]
SERIES = {
    "link_true": [(0.0, 200e6), (10.0, 100e6)],
    "link_estimate": [(0.0, None), (2.0, 195e6), (12.0, 101e6)],
    "egress": [(t / 10, (t % 7) * 3e7) for t in range(150)],
    "threshold": [(0.0, None), (2.0, 900), (12.0, 1240)],
}


def printed(
    rows: list[dict[str, Any]],
    totals: dict[str, Any],
    samples: list[dict[str, Any]] = SAMPLES,
    width: int = 120,
) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_report(rows, totals, samples, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_table_at_120_columns_shows_the_split_and_the_bytes() -> None:
    lines = printed(ROWS, TOTALS)
    header = " ".join(lines[:3])
    for word in ("cached", "pected", "decode", "queue", "prefill", "TTFT", "trans-", "wait"):
        assert word in header
    (line,) = (line for line in lines if "document-2 " in line and "remote" in line)
    cells = line.split()
    assert cells[:3] == ["document-2", "remote,", "long"]
    assert cells[3:6] == ["8,196", "0", "1"]
    assert cells[6:10] == ["4.4", "MB", "4.4", "MB"]
    assert cells[10:] == ["0.25", "1.50", "1.75", "0.12", "0.06", "3.50", "yes"]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_line_is_cut_or_wrapped_in_the_table(width: int) -> None:
    lines = printed(ROWS, TOTALS, [], width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    requests = [line.split() for line in lines if line.strip().startswith("document-")]
    assert len(requests) == len(ROWS)
    assert all(line[-1] == "yes" for line in requests)


def test_totals_are_words() -> None:
    text = " ".join(" ".join(printed(ROWS, TOTALS)).split())
    assert "7 of 14 requests (50%)" in text
    assert "the decode side had to prefill 7 tokens" in text
    assert (
        "31.2 MB over the link; the same model with full attention everywhere: 125 MB (4.0x)"
    ) in text
    assert "estimated 190.0 Mbit/s (-5.0%); used on average 50.0 Mbit/s (25% of it)" in text
    assert "1,024 at the end" in text
    assert "largest difference at any step 3.1e-07" in text


def test_a_difference_and_a_retry_are_named() -> None:
    rows = [row(1, offloaded=True, identical=False, attempts=2, reason="local_down")]
    lines = printed(rows, {**TOTALS, "identical": 0, "total": 1})
    assert any(
        "remote, local down (2 tries)" in line and line.split()[-1] == "NO" for line in lines
    )
    assert any("1 of 1 requests needed more than one attempt" in line for line in lines)
    assert lines[-1] == "identical outputs: 0/1"


def test_samples_are_printable_and_not_markup() -> None:
    (line,) = (line for line in printed(ROWS, TOTALS) if line.startswith("document-2: "))
    assert line == "document-2: ...[b]Q?\\na [red]class\\x00 é"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_last_line_is_the_verdict(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal)
    print_report(ROWS, TOTALS, SAMPLES, console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().endswith("\nidentical outputs: 14/14\n")


UNMEASURED: list[list[dict[str, Any]]] = [[], [{}], [dict.fromkeys(ROWS[0])]]


@pytest.mark.parametrize("rows", UNMEASURED)
@pytest.mark.parametrize("totals", [{}, dict.fromkeys(TOTALS), dict.fromkeys(TOTALS, 0)])
def test_what_was_not_measured_is_a_dash(
    rows: list[dict[str, Any]], totals: dict[str, Any]
) -> None:
    assert printed(rows, totals, [{}])[-1] == "identical outputs: 0/0"


def inked_shares(path: Path) -> list[float]:
    """Share of pixels that are not nearly white in each quarter of a picture."""
    from matplotlib.image import imread

    dark = imread(path)[:, :, :3].min(axis=2) < 0.9
    height, width = dark.shape[0] // 2, dark.shape[1] // 2
    assert width > 700
    tops, lefts = (slice(0, height), slice(height, None)), (slice(0, width), slice(width, None))
    return [float(dark[top, left].mean()) for top in tops for left in lefts]


def test_plot_fills_every_panel_with_what_is_known(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from cluster.plot import plot

    plot(tmp_path / "run.png", ROWS, TOTALS, SERIES)
    full = inked_shares(tmp_path / "run.png")
    dotless = [{**row, "arrived_s": None} for row in ROWS]
    plot(tmp_path / "dotless.png", dotless, TOTALS, SERIES)
    assert inked_shares(tmp_path / "dotless.png")[1] < full[1] - 0.0005
    for rows in UNMEASURED:
        plot(tmp_path / "bare.png", rows, {}, {"threshold": [(0.0, None)]})
        bare = inked_shares(tmp_path / "bare.png")
        assert all(known > 1.5 * unknown > 0 for known, unknown in zip(full, bare, strict=True))


def test_progress_off_a_terminal_prints_one_line_per_answer() -> None:
    console = Console(file=io.StringIO(), width=60)
    with Progress(2, console) as progress:
        progress.phase("a", "queued")
        progress.phase("a", "done")
        progress.link(threshold_tokens=1234.4, link_bps=198.7e6, egress_bps=None)
        for phase in PHASES:
            progress.phase("b", phase)
    assert isinstance(console.file, io.StringIO)
    first, second = console.file.getvalue().splitlines()
    assert first.startswith("1/2 done: a | ")
    assert first.endswith(" s | threshold - | link - | egress -")
    assert second.startswith("2/2 done: b | ")
    assert second.endswith("threshold 1,234 tokens | link 198.7 Mbit/s | egress -")


def test_progress_on_a_terminal_draws_the_phases() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Progress(3, console) as progress:
        progress.phase("a", "transfer")
        progress.phase("b", "transfer")
        progress.link(threshold_tokens=900, link_bps=2e8, egress_bps=1e6)
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert all(phase in drawn for phase in PHASES)
    assert "threshold 900 tokens | link 200.0 Mbit/s | egress 1.0 Mbit/s" in drawn


def test_an_unknown_phase_is_refused() -> None:
    with (
        Progress(1, Console(file=io.StringIO())) as progress,
        pytest.raises(ValueError, match="known are queued"),
    ):
        progress.phase("a", "waiting")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (31_200_000, "31.2 MB"), (5e9, "5.0 GB")],
)
def test_sizes(num_bytes: float | None, text: str) -> None:
    assert format_size(num_bytes) == text
