"""``prfaas plan``: what a deployment could sustain, how to run it, and what binds it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from prfaas.capacity import (
    Objective,
    PlanningCluster,
    PlanningProblem,
    plan_deployment,
)
from prfaas.cli.config import Config, parse_config, read_config
from prfaas.cli.plan_text import caveats, print_plan
from prfaas.cli.systems import (
    lengths_of,
    model_of,
    output_tokens_of,
    systems_of,
    trace_of,
)
from prfaas.core import ClusterKind
from prfaas.errors import ConfigError
from prfaas.spec import PRESETS
from prfaas.traces import Trace

_CASE_STUDY_LENGTHS = {"mu": 9.90, "sigma": 1.00, "min": 128, "max": 131_072}
_CASE_STUDY_OUTPUT = 1024
_OF_THE_DEPLOYMENT = (
    "model",
    "remote",
    "local",
    "remote_nodes",
    "local_nodes",
    "link_gbps",
    "trace",
    "output_tokens",
)
_OBJECTIVES = {"rate": Objective.THROUGHPUT, "price": Objective.THROUGHPUT_PER_PRICE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a TOML file; or use the flags")
    parser.add_argument("--model", help="a preset, a model folder or a config.json")
    parser.add_argument(
        "--remote", metavar="SYSTEM", help="paper-h200, paper-h20 or aiconfigurator:NAME"
    )
    parser.add_argument("--local", metavar="SYSTEM", help="the same for the local cluster")
    parser.add_argument("--remote-nodes", type=int, metavar="N", help="instances there")
    parser.add_argument("--local-nodes", type=int, metavar="N", help="instances here")
    parser.add_argument("--link-gbps", type=float, metavar="G", help="out of the remote cluster")
    parser.add_argument("--trace", metavar="FILE", help="lengths of a trace instead of the paper's")
    parser.add_argument("--output-tokens", type=int, metavar="N", help="generated per request")
    parser.add_argument(
        "--max-remote-nodes",
        type=int,
        metavar="N",
        help="choose the remote nodes of each cluster, 0 to N",
    )
    parser.add_argument(
        "--objective", choices=list(_OBJECTIVES), default="rate", help="what to make large"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--png", metavar="FILE", help="draw the rate against t and against N_p")


def run(args: argparse.Namespace) -> int:
    config = _config_of_file(args) if args.config else config_of_flags(args)
    trace = trace_of(config)
    problem = problem_of(
        config,
        trace,
        objective=_OBJECTIVES[args.objective],
        max_prfaas_nodes=args.max_remote_nodes,
    )
    for caveat in caveats(config, problem):
        print(f"note: {caveat}", file=sys.stderr)
    plan = plan_deployment(problem)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
    else:
        print_plan(problem, plan)
        if trace is not None:
            print(
                f"Lengths are those of {len(trace.arrivals):,} requests of {trace.name}, mean "
                f"{trace.mean_tokens:,.0f} tokens,\nless the {trace.prefix_hit_share:.0%} that an "
                "unlimited prefix cache would hold."
            )
    if args.png:
        from prfaas.cli.plot import draw_plan

        draw_plan(plan.mean, Path(args.png))
        print(f"wrote {args.png}", file=sys.stderr)
    return 0


def _config_of_file(args: argparse.Namespace) -> Config:
    given = [_flag(name) for name in _OF_THE_DEPLOYMENT if getattr(args, name) is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)} beside {args.config}: the file describes the deployment; change "
            "it there, or leave the file out"
        )
    return read_config(args.config)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def config_of_flags(args: argparse.Namespace) -> Config:
    """Build the configuration that the flags describe; lengths are the paper's unless given."""
    needed = ("model", "remote", "local", "remote_nodes", "local_nodes", "link_gbps")
    missing = [_flag(name) for name in needed if getattr(args, name) is None]
    if missing:
        raise ConfigError(f"without a CONFIG file also {', '.join(missing)} must be given")
    if args.model not in PRESETS and not Path(args.model).exists():
        raise ConfigError(
            f"--model {args.model!r} is no preset and no such file exists; presets are "
            f"{', '.join(PRESETS)}"
        )
    workload: dict[str, Any] = {"output_tokens": args.output_tokens}
    if args.trace:
        workload["trace"] = args.trace
    else:
        workload["lengths"] = _CASE_STUDY_LENGTHS
        if args.output_tokens is None:
            workload["output_tokens"] = _CASE_STUDY_OUTPUT
    model = {"preset" if args.model in PRESETS else "path": args.model}
    return parse_config(
        {
            "model": model,
            "workload": workload,
            "clusters": {
                "remote": {"kind": "prfaas", "system": args.remote, "nodes": args.remote_nodes},
                "local": {"kind": "pd", "system": args.local, "nodes": args.local_nodes},
            },
            "link": {"egress_gbps": args.link_gbps},
        }
    )


def problem_of(
    config: Config,
    trace: Trace | None,
    *,
    objective: Objective = Objective.THROUGHPUT,
    max_prfaas_nodes: int | None = None,
) -> PlanningProblem:
    """Turn a configuration, and its trace if it names one, into a question for the planner.

    Raises:
        ConfigError: names the key.
    """
    if max_prfaas_nodes is not None and max_prfaas_nodes < 1:
        raise ConfigError(f"--max-remote-nodes is {max_prfaas_nodes}; it must be at least 1")
    model = model_of(config)
    systems = systems_of(config, model, {c.system for c in config.clusters.values()})
    for name, cluster in config.clusters.items():
        system = systems[cluster.system]
        if cluster.kind == "prfaas" and (cluster.prefill, cluster.decode) != (None, None):
            raise ConfigError(
                f"clusters.{name} is of kind prfaas and all its nodes prefill; leave out prefill "
                "and decode"
            )
        if objective is Objective.THROUGHPUT_PER_PRICE and system.price_per_hour is None:
            raise ConfigError(
                f"--objective price needs systems.{cluster.system}.price; add it, if need be "
                "relative to the others"
            )
        if cluster.kind == "pd" and None in (system.decode_step_s, system.batch_size):
            raise ConfigError(
                f"clusters.{name} decodes, so systems.{cluster.system} needs step_ms and "
                "batch_size, which no database gives where even one request decodes at less than "
                "40 tokens/s; add both"
            )
    clusters = [
        PlanningCluster(
            cluster_id=name,
            kind=ClusterKind(cluster.kind),
            system=cluster.system,
            num_nodes=cluster.nodes,
        )
        for name, cluster in config.clusters.items()
    ]
    return PlanningProblem(
        model=model,
        lengths=lengths_of(config, trace),
        output_tokens=output_tokens_of(config, trace),
        systems=systems,
        clusters=tuple(clusters),
        egress_bps=config.link.egress_gbps * 1e9,
        egress_share_of_others=config.link.share_of_others,
        rtt_s=config.link.rtt_ms / 1000,
        objective=objective,
        max_prfaas_nodes=max_prfaas_nodes,
    )
