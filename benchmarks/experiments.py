"""Simulated experiments: the ablation ladder, and the goals of the policies.

--quick prints the ratios in half a minute; without it every row is made, on two processes. With
--report FOLDER the rows become FOLDER/experiments.md and pictures in FOLDER/experiments. Without
--trace, synthetic conversations stand in for the conversation trace, and every output says so.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _common import emit, parser
from experiment_parts import findings

NUM_PROCESSES = 2


def arguments() -> argparse.Namespace:
    given = parser(__doc__ or "")
    given.add_argument("--trace", help="a Mooncake conversation trace, JSON lines")
    given.add_argument("--report", type=Path, help="write experiments.md and its pictures here")
    given.add_argument("--processes", type=int, default=NUM_PROCESSES, help="of the full mode")
    return given.parse_args()


def main() -> None:
    args = arguments()
    if args.quick:
        emit(args, *findings.quick(args.trace))
        return
    found = findings.full(args.trace, args.processes)
    if args.report is not None:
        # Needs matplotlib, which nothing else here does.
        from experiment_parts import report

        report.write(args.report, found, args.trace)
    ratios = {goal.name: goal.value for goal in found.goals()}
    rows = [*found.ladder, *found.noise, *found.goal_rows, *found.cache_rows]
    emit(args, rows, ratios)


if __name__ == "__main__":
    main()
