"""``prfaas plan``: what a deployment could sustain, how to run it, and what binds it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from prfaas.capacity import (
    DeploymentPlan,
    FormPlan,
    Objective,
    OperatingPlan,
    PlanningCluster,
    PlanningProblem,
    RateForm,
    plan_deployment,
)
from prfaas.cli.config import Config, parse_config, read_config
from prfaas.cli.systems import lengths_of, model_of, output_tokens_of, systems_of, trace_of
from prfaas.cli.table import print_table
from prfaas.core import ClusterKind
from prfaas.errors import ConfigError
from prfaas.spec import PRESETS
from prfaas.traces import Trace

_CASE_STUDY_LENGTHS = {"mu": 9.90, "sigma": 1.00, "min": 128, "max": 131_072}
_CASE_STUDY_OUTPUT = 1024
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
        "--max-remote-nodes", type=int, metavar="N", help="choose the remote nodes, 0 to N"
    )
    parser.add_argument(
        "--objective", choices=list(_OBJECTIVES), default="rate", help="what to make large"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--png", metavar="FILE", help="draw the rate against t and against N_p")


def run(args: argparse.Namespace) -> int:
    config = read_config(args.config) if args.config else config_of_flags(args)
    trace = trace_of(config)
    problem = problem_of(
        config,
        trace,
        objective=_OBJECTIVES[args.objective],
        max_prfaas_nodes=args.max_remote_nodes,
    )
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


def config_of_flags(args: argparse.Namespace) -> Config:
    """Build the configuration that the flags describe; lengths are the paper's unless given."""
    needed = ("model", "remote", "local", "remote_nodes", "local_nodes", "link_gbps")
    missing = ["--" + name.replace("_", "-") for name in needed if getattr(args, name) is None]
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
    model = model_of(config)
    systems = systems_of(config, model, {c.system for c in config.clusters.values()})
    for name, cluster in config.clusters.items():
        system = systems[cluster.system]
        if cluster.kind == "pd" and None in (system.decode_step_s, system.batch_size):
            raise ConfigError(
                f"clusters.{name} decodes, so systems.{cluster.system} needs step_ms and "
                "batch_size; add both"
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


def print_plan(problem: PlanningProblem, plan: DeploymentPlan) -> None:
    """Print the plan as tables: both forms side by side, then the expectation form in detail."""
    forms = [plan.of(form) for form in (RateForm.MEAN, RateForm.EXPECTATION)]
    nodes = ", ".join(
        f"{cluster.cluster_id} {cluster.num_nodes:g} x {cluster.system}"
        for cluster in problem.clusters
    )
    title = f"{problem.model.name}: {nodes}, {problem.egress_bps / 1e9:g} Gbit/s"
    columns = ("", "mean form", "limit of stability")
    cells = [plan_cells(form.best) for form in forms]
    print_table(title, columns, [(name, *(one[name] for one in cells)) for name in cells[0]])
    print()
    exact = plan.of(RateForm.EXPECTATION)
    _print_clusters(exact.best)
    _print_baselines(forms)
    _print_sensitivity(exact)
    print(
        "The mean form takes one request of the mean length for all, as the paper does; above the\n"
        "limit of stability queues grow without end. TTFT is service time without queueing."
    )


def plan_cells(best: OperatingPlan) -> dict[str, str]:
    """The figures of one operating point as text, by name."""
    threshold = best.threshold_tokens
    cells = {
        "threshold t, tokens": "-" if threshold is None else f"{threshold:,.0f}",
        "prefilled remotely, p": f"{best.offload_fraction:.1%}",
        "N_prfaas / N_p / N_d": f"{best.num_prfaas:g} / {best.num_prefill:g} / {best.num_decode:g}",
        "remote prefill, req/s": _rate(best.prfaas_rps),
        "local prefill, req/s": _rate(best.prefill_rps),
        "decode, req/s": _rate(best.decode_rps),
        "highest rate, req/s": _rate(best.requests_per_s),
        "bound by": best.binding.value.replace("_", " "),
        "egress, Gbit/s": f"{best.egress_bps / 1e9:.2f}",
        "TTFT mean / P90, s": f"{best.mean_ttft_s:.2f} / {best.p90_ttft_s:.2f}",
    }
    if best.cost_per_hour is not None and best.requests_per_price is not None:
        cells["cost per hour"] = f"{best.cost_per_hour:,.2f}"
        cells["requests per unit of cost"] = f"{best.requests_per_price:,.1f}"
    return cells


def _print_clusters(best: OperatingPlan) -> None:
    by_cluster = {cluster.cluster_id: cluster for cluster in best.clusters}
    print_table(
        "At the limit of stability",
        ("cluster", "stage", "instances", "takes, req/s", "use"),
        [
            (
                use.cluster_id,
                use.stage.value.replace("_", " "),
                f"{by_cluster[use.cluster_id].num_decode:g}"
                if use.stage.value == "decode"
                else f"{by_cluster[use.cluster_id].num_prefill:g}",
                _rate(use.capacity_rps),
                f"{use.utilisation:.0%}",
            )
            for use in best.stages
        ],
    )
    print()


def _print_baselines(forms: list[FormPlan]) -> None:
    rows = [
        (
            mean.name,
            f"{mean.plan.num_prfaas:g} / {mean.plan.num_prefill:g} / {mean.plan.num_decode:g}",
            *(_rate(one.plan.requests_per_s) for one in (mean, exact)),
            *("-" if one.ratio is None else f"{one.ratio:.2f}x" for one in (mean, exact)),
        )
        for mean, exact in zip(*(form.baselines for form in forms), strict=True)
    ]
    if rows:
        print_table(
            "Against",
            ("", "N_prfaas / N_p / N_d", "mean form", "stable", "gain", "gain, stable"),
            rows,
        )
        print()


def _print_sensitivity(form: FormPlan) -> None:
    print_table(
        "If one thing were 10 % less or more (threshold and roles chosen anew)",
        ("", "-10 %", "+10 %", "% rate per %"),
        [
            (
                one.parameter.replace("_", " "),
                _rate(one.low_rps),
                _rate(one.high_rps),
                "-" if one.elasticity is None else f"{one.elasticity:+.2f}",
            )
            for one in form.sensitivity
        ],
    )
    print()


def _rate(rate_rps: float | None) -> str:
    return "-" if rate_rps is None else f"{rate_rps:.3f}"
