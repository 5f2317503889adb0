"""The tables that ``prfaas reproduce`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.cli.fit import JointFit
from prfaas.cli.table import print_table
from prfaas.paper import Cell, Rates, implied_profile, max_error_pct
from prfaas.paper.curves import (
    Operation,
    bandwidth_sweep,
    homogeneous_sweep,
    local_split_sweep,
    remote_sweep,
    threshold_sweep,
)
from prfaas.paper.fit import DERIVED, PARAMETERS
from prfaas.paper.tables import LENGTHS_PRINTED, MODELS

THRESHOLDS = (5_000, 10_000, 15_000, 19_400, 25_000, 30_000, 40_000, 60_000)
"""Thresholds at which figure 5b is tabulated, in tokens."""


def print_cells(cells: Sequence[Cell]) -> None:
    """Print every figure but Table 3, which is fed in; of that one the times it implies."""
    print_table(
        "Table 3 prints rates only; prefill seconds that follow with our cache sizes",
        ("model", *LENGTHS_PRINTED),
        [
            (title, *(f"{seconds:.2f}" for _, seconds in implied_profile(name).knots))
            for name, title in MODELS.items()
        ],
    )
    print()
    print_table(
        "Published figures",
        ("figure", "where", "unit", "ours", "paper", "error %", "kind", "verdict"),
        [
            (
                cell.name,
                cell.where,
                cell.unit,
                _number(cell.ours),
                _paper(cell),
                f"{cell.error_pct:+.2f}",
                cell.kind.value,
                _verdict(cell),
            )
            for cell in cells
            if cell.where != "Table 3"
        ],
    )
    print(
        "input: fed in; fitted: the prefill curves were fitted to it; predicted: neither.\n"
        "as printed: ours, rounded as the paper's, is the paper's."
    )


def _verdict(cell: Cell) -> str:
    if cell.inside_rounding:
        return "as printed"
    return "loose" if cell.printed.loose else ""


def _paper(cell: Cell) -> str:
    mark = "< " if cell.printed.upper_bound else "~" if cell.printed.loose else ""
    return mark + _number(cell.theirs)


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.4g}"


def print_rates(rates: Rates, expectation: Rates) -> None:
    """Print Lambda_max by the paper's form and by the true one, in whole instances and shares."""
    rows = (
        ("PrfaaS-PD", rates.prfaas_rps, expectation.prfaas_rps),
        ("PrfaaS-PD, shared instances", rates.fractional_rps, expectation.fractional_rps),
        ("homogeneous", rates.homogeneous_rps, expectation.homogeneous_rps),
        (
            "homogeneous, shared instances",
            rates.homogeneous_fractional_rps,
            expectation.homogeneous_fractional_rps,
        ),
        ("naive", rates.naive_rps, expectation.naive_rps),
    )
    print()
    print_table(
        "Lambda_max, requests/s (the paper computes the first column; queues obey the second)",
        ("deployment", "of mean length", "of mean time"),
        [(name, f"{mean:.3f}", f"{true:.3f}") for name, mean, true in rows],
    )


def print_curves() -> None:
    """Print figures 5a and 5b at some points, then sweeps that the paper does not show."""
    print()
    print_table(
        "Figure 5a: Lambda_max by N_p",
        ("N_p", "best t", "at best t", "at 19.4K"),
        [
            (
                p.num_prefill,
                f"{p.threshold_tokens:.0f}",
                f"{p.best_rps:.3f}",
                f"{p.at_published_threshold_rps:.3f}",
            )
            for p in local_split_sweep()
        ],
    )
    print()
    print_table(
        "Figure 5b: bounds by t at N_p = 3, requests/s",
        ("t", "PrfaaS", "local prefill", "decode", "Lambda_max"),
        [
            (
                p.threshold_tokens,
                *(
                    "-" if rate is None else f"{rate:.2f}"
                    for rate in (p.prfaas_rps, p.prefill_rps, p.decode_rps, p.requests_per_s)
                ),
            )
            for p in threshold_sweep(THRESHOLDS)
        ],
    )
    print()
    print_table(
        "Homogeneous deployment by N_p, 12 instances",
        ("N_p", "Lambda_max"),
        [(num, f"{rate:.2f}") for num, rate in homogeneous_sweep().items()],
    )
    _print_operations("Link capacity (not in the paper)", bandwidth_sweep())
    _print_operations("PrfaaS instances (not in the paper)", remote_sweep())


def _print_operations(title: str, operations: Sequence[Operation]) -> None:
    print()
    print_table(
        title,
        ("Gbps", "N_prfaas", "N_p", "t", "p", "Lambda_max", "egress", "3 and 19.4K", "naive"),
        [
            (
                f"{op.egress_limit_bps / 1e9:g}",
                op.num_prfaas,
                op.num_prefill,
                f"{op.threshold_tokens:.0f}",
                f"{op.offload_fraction:.3f}",
                f"{op.max_rate_rps:.2f}",
                f"{op.egress_bps / 1e9:.1f}",
                f"{op.fixed_rps:.2f}",
                f"{op.naive_rps:.2f}",
            )
            for op in operations
        ],
    )


def print_fit(fitted: JointFit) -> None:
    """Print the joint fit: where it lands, what pins it, and what each figure is worth."""
    print()
    print_table(
        f"Joint fit: 5 numbers to 10 figures of Table 6, {fitted.num_steps} steps, largest error "
        f"{fitted.largest_error_pct:.2f} %, condition {fitted.condition:.0f}",
        ("parameter", "fitted", "used", "std. error %", "pinned by"),
        [
            (name, f"{value:.5g}", f"{used:.5g}", f"{deviation:.1f}", ", ".join(pinned_by))
            for name, value, used, deviation, pinned_by in zip(
                PARAMETERS,
                fitted.parameters,
                DERIVED,
                fitted.std_errors_pct,
                fitted.pinned_by,
                strict=True,
            )
        ],
    )
    print()
    print_table(
        "Leave one out: each figure predicted from the others",
        ("figure", "predicted", "paper", "error %", "leverage", "condition"),
        [
            (
                left.name,
                f"{left.ours:.3f}",
                f"{left.theirs:.2f}",
                f"{left.error_pct:+.2f}",
                f"{left.leverage:.2f}",
                f"{left.condition:.0f}",
            )
            for left in fitted.leave_one_out
        ],
    )
    print(
        "leverage near 1: no other figure checks this one. The homogeneous rate alone bends the "
        "H20 curve;\nwithout it the best curve is a straight line. The two P90 figures of 3.51 s "
        "are one quantity, left out together."
    )


def print_verdict(cells: Sequence[Cell]) -> None:
    """Print how many figures of each kind agree, and the largest error of those that count."""
    print()
    for kind in sorted({cell.kind for cell in cells}, key=lambda kind: kind.value):
        own = [cell for cell in cells if cell.kind is kind]
        inside = sum(cell.inside_rounding for cell in own)
        print(f"{kind.value}: {inside} of {len(own)} round to what is printed")
    print(f"largest error of the others, loose ones aside: {max_error_pct(cells):.2f} %")
