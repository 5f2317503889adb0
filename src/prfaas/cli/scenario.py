"""From a configuration to a simulation: nodes, link, policies, arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from random import Random

import attrs

from prfaas.capacity import PlanningCluster, PlanningProblem, RateForm, System, plan_deployment
from prfaas.capacity.fleet import Fleet, LoadTable
from prfaas.cli.config import Config
from prfaas.cli.plan import problem_of
from prfaas.cli.systems import model_of, trace_of
from prfaas.core import ClusterId, ClusterKind, NodeId, Role, cdiv
from prfaas.errors import ConfigError
from prfaas.policy import (
    FixedRoles,
    LoadLedger,
    MaxWeightRouter,
    MaxWeightSettings,
    ThresholdController,
    ThresholdRouter,
    ThresholdSettings,
    ThroughputBalancer,
)
from prfaas.seams import RoleBalancer, Router
from prfaas.simulator import Scenario, SimulatedLink, SimulatedNode, SimulationResult, Simulator
from prfaas.simulator.simulator import OnProgress
from prfaas.spec import ModelSpec
from prfaas.traces import Trace
from prfaas.workload import Arrival, at_rate, poisson, repeated

_DEFAULT_REQUESTS = 5000
_PRIOR_LENGTHS = 64
_MAX_THRESHOLD = 2**31
_NEVER_S = 1e9


@attrs.frozen(kw_only=True)
class Run:
    """A simulation ready to start.

    Attributes:
        arrivals: what comes in, in order.
        threshold_tokens: t at the start; None where the policy has none.
        roles: N_p and N_d of every PD cluster at the start.
        cost_per_hour: of all clusters; None when a price is not known.
    """

    config: Config
    scenario: Scenario
    arrivals: Sequence[Arrival]
    threshold_tokens: int | None
    roles: dict[str, tuple[int, int]]
    cost_per_hour: float | None
    simulator: Simulator

    def start(self, on_progress: OnProgress | None = None) -> SimulationResult:
        """Simulate. A run can be started once: its policies keep what they learn."""
        simulate, clients = self.config.simulate, self.config.simulate.clients
        # Without a limit the run goes on until the last request has ended.
        until_s = simulate.duration_s if clients is not None else None
        if clients is not None:
            return self.simulator.run_closed(
                self.arrivals, clients, until_s=until_s, on_progress=on_progress
            )
        return self.simulator.run(self.arrivals, until_s=until_s, on_progress=on_progress)


def run_of(config: Config) -> Run:
    """Build everything that a simulation needs.

    Raises:
        ConfigError: names the key.
    """
    trace = trace_of(config)
    model = model_of(config)
    if trace is not None and trace.granule_tokens is not None:
        # Only keys over the same granule can be looked up.
        model = attrs.evolve(model, granule_tokens=trace.granule_tokens)
    problem = problem_of(config, trace)
    threshold, roles = _operating_point(config, problem)
    scenario = Scenario(
        spec=model,
        nodes=_nodes(config, problem, roles),
        link=_link(config),
        timeout_s=config.simulate.timeout_s,
        keep_decisions=True,
    )
    return Run(
        config=config,
        scenario=scenario,
        arrivals=arrivals_of(config, problem, trace),
        threshold_tokens=None if config.simulate.policy == "max_weight" else threshold,
        roles=roles,
        cost_per_hour=problem.cost_per_hour,
        simulator=_simulator(config, problem, scenario, threshold),
    )


def arrivals_of(config: Config, problem: PlanningProblem, trace: Trace | None) -> Sequence[Arrival]:
    """Make the requests: those of the trace at the wished rate, or Poisson arrivals.

    A trace that is shorter than wished is repeated with fresh prefixes.

    Raises:
        ConfigError: a law of lengths without a rate.
    """
    simulate, rate_rps = config.simulate, config.workload.rate_rps
    wanted, duration_s = simulate.requests, simulate.duration_s
    if trace is None:
        if rate_rps is None and simulate.clients is None:
            raise ConfigError("workload.rate_rps is missing; add it, or --rate, or clients")
        if wanted is None and duration_s is None:
            wanted = _DEFAULT_REQUESTS
        return tuple(
            poisson(
                rate_rps or 1.0,
                problem.lengths,
                round(problem.output_tokens),
                Random(simulate.seed),
                duration_s=None if simulate.clients else duration_s,
                num_requests=wanted or (_DEFAULT_REQUESTS if simulate.clients else None),
            )
        )
    arrivals: Sequence[Arrival] = trace.arrivals
    if config.workload.output_tokens is not None:
        output_tokens = config.workload.output_tokens
        arrivals = [attrs.evolve(one, output_tokens=output_tokens) for one in arrivals]
    if rate_rps is not None:
        arrivals = tuple(at_rate(arrivals, rate_rps))
    if wanted is not None:
        arrivals = tuple(repeated(arrivals, cdiv(wanted, len(arrivals))))[:wanted]
    if duration_s is not None and simulate.clients is None:
        end_s = duration_s
        arrivals = tuple(takewhile(lambda one: one.arrived_s < end_s, arrivals))
    return arrivals


def _operating_point(
    config: Config, problem: PlanningProblem
) -> tuple[int, dict[str, tuple[int, int]]]:
    """Threshold and roles: as configured, the rest from the planner at the limit of stability."""
    best = plan_deployment(problem).of(RateForm.EXPECTATION).best
    found = best.threshold_tokens
    planned = {cluster.cluster_id: cluster for cluster in best.clusters}
    roles = {}
    for name, cluster in config.clusters.items():
        if cluster.kind == "prfaas":
            continue
        prefill, decode = cluster.prefill, cluster.decode
        if prefill is None and decode is None:
            prefill = round(planned[name].num_prefill)
        if prefill is None:
            prefill = cluster.nodes - (decode or 0)
        if decode is None:
            decode = cluster.nodes - prefill
        if prefill < 0 or decode < 0 or prefill + decode != cluster.nodes:
            raise ConfigError(
                f"clusters.{name} has {cluster.nodes} nodes, of which {prefill} prefill and "
                f"{decode} decode; make them add up"
            )
        roles[name] = (prefill, decode)
    wanted = config.simulate.threshold
    if not isinstance(wanted, str):
        return round(min(wanted, _MAX_THRESHOLD)), roles
    if found is not None and any(p != planned[name].num_prefill for name, (p, _) in roles.items()):
        found = _best_threshold(problem, roles)
    return _MAX_THRESHOLD if found is None else round(found), roles


def _best_threshold(problem: PlanningProblem, roles: dict[str, tuple[int, int]]) -> float:
    """The planner's t at the limit of stability for roles that are not the planner's."""
    table = LoadTable(problem.model, problem.lengths)
    fleet = Fleet(problem=problem, form=RateForm.EXPECTATION, table=table)
    return fleet.best_threshold(tuple(roles[cluster.cluster_id][0] for cluster in problem.pd))


def _nodes(
    config: Config, problem: PlanningProblem, roles: dict[str, tuple[int, int]]
) -> list[SimulatedNode]:
    nodes = []
    for name, cluster in config.clusters.items():
        system = problem.systems[cluster.system]
        section = config.systems.get(cluster.system)
        pool_gb = None if section is None else section.pool_gb
        num_prefill = cluster.nodes if cluster.kind == "prfaas" else roles[name][0]
        nodes += [
            SimulatedNode(
                node_id=NodeId(f"{name}-{i}"),
                cluster_id=ClusterId(name),
                kind=ClusterKind(cluster.kind),
                role=Role.PREFILL if i < num_prefill else Role.DECODE,
                prefill=system.prefill.prefill_s,
                decode_step_s=system.decode_step_s or 1.0,
                num_slots=max(1, int(system.batch_size or 1)),
                pool_bytes=None if pool_gb is None else int(pool_gb * 1e9),
            )
            for i in range(cluster.nodes)
        ]
    return nodes


def _link(config: Config) -> SimulatedLink:
    link = config.link
    changes = [(at_s, gbps) for at_s, gbps in link.schedule]
    if not changes or changes[0][0] > 0:
        changes.insert(0, (0.0, link.egress_gbps))
    left = 1 - link.share_of_others
    return SimulatedLink(
        schedule=tuple((at_s, gbps * 1e9 * left) for at_s, gbps in changes),
        rtt_s=link.rtt_ms / 1000,
    )


def _simulator(
    config: Config, problem: PlanningProblem, scenario: Scenario, threshold: int
) -> Simulator:
    simulate, spec = config.simulate, scenario.spec
    lengths = problem.lengths
    band = (threshold, threshold)
    if simulate.threshold == "adaptive":
        band = (max(1, int(lengths.min_tokens)), max(threshold, int(lengths.max_tokens)))
    remote, local = _only_system(problem, problem.prfaas), _only_system(problem, problem.pd)
    controller = ThresholdController(
        spec,
        band=band,
        prior_tokens=[
            max(1, round(lengths.quantile((i + 0.5) / _PRIOR_LENGTHS)))
            for i in range(_PRIOR_LENGTHS)
        ],
        # A band of one value leaves nothing to search for.
        settings=ThresholdSettings(period_s=_NEVER_S) if band[0] == band[1] else None,
        link_bps=_assumed_bps(problem),
        remote_prefill_s=None if remote is None else remote.prefill.prefill_s,
        local_prefill_s=None if local is None else local.prefill.prefill_s,
    )
    return Simulator(
        scenario,
        router=_router(config, problem, spec, controller),
        ledger=LoadLedger.for_spec(spec),
        balancer=_balancer(config, problem, scenario, band),
        controller=controller,
        seed=simulate.seed,
    )


def _router(
    config: Config, problem: PlanningProblem, spec: ModelSpec, controller: ThresholdController
) -> Router:
    profiles = {
        ClusterId(cluster.cluster_id): problem.systems[cluster.system].prefill.prefill_s
        for cluster in problem.clusters
    }
    if config.simulate.policy == "threshold":
        return ThresholdRouter(spec, controller, profiles=profiles)
    return MaxWeightRouter(
        spec,
        settings=MaxWeightSettings(link_bps=_assumed_bps(problem)),
        profiles=profiles,
        is_link_down=controller.is_link_down,
    )


def _balancer(
    config: Config, problem: PlanningProblem, scenario: Scenario, band: tuple[int, int]
) -> RoleBalancer:
    roles = {n.node_id: n.role for n in scenario.nodes if n.kind is ClusterKind.PD}
    if config.simulate.balancer == "fixed":
        return FixedRoles(roles, band=band)
    remote, local = _only_system(problem, problem.prfaas), _only_system(problem, problem.pd)
    return ThroughputBalancer(
        scenario.spec,
        baseline=roles,
        band=band,
        remote_prefill_s=None if remote is None else remote.prefill.prefill_s,
        local_prefill_s=None if local is None else local.prefill.prefill_s,
        link_bps=_assumed_bps(problem),
        decode_step_s=None if local is None else local.decode_step_s,
        output_tokens=problem.output_tokens,
    )


def _assumed_bps(problem: PlanningProblem) -> float:
    """What the policies take for the link's rate until they have measured it."""
    return problem.egress_bps * (1 - problem.egress_share_of_others)


def _only_system(problem: PlanningProblem, clusters: Sequence[PlanningCluster]) -> System | None:
    """The system of all these clusters; None where they differ, so that rates are measured."""
    names = {cluster.system for cluster in clusters}
    return problem.systems[names.pop()] if len(names) == 1 else None
