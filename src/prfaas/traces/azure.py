"""Azure LLM inference traces: CSV of times and lengths (Patel et al., arXiv 2311.18677)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from prfaas.traces.fields import csv_rows, refusal, whole
from prfaas.traces.trace import Row, Trace

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(lines: Iterable[str], *, name: str = "azure") -> Trace:
    """Read one request per row: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

    Time stamps are ISO 8601 with a space or a T, up to 7 or more fractional digits, with or without
    an offset; without one they count as UTC. No prefixes are named. A row without generated tokens
    is read as one token, a row without context tokens is skipped and counted.

    Raises:
        ConfigError: a row is malformed; names the line, the field and the value.
    """
    rows: list[Row] = []
    num_skipped = 0
    for line, row in csv_rows(lines, AZURE_COLUMNS):
        num_tokens = whole(line, "ContextTokens", row["ContextTokens"])
        output_tokens = whole(line, "GeneratedTokens", row["GeneratedTokens"])
        at_s = _seconds(line, row["TIMESTAMP"])
        if num_tokens == 0:
            num_skipped += 1
            continue
        rows.append(
            Row(
                line=line,
                at_s=at_s,
                num_tokens=num_tokens,
                output_tokens=max(1, output_tokens),
            )
        )
    return Trace.of_rows(name, rows, num_skipped=num_skipped)


def _seconds(line: int, value: str) -> float:
    try:
        # Python reads digits beyond the sixth and drops them: microseconds are enough here.
        moment = datetime.fromisoformat(value.strip())
    except ValueError as error:
        raise refusal(
            line, "TIMESTAMP", value, "a time such as 2023-11-16 18:17:03.9799600"
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
