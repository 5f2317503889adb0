"""``prfaas profile``: measure the prefill times of your own engine."""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TextIO, cast

from prfaas.cli.files import PREFILL_COLUMNS, prefill_time
from prfaas.cli.measure import (
    Bench,
    Measurement,
    between,
    held_out_errors,
    measure_grid,
    monotone,
)
from prfaas.cli.table import print_table
from prfaas.errors import ConfigError
from prfaas.seams import Engine

_MEMBERS = ("spec", "segment_tokens", "open", "prefill", "close")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        required=True,
        metavar="MODULE:FACTORY",
        help="a callable without arguments that returns a prfaas.seams.Engine",
    )
    parser.add_argument(
        "--lengths",
        type=_counts,
        default=[256, 512, 1024, 2048, 4096],
        metavar="N,N,...",
        help="new tokens per point of the table; default 256,512,1024,2048,4096",
    )
    parser.add_argument(
        "--cached",
        type=_counts,
        default=[0],
        metavar="N,N,...",
        help="tokens of the cached prefix, multiples of the model's granule; default 0",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="the median of N counts; default 3"
    )
    parser.add_argument(
        "--token-ids", type=int, default=64, metavar="N", help="use random ids below N; default 64"
    )
    parser.add_argument("--out", metavar="FILE", help="write the table as CSV")


def run(args: argparse.Namespace) -> int:
    if len(set(args.lengths)) < 2:
        raise ConfigError(f"--lengths has {len(set(args.lengths))} lengths; give at least 2")
    engine = load_engine(args.engine)
    bench = Bench(engine=engine, num_repeats=args.repeats, num_token_ids=args.token_ids)
    print(f"{engine.spec.describe()}", file=sys.stderr)
    grid, most = monotone(measure_grid(bench, args.lengths, [0, *args.cached], _tell))
    if most > 1.0:
        print(
            f"some times fell with more tokens and were raised, by {most - 1:.1%} at most; "
            "--repeats makes this smaller",
            file=sys.stderr,
        )
    print_table(
        "Prefill, median seconds",
        ("new tokens", "cached", "seconds", "tokens/s"),
        [(f"{n:,}", f"{c:,}", f"{s:.4g}", f"{n / s:,.0f}") for n, c, s in grid],
    )
    held_out = measure_grid(bench, between(args.lengths), [0, *args.cached], _tell)
    _print_held_out(grid, held_out)
    if args.out:
        write_table(Path(args.out), grid)
        print(f"\nwrote {args.out}; systems.NAME.prefill_table reads it", file=sys.stderr)
    return 0


def load_engine(name: str) -> Engine:
    """Import a module, call its factory and check that the result looks like an engine.

    Modules are looked for in the current folder too.

    Raises:
        ConfigError: there is no such module or factory, or it returns something else.
    """
    module_name, _, factory_name = name.partition(":")
    if not module_name or not factory_name:
        raise ConfigError(
            f"--engine is {name!r}; give MODULE:FACTORY, e.g. prfaas.testing:FakeEngine"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--engine {name}: {error}; install it or change the folder") from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise ConfigError(f"--engine {name}: {module_name} has no callable {factory_name!r}")
    engine = factory()
    missing = [member for member in _MEMBERS if not hasattr(engine, member)]
    if missing:
        raise ConfigError(
            f"--engine {name} returns a {type(engine).__name__} without {', '.join(missing)}; "
            "return a prfaas.seams.Engine"
        )
    return cast("Engine", engine)


def write_table(path: Path, grid: Sequence[Measurement]) -> None:
    """Write the CSV file that ``systems.NAME.prefill_table`` reads.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            _write_rows(file, grid)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _write_rows(file: TextIO, grid: Sequence[Measurement]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(PREFILL_COLUMNS)
    writer.writerows((new, cached, f"{seconds:.6g}") for new, cached, seconds in grid)


def _print_held_out(grid: Sequence[Measurement], held_out: Sequence[Measurement]) -> None:
    if not held_out:
        return
    errors = held_out_errors(prefill_time(grid), held_out)
    print()
    print_table(
        "Held out: measured, not in the table",
        ("new tokens", "cached", "seconds", "interpolated", "error"),
        [
            (f"{new:,}", f"{cached:,}", f"{seconds:.4g}", f"{predicted:.4g}", f"{error:+.1%}")
            for (new, cached, seconds), predicted, error in errors
        ],
    )
    sizes = [abs(error) for _, _, error in errors]
    print(f"held-out error: median {statistics.median(sizes):.1%}, largest {max(sizes):.1%}")


def _tell(measured: Measurement) -> None:
    new, cached, seconds = measured
    print(f"{new:>8,} new after {cached:,} cached: {seconds:.4g} s", file=sys.stderr)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [-1]
    if min(counts) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of counts such as 256,1024")
    return counts
