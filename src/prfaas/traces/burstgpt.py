"""BurstGPT traces: CSV of times and lengths of a campus service (arXiv 2401.17644)."""

from __future__ import annotations

from collections.abc import Iterable

from prfaas.traces.fields import csv_rows, finite, whole
from prfaas.traces.trace import Row, Trace

BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(lines: Iterable[str], *, name: str = "burstgpt") -> Trace:
    """Read one request per row; ``Timestamp`` in seconds, lengths in tokens.

    The file's other columns (Model, Total tokens, Log Type and later ones) are not needed. A row
    with 0 response tokens is a request that failed: it is skipped and counted, and so is a row
    with 0 request tokens. No prefixes are named.

    Raises:
        ConfigError: a row is malformed; names the line, the field and the value.
    """
    rows: list[Row] = []
    num_skipped = 0
    for line, row in csv_rows(lines, BURSTGPT_COLUMNS):
        num_tokens = whole(line, "Request tokens", row["Request tokens"])
        output_tokens = whole(line, "Response tokens", row["Response tokens"])
        at_s = finite(line, "Timestamp", row["Timestamp"])
        if num_tokens == 0 or output_tokens == 0:
            num_skipped += 1
            continue
        rows.append(Row(line=line, at_s=at_s, num_tokens=num_tokens, output_tokens=output_tokens))
    return Trace.of_rows(name, rows, num_skipped=num_skipped)
