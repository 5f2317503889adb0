"""``prfaas reproduce``: the figures of arXiv 2604.15039 beside ours."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from prfaas.capacity import RateForm
from prfaas.cli.charts import write_charts
from prfaas.cli.fit import JointFit, joint_fit
from prfaas.cli.reproduce_text import (
    THRESHOLDS,
    print_cells,
    print_curves,
    print_fit,
    print_rates,
    print_verdict,
)
from prfaas.errors import ConfigError, MissingExtra
from prfaas.paper import Cell, Rates, all_cells, max_error_pct, solve
from prfaas.paper.curves import (
    bandwidth_sweep,
    homogeneous_sweep,
    local_split_sweep,
    remote_sweep,
    threshold_sweep,
)
from prfaas.paper.fit import DERIVED, PARAMETERS

LIMIT_PCT = 1.0
"""A figure further off than this fails the comparison, unless it is fed in, rounded or loose."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("--quick", action="store_true", help="leave the fit out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--png", metavar="DIR", type=Path, help="write charts to this folder")


def run(args: argparse.Namespace) -> int:
    """Compare, print, and return 0, or 1 if a figure is off by more than ``LIMIT_PCT``.

    Raises:
        ConfigError: the folder for the charts cannot be written.
        MissingExtra: charts without matplotlib.
    """
    rates, expectation = solve(), solve(RateForm.EXPECTATION)
    cells = all_cells(rates)
    fitted = None if args.quick else _fit_if_possible()
    if args.png is not None:
        _write(args.png)
    if args.json:
        json.dump(report(cells, rates, expectation, fitted), sys.stdout, allow_nan=False)
        print()
    else:
        print_cells(cells)
        print_rates(rates, expectation)
        print_curves()
        if fitted is not None:
            print_fit(fitted)
        print_verdict(cells)
    return 0 if max_error_pct(cells) <= LIMIT_PCT else 1


def _fit_if_possible() -> JointFit | None:
    try:
        return joint_fit()
    except MissingExtra as missing:
        print(f"the fit is left out: {missing}", file=sys.stderr)
        return None


def _write(folder: Path) -> None:
    try:
        for path in write_charts(folder):
            print(f"wrote {path}", file=sys.stderr)
    except OSError as error:
        raise ConfigError(
            f"cannot write charts to {str(folder)!r}: {error.strerror}; name another folder"
        ) from error


def report(
    cells: Sequence[Cell], rates: Rates, expectation: Rates, fitted: JointFit | None
) -> dict[str, object]:
    """Return everything as one JSON object."""
    return {
        "cells": [_cell_record(cell) for cell in cells],
        "max_error_pct": max_error_pct(cells),
        "lambda_prfaas": rates.prfaas_rps,
        "lambda_homogeneous": rates.homogeneous_rps,
        "lambda_naive": rates.naive_rps,
        "lambda_fractional": rates.fractional_rps,
        "lambda_homogeneous_fractional": rates.homogeneous_fractional_rps,
        "lambda_prfaas_expectation": expectation.prfaas_rps,
        "lambda_homogeneous_expectation": expectation.homogeneous_rps,
        "lambda_naive_expectation": expectation.naive_rps,
        "lambda_fractional_expectation": expectation.fractional_rps,
        "lambda_homogeneous_fractional_expectation": expectation.homogeneous_fractional_rps,
        "optimum": attrs.asdict(rates),
        "optimum_expectation": attrs.asdict(expectation),
        "curves": {
            "figure_5a": _records(local_split_sweep()),
            "figure_5b": _records(threshold_sweep(THRESHOLDS)),
            "homogeneous": [
                {"num_prefill": num, "max_rate_rps": rate}
                for num, rate in homogeneous_sweep().items()
            ],
            "bandwidth": _records(bandwidth_sweep()),
            "num_prfaas": _records(remote_sweep()),
        },
        "fit": None if fitted is None else _fit_record(fitted),
        "leave_one_out": [] if fitted is None else _records(fitted.leave_one_out),
        "ratios": {
            "vs_homogeneous": rates.vs_homogeneous,
            "vs_naive": rates.vs_naive,
            "fractional_gain": rates.fractional_gain,
            "equal_cost": rates.equal_cost,
        },
        "machine": _machine(),
    }


def _records(values: Iterable[attrs.AttrsInstance]) -> list[dict[str, object]]:
    return [attrs.asdict(value) for value in values]


def _cell_record(cell: Cell) -> dict[str, object]:
    return {
        "name": cell.name,
        "where": cell.where,
        "unit": cell.unit,
        "ours": cell.ours,
        "theirs": cell.theirs,
        "error_pct": cell.error_pct,
        "kind": cell.kind.value,
        "inside_rounding": cell.inside_rounding,
        "half_width": cell.printed.half_width,
        "loose": cell.printed.loose,
        "counts": cell.counts,
        "note": cell.note,
    }


def _fit_record(fitted: JointFit) -> dict[str, object]:
    rows = zip(
        PARAMETERS,
        fitted.parameters,
        DERIVED,
        fitted.std_errors_pct,
        fitted.pinned_by,
        strict=True,
    )
    return {
        "num_steps": fitted.num_steps,
        "largest_error_pct": fitted.largest_error_pct,
        "condition": fitted.condition,
        "parameters": [
            {
                "name": name,
                "fitted": value,
                "used": used,
                "std_error_pct": std_error_pct,
                "pinned_by": list(pinned_by),
            }
            for name, value, used, std_error_pct, pinned_by in rows
        ],
    }


def _machine() -> dict[str, object]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
