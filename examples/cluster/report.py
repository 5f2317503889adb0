"""What the demo prints: progress while it runs, then a table, totals in words, and samples.

Everything here takes plain dicts. A key that is missing or None is shown as a dash.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]
"""A request: request_id, kind, num_tokens, reason, offloaded, attempts, cached_tokens,
prefilled_tokens, routed_tokens, arrived_s, received_bytes, expected_bytes, dense_bytes,
decode_prefilled_tokens, queue_s, prefill_s, transfer_s, decode_wait_s, ttft_s, total_s, identical,
max_logit_diff."""
Totals = Mapping[str, Any]
"""The run: identical, total, max_logit_diff, offloaded, decode_prefilled_tokens, shipped_bytes,
dense_bytes, egress_bps, link_bps_true, link_bps_estimated, threshold_tokens, leaked_blocks, wall_s,
model."""
Sample = Mapping[str, Any]
"""Generated text: request_id, prompt and text, each str or bytes."""

PHASES = ("queued", "prefill", "transfer", "decode", "done")
DASH = "-"


class Progress:
    """Requests by phase and the state of the link, redrawn in place; plain lines off a terminal."""

    def __init__(self, num_requests: int, console: Console | None = None) -> None:
        self._num_requests = num_requests
        self._console = console or Console()
        self._phases: dict[str, str] = {}
        self._link: dict[str, float | None] = {}
        self._start_s = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=8,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def phase(self, request_id: str, phase: str) -> None:
        """A request entered one of ``PHASES``."""
        if phase not in PHASES:
            raise ValueError(f"phase is {phase!r}; known are {', '.join(PHASES)}")
        self._phases[request_id] = phase
        if phase == "done" and not self._live:
            num_done = self._counts()["done"]
            line = f"{num_done}/{self._num_requests} done: {request_id} | {self._link_line()}"
            self._console.print(Text(line), soft_wrap=True)

    def link(
        self,
        *,
        threshold_tokens: float | None = None,
        link_bps: float | None = None,
        egress_bps: float | None = None,
    ) -> None:
        """What the gateway knows now; None where it knows nothing yet."""
        self._link = {"threshold": threshold_tokens, "link": link_bps, "egress": egress_bps}

    def _counts(self) -> Counter[str]:
        return Counter(self._phases.values())

    def _link_line(self) -> str:
        threshold = self._link.get("threshold")
        return (
            f"{time.monotonic() - self._start_s:5.1f} s | "
            f"threshold {format_count(threshold)}{' tokens' if threshold is not None else ''} | "
            f"link {_format_rate(self._link.get('link'))} | "
            f"egress {_format_rate(self._link.get('egress'))}"
        )

    def _render(self) -> Group:
        counts = self._counts()
        bars = Table.grid(padding=(0, 1))
        for phase in PHASES:
            bar = ProgressBar(total=max(1, self._num_requests), completed=counts[phase], width=40)
            bars.add_row(Text(f"{phase:>9}"), bar, Text(f"{counts[phase]:>3}"))
        return Group(bars, Text(f"  {self._link_line()}", style="dim"))


class Column(NamedTuple):
    """A column of the table; the ones of highest ``rank`` go first where the room is short."""

    header: str
    rank: int
    cell: Callable[[Row], str]
    justify: JustifyMethod = "right"


COLUMNS = (
    Column("request", 0, lambda r: str(r.get("request_id", DASH)), "left"),
    Column("route", 1, lambda r: _format_route(r), "left"),
    Column("prompt\ntokens", 0, lambda r: format_count(r.get("num_tokens"))),
    Column("cached", 2, lambda r: format_count(r.get("cached_tokens"))),
    Column("pre-\nfilled", 7, lambda r: format_count(r.get("prefilled_tokens"))),
    Column("again at\ndecode", 5, lambda r: format_count(r.get("decode_prefilled_tokens"))),
    Column("re-\nceived", 1, lambda r: format_size(r.get("received_bytes"))),
    Column("ex-\npected", 5, lambda r: format_size(r.get("expected_bytes"))),
    Column("queue\ns", 4, lambda r: _format_seconds(r.get("queue_s"))),
    Column("prefill\ns", 4, lambda r: _format_seconds(r.get("prefill_s"))),
    Column("TTFT\ns", 0, lambda r: _format_seconds(r.get("ttft_s"))),
    Column("trans-\nfer s", 3, lambda r: _format_seconds(r.get("transfer_s"))),
    Column("wait\ns", 3, lambda r: _format_seconds(r.get("decode_wait_s"))),
    Column("total\ns", 6, lambda r: _format_seconds(r.get("total_s"))),
    Column("logit\ndiff", 8, lambda r: _format_difference(r.get("max_logit_diff"))),
    Column("same", 0, lambda r: _either(r.get("identical"), "yes", "NO")),
)


def print_report(
    rows: Sequence[Row], totals: Totals, samples: Sequence[Sample], console: Console
) -> None:
    """The table, the totals in words, the samples, and last the line ``identical outputs: N/N``."""
    console.print(_table(rows, console.width))
    summary = Table.grid(padding=(0, 2, 0, 0))
    for label, text in _summary(rows, totals):
        summary.add_row(Text(label, style="bold"), Text(text))
    console.print(summary)
    console.print()
    for sample in samples:
        prompt = _clean(sample.get("prompt") or "")[-60:]
        line = Text(f"{sample.get('request_id', DASH)}: ", style="bold")
        line.append(f"...{prompt}", style="not bold dim")
        line.append(_clean(sample.get("text") or ""), style="not bold green")
        console.print(line, soft_wrap=False)
        console.print()
    last = f"identical outputs: {totals.get('identical') or 0}/{totals.get('total') or 0}"
    console.print(last, markup=False, highlight=False)


def _table(rows: Sequence[Row], width: int) -> Table:
    """As many columns as fit; each takes its longest line and two spaces."""
    cells = {column: [column.cell(row) for row in rows] for column in COLUMNS}
    widths = {
        column: 2 + max(len(line) for line in [*column.header.split("\n"), *texts])
        for column, texts in cells.items()
    }
    while sum(widths.values()) > width and any(column.rank for column in widths):
        last = max(column.rank for column in widths)
        widths = {column: room for column, room in widths.items() if column.rank < last}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in widths:
        table.add_column(column.header, justify=column.justify, no_wrap=True)
    for index, row in enumerate(rows):
        style = "red" if row.get("identical") is False else "cyan" if row.get("offloaded") else ""
        table.add_row(*(Text(cells[column][index]) for column in widths), style=style)
    return table


def _summary(rows: Sequence[Row], totals: Totals) -> list[tuple[str, str]]:
    num_requests, num_offloaded = totals.get("total") or 0, totals.get("offloaded") or 0
    share = f" ({num_offloaded / num_requests:.0%})" if num_requests else ""
    again = totals.get("decode_prefilled_tokens")
    shipped, dense = totals.get("shipped_bytes") or 0, totals.get("dense_bytes")
    ratio = f" ({dense / shipped:.1f}x)" if dense and shipped else ""
    true_bps, estimate_bps = totals.get("link_bps_true"), totals.get("link_bps_estimated")
    egress_bps = totals.get("egress_bps")
    error = f" ({estimate_bps / true_bps - 1:+.1%})" if true_bps and estimate_bps else ""
    used = f" ({egress_bps / true_bps:.0%} of it)" if true_bps and egress_bps else ""
    threshold = totals.get("threshold_tokens")
    lines = [
        (
            "Offloaded",
            f"{num_offloaded} of {num_requests} requests{share}; for them the decode side had to "
            f"prefill {format_count(again)} token{'' if again == 1 else 's'}",
        ),
        (
            "Shipped",
            f"{format_size(shipped)} over the link; the same model with full attention everywhere: "
            f"{format_size(dense)}{ratio}",
        ),
        (
            "Link",
            f"true rate {_format_rate(true_bps)}; estimated {_format_rate(estimate_bps)}{error}; "
            f"used on average {_format_rate(egress_bps)}{used}",
        ),
        (
            "Threshold",
            "not known yet"
            if threshold is None
            else f"{format_count(threshold)} at the end; prompts with more uncached tokens are "
            "prefilled in the PRFAAS cluster",
        ),
        (
            "Leaked",
            f"{format_count(totals.get('leaked_blocks'))} blocks in the pools of all workers",
        ),
        (
            "Logits",
            f"largest difference at any step {_format_difference(totals.get('max_logit_diff'))}",
        ),
        ("Run", f"{totals.get('model', DASH)}, {_format_seconds(totals.get('wall_s'))} s"),
    ]
    retried = sum((row.get("attempts") or 1) > 1 for row in rows)
    if retried:
        lines.insert(
            1, ("Retried", f"{retried} of {num_requests} requests needed more than one attempt")
        )
    return lines


def _format_route(row: Row) -> str:
    place = _either(row.get("offloaded"), "remote", "local")
    tries = f" ({row['attempts']} tries)" if (row.get("attempts") or 1) > 1 else ""
    return f"{place}, {str(row.get('reason') or DASH).replace('_', ' ')}{tries}"


def _either(value: bool | None, yes: str, no: str) -> str:
    return DASH if value is None else yes if value else no


def format_count(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def format_size(value: float | None) -> str:
    if value is None:
        return DASH
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.{0 if value >= 100 * scale else 1}f} {unit}"
    return f"{value:.0f} B"


def _format_rate(value: float | None) -> str:
    return DASH if value is None else f"{value / 1e6:.1f} Mbit/s"


def _format_seconds(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def _format_difference(value: float | None) -> str:
    return DASH if value is None else f"{value:.1e}" if value else "0"


def _clean(text: str | bytes) -> str:
    """One printable line: line breaks and control characters are shown as escapes."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
