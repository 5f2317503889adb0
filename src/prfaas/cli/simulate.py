"""``prfaas simulate``: run a workload through simulated clusters under the real policies."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from prfaas.cli.config import Config, read_config
from prfaas.cli.decisions import write_log
from prfaas.cli.freeze import frozen
from prfaas.cli.progress import progress_bar
from prfaas.cli.scenario import Run, run_of
from prfaas.cli.summary import Summary, summarise, summary_cells
from prfaas.cli.table import print_table
from prfaas.errors import ConfigError
from prfaas.simulator import SimulationResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a TOML file with a [simulate] table")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--log", metavar="FILE", help="write every decision, for prfaas replay")
    parser.add_argument("--seed", type=int, metavar="N", help="instead of simulate.seed")
    parser.add_argument(
        "--rate", type=float, metavar="R", help="requests per second, instead of workload.rate_rps"
    )


def run(args: argparse.Namespace) -> int:
    config = with_overrides(read_config(args.config), seed=args.seed, rate_rps=args.rate)
    # The run is made from what the log will hold, so that a replay is made of the same numbers.
    config = frozen(config)
    made, result, summary = simulated(config)
    # The figures come first, so that a log that cannot be written does not cost them.
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
    else:
        print_table(title_of(made), ("", "simulated"), list(summary_cells(summary).items()))
    if args.log:
        write_log(Path(args.log), config, summary, result.decisions)
        print(f"wrote {len(result.decisions):,} decisions to {args.log}", file=sys.stderr)
    return 0


def with_overrides(
    config: Config,
    *,
    seed: int | None = None,
    rate_rps: float | None = None,
    policy: str | None = None,
    threshold: str | float | None = None,
    balancer: str | None = None,
) -> Config:
    """Return the configuration with the values of the command line instead of the file's.

    Raises:
        ConfigError: the rate is not above 0.
    """
    if rate_rps is not None and not rate_rps > 0:
        raise ConfigError(f"--rate is {rate_rps}; it must be greater than 0")
    wanted: dict[str, Any] = {
        "seed": seed,
        "policy": policy,
        "threshold": threshold,
        "balancer": balancer,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    simulate = msgspec.structs.replace(config.simulate, **given)
    workload = config.workload
    if rate_rps is not None:
        workload = msgspec.structs.replace(workload, rate_rps=rate_rps)
    return msgspec.structs.replace(config, simulate=simulate, workload=workload)


def simulated(config: Config, what: str = "simulating") -> tuple[Run, SimulationResult, Summary]:
    """Run a configuration with a progress bar."""
    made = run_of(config)
    if not made.arrivals:
        raise ConfigError("no request arrives within duration_s; make it longer")
    with progress_bar(what, len(made.arrivals)) as on_progress:
        result = made.start(on_progress)
    return made, result, summarise(made, result)


def title_of(made: Run) -> str:
    """One line that says what was simulated."""
    simulate = made.config.simulate
    roles = ", ".join(f"{name} {p} + {d}" for name, (p, d) in made.roles.items())
    return (
        f"{made.scenario.spec.name}: {len(made.scenario.nodes)} nodes, prefill + decode {roles}; "
        f"policy {simulate.policy}, balancer {simulate.balancer}, seed {simulate.seed}"
    )
