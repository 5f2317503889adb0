"""A plan as text: its tables, and what it does not know."""

from __future__ import annotations

from prfaas.capacity import (
    DeploymentPlan,
    FormPlan,
    OperatingPlan,
    PlanningCluster,
    PlanningProblem,
    RateForm,
)
from prfaas.cli.config import Config
from prfaas.cli.systems import PAPER_SYSTEMS
from prfaas.cli.table import print_table
from prfaas.core import ClusterKind

_PAPER_MODEL = "paper-1t"


def caveats(config: Config, problem: PlanningProblem) -> list[str]:
    """Say what of the configuration the plan does not know, one line each."""
    found = []
    of_the_paper = [
        cluster.system
        for cluster in problem.clusters
        if cluster.system in PAPER_SYSTEMS and cluster.system not in config.systems
    ]
    if of_the_paper and problem.model.name != _PAPER_MODEL:
        found.append(
            f"{' and '.join(dict.fromkeys(of_the_paper))} took their times with {_PAPER_MODEL}, "
            f"not with {problem.model.name}; give times of your own for real rates"
        )
    fixed = [
        name
        for name, cluster in config.clusters.items()
        if cluster.prefill is not None or cluster.decode is not None
    ]
    if fixed:
        found.append(
            f"the plan chooses the roles of {' and '.join(fixed)}; prefill and decode of the "
            "configuration are for prfaas simulate"
        )
    return found


def print_plan(problem: PlanningProblem, plan: DeploymentPlan) -> None:
    """Print the plan as tables: both forms side by side, then the expectation form in detail."""
    forms = [plan.of(form) for form in (RateForm.MEAN, RateForm.EXPECTATION)]
    nodes = ", ".join(
        f"{cluster.cluster_id} {_num_nodes(problem, cluster)} x {cluster.system}"
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


def _num_nodes(problem: PlanningProblem, cluster: PlanningCluster) -> str:
    if cluster.kind is ClusterKind.PRFAAS and problem.max_prfaas_nodes is not None:
        return f"0 to {problem.max_prfaas_nodes}"
    return f"{cluster.num_nodes:g}"


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
