"""Tables for people: through rich on a terminal, as plain aligned text everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table to standard output; the first column is text, the others are numbers."""
    cells = [[str(value) for value in row] for row in rows]
    if sys.stdout.isatty() and _print_rich(title, columns, cells):
        return
    print(plain_table(title, columns, cells))


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as lines of text, columns two blanks apart."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    lines = [title] if title else []
    for row in (columns, *rows):
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((first, *others)).rstrip())
    return "\n".join(lines)


def _print_rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        return False
    table = Table(title=escape(title) or None, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(escape(name), justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
    return True
