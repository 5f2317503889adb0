"""The planner: how to run what there is, what that gives, and what it is worth."""

from __future__ import annotations

import math

import attrs

from prfaas.capacity.curves import by_split, by_threshold, sensitivity
from prfaas.capacity.fleet import Fleet, LoadTable
from prfaas.capacity.operating import operate
from prfaas.capacity.plan import Baseline, DeploymentPlan, FormPlan, OperatingPlan
from prfaas.capacity.problem import Objective, PlanningCluster, PlanningProblem
from prfaas.capacity.search import whole_if_whole
from prfaas.capacity.service_times import ServiceTimes
from prfaas.capacity.throughput import RateForm
from prfaas.core import ClusterKind

_HUNDREDTHS = 0.01
_ROUNDING = 1e-9


def plan_deployment(problem: PlanningProblem) -> DeploymentPlan:
    """Choose threshold, N_p and N_d per cluster, and N_prfaas if asked to, in both forms.

    The model is that of arXiv 2604.15039 (Eq. 1 to 8), extended to several clusters on either
    side that share one threshold: each adds its own rate. Steady state, no queueing, no failures.

    Only with ``max_prfaas_nodes`` is there a choice of how much to buy, so only then do the
    objectives differ. One PRFAAS cluster is searched exhaustively; several are searched one at a
    time until none can be improved. Among equals the fewest instances win.
    """
    table = LoadTable(problem.model, problem.lengths)
    times = ServiceTimes(table)
    return DeploymentPlan(
        mean=_plan_form(problem, RateForm.MEAN, table, times),
        expectation=_plan_form(problem, RateForm.EXPECTATION, table, times),
    )


def _plan_form(
    problem: PlanningProblem, form: RateForm, table: LoadTable, times: ServiceTimes
) -> FormPlan:
    if problem.max_prfaas_nodes is not None:
        problem = _sized(problem, problem.max_prfaas_nodes, form, table)
    fleet = Fleet(problem=problem, form=form, table=table)
    threshold, split = fleet.best()
    best = operate(fleet, times, threshold, split)
    return FormPlan(
        form=form,
        best=best,
        fractional=operate(fleet, times, *fleet.best(_HUNDREDTHS)),
        baselines=_baselines(fleet, times, best),
        sensitivity=sensitivity(fleet),
        by_threshold=by_threshold(fleet, threshold, split),
        by_split=by_split(fleet, split),
    )


def _resized(problem: PlanningProblem, cluster_id: str, num_nodes: int) -> PlanningProblem:
    clusters = (
        attrs.evolve(c, num_nodes=num_nodes) if c.cluster_id == cluster_id else c
        for c in problem.clusters
    )
    return attrs.evolve(problem, clusters=clusters)


def _sized(
    problem: PlanningProblem, max_nodes: int, form: RateForm, table: LoadTable
) -> PlanningProblem:
    """Choose the size of every PRFAAS cluster."""

    def score(sized: PlanningProblem) -> float:
        rate = Fleet(problem=sized, form=form, table=table).best_rate()
        if problem.objective is Objective.THROUGHPUT:
            return rate
        return rate / (sized.cost_per_hour or math.inf)

    improved = True
    best = score(problem)
    while improved:
        improved = False
        for cluster in problem.prfaas:
            sizes = [_resized(problem, cluster.cluster_id, num) for num in range(max_nodes + 1)]
            scores = [score(sized) for sized in sizes]
            at = scores.index(max(scores))
            improved = improved or scores[at] > best * (1 + _ROUNDING)
            best, problem = scores[at], sizes[at]
        improved = improved and len(problem.prfaas) > 1
    return problem


def _baselines(fleet: Fleet, times: ServiceTimes, best: OperatingPlan) -> tuple[Baseline, ...]:
    """What the same budget gives without selective offloading.

    Homogeneous fleets are of the PD system with the most instances: as many whole instances as
    the GPUs make, or as many as the money buys, then with a part of one instance that decodes.
    The naive fleet prefills everything remotely (t = 0) and decodes on all PD instances.
    """
    problem = fleet.problem
    reference = max(problem.pd, key=lambda cluster: cluster.num_nodes)
    system = problem.systems[reference.system]
    whole = math.floor(problem.num_gpus / system.num_gpus + _ROUNDING)
    baselines = []
    if whole:
        plan = _homogeneous(fleet, times, reference.system, whole)
        baselines.append(_baseline("homogeneous, equal GPUs", plan, best))
    cost = problem.cost_per_hour
    if cost is not None and system.price_per_hour is not None:
        bought = whole_if_whole(cost / system.price_per_hour)
        plan = _homogeneous(fleet, times, reference.system, bought)
        baselines.append(_baseline("homogeneous, equal cost", plan, best))
    if any(cluster.num_nodes for cluster in problem.prfaas):
        naive = operate(fleet, times, 0.0, (0,) * len(problem.pd))
        baselines.append(_baseline("naive heterogeneous", naive, best))
    return tuple(baselines)


def _homogeneous(fleet: Fleet, times: ServiceTimes, system: str, num_nodes: float) -> OperatingPlan:
    cluster = PlanningCluster(
        cluster_id="homogeneous", kind=ClusterKind.PD, system=system, num_nodes=num_nodes
    )
    problem = attrs.evolve(fleet.problem, clusters=(cluster,), max_prfaas_nodes=None)
    homogeneous = Fleet(problem=problem, form=fleet.form, table=fleet.table)
    return operate(homogeneous, times, *homogeneous.best())


def _baseline(name: str, plan: OperatingPlan, best: OperatingPlan) -> Baseline:
    rate = plan.requests_per_s
    return Baseline(name=name, plan=plan, ratio=best.requests_per_s / rate if rate > 0 else None)
