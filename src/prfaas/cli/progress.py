"""A progress bar on the standard error of a terminal; nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnProgress = Callable[[float, int], None]
_STEP = 0.01


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[OnProgress | None]:
    """Yield a function of (simulated seconds, requests that ended), or None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        with _plain_bar(what, total) as show:
            yield show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda now, ended: bar.update(
            task, completed=ended, description=f"{what} {ended:,} of {total:,}, {now:,.0f} s"
        )


@contextmanager
def _plain_bar(what: str, total: int) -> Iterator[OnProgress]:
    shown = -1.0

    def show(now: float, ended: int) -> None:
        nonlocal shown
        share = ended / total if total else 1.0
        if share - shown >= _STEP:
            shown = share
            print(f"\r{what} {ended:,} of {total:,}, {now:,.0f} s", end="", file=sys.stderr)

    yield show
    print("\r\x1b[K", end="", file=sys.stderr)
