"""The paper's case study as simulated clusters, for tests and benchmarks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

import attrs

from prfaas.core import ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.paper.profiles import H20, H200, LENGTHS
from prfaas.policy import LoadLedger, ThresholdController, ThresholdRouter, ThresholdSettings
from prfaas.seams import (
    BalancerEvent,
    Plan,
    RoleBalancer,
    RoleChanged,
    Router,
    RouteReason,
    RoutingDecision,
)
from prfaas.simulator import (
    Scenario,
    SimulatedLink,
    SimulatedNode,
    Simulation,
    SimulationResult,
    Simulator,
)
from prfaas.spec import preset
from prfaas.workload import Arrival

SPEC = preset("paper-1t")
T = 19_400
PD, REMOTE = ClusterId("pd"), ClusterId("prfaas")
EVERYTHING = 1 << 20
"""A threshold that no prompt exceeds."""


def node(name: str, role: Role, **settings: object) -> SimulatedNode:
    """A node of the PD cluster, or of the PRFAAS cluster if its name says so."""
    is_remote = name.startswith("remote")
    return SimulatedNode(
        **{
            "node_id": NodeId(name),
            "cluster_id": REMOTE if is_remote else PD,
            "kind": ClusterKind.PRFAAS if is_remote else ClusterKind.PD,
            "role": role,
            "prefill": (H200 if is_remote else H20).prefill_s,
            **settings,
        }
    )


def clusters(
    num_remote: int, num_prefill: int, num_decode: int, **settings: object
) -> tuple[SimulatedNode, ...]:
    return (
        *(node(f"remote{i}", Role.PREFILL, **settings) for i in range(num_remote)),
        *(node(f"prefill{i}", Role.PREFILL, **settings) for i in range(num_prefill)),
        *(node(f"decode{i}", Role.DECODE, **settings) for i in range(num_decode)),
    )


def scenario(nodes: Sequence[SimulatedNode], **settings: object) -> Scenario:
    link = SimulatedLink(schedule=((0.0, 100e9),))
    return Scenario(**{"spec": SPEC, "nodes": nodes, "link": link, **settings})


HOMOGENEOUS = (clusters(0, 9, 3), EVERYTHING)
NAIVE = (clusters(4, 0, 8), 0)
PRFAAS_PD = (clusters(4, 3, 5), T)
"""Nodes and threshold of the three deployments of the paper's Table 6."""


class Script(RoleBalancer):
    """Publishes plans at given times, and remembers what it was told of changes of roles.

    Args:
        plans: (second, roles) or (second, roles, prefill budgets).
        t: the threshold of all of them.
    """

    def __init__(self, *plans: tuple, t: int = T) -> None:
        self.plans = [
            (
                at_s,
                Plan(
                    epoch=epoch,
                    roles=roles,
                    threshold_band=(t, t),
                    prefill_budgets=budgets[0] if budgets else {},
                ),
            )
            for epoch, (at_s, roles, *budgets) in enumerate([(0.0, {}), *plans])
        ]
        self.changes: list[tuple[float, RoleChanged]] = []
        self.events: Counter[type] = Counter()

    def observe(self, event: BalancerEvent, now: float) -> None:
        self.events[type(event)] += 1
        if isinstance(event, RoleChanged):
            self.changes.append((now, event))

    def plan(self, now: float) -> Plan:
        return max((p for p in self.plans if p[0] <= now), key=lambda p: p[1].epoch)[1]


def simulator(
    world: Scenario,
    threshold_tokens: int = T,
    *,
    seed: int = 0,
    router: Router | None = None,
    balancer: RoleBalancer | None = None,
) -> Simulator:
    """A scenario under the paper's router at a fixed threshold, or under another one."""
    controller = ThresholdController(
        world.spec,
        band=(threshold_tokens, threshold_tokens),
        # Nothing to search, and links that die are not what these tests are about.
        settings=ThresholdSettings(period_s=1e6, down_after_s=1e6),
    )
    return Simulator(
        world,
        router=router or ThresholdRouter(world.spec, controller),
        ledger=LoadLedger.for_spec(world.spec),
        balancer=balancer or Script(t=threshold_tokens),
        controller=controller,
        seed=seed,
    )


def prompt_lengths(num: int, seed: int = 0) -> list[int]:
    """``num`` evenly spaced quantiles of the paper's lengths in random order: a sample whose mean
    has no noise."""
    lengths = [round(LENGTHS.quantile((i + 0.5) / num)) for i in range(num)]
    Random(seed).shuffle(lengths)
    return lengths


def arrivals(
    num: int, rate_rps: float = math.inf, *, output_tokens: int = 1024, seed: int = 0
) -> Iterator[Arrival]:
    """Poisson arrivals with the paper's lengths; all at once at an infinite rate."""
    rng, now = Random(seed + 1), 0.0
    for i, num_tokens in enumerate(prompt_lengths(num, seed)):
        now += rng.expovariate(rate_rps) if rate_rps < math.inf else 0.0
        yield Arrival(
            request_id=RequestId(f"r{i}"),
            arrived_s=now,
            num_tokens=num_tokens,
            output_tokens=output_tokens,
        )


def one(
    num_tokens: int, *, at_s: float = 0.0, name: str = "r", output_tokens: int = 100
) -> Arrival:
    """A request without known content."""
    return Arrival(
        request_id=RequestId(name),
        arrived_s=at_s,
        num_tokens=num_tokens,
        output_tokens=output_tokens,
    )


def at_rest(ledger: LoadLedger) -> bool:
    """Whether every count of the ledger went back to 0."""
    ledger.check()
    return (
        ledger.num_in_flight == 0
        and ledger.link_backlog_bytes() == 0
        and all(view.num_active == view.queued_tokens == 0 for view in ledger.nodes())
    )


def stepped(simulation: Simulation) -> SimulationResult:
    """Runs to the end and checks after every event."""
    while simulation.step():
        simulation.check()
    return simulation.result()


@attrs.define
class LeastWork(Router):
    """Joins the prefill node that is free first, in seconds, which is one shared queue per stage.

    It knows the profile and that nobody else sends work, so no node's load has to be measured.
    """

    nodes: Sequence[SimulatedNode]
    t: int
    free_s: dict[NodeId, float] = attrs.field(factory=dict)
    num_decoding: dict[NodeId, int] = attrs.field(factory=dict)

    @property
    def threshold_tokens(self) -> int:
        return self.t

    def route(self, request, view, now, rng):
        is_long = request.num_tokens > self.t
        kind = ClusterKind.PRFAAS if is_long else ClusterKind.PD
        prefills = [n for n in self.nodes if n.kind is kind and n.role is Role.PREFILL]
        decodes = [n for n in self.nodes if n.role is Role.DECODE]
        prefill = min(prefills, key=lambda n: self.free_s.get(n.node_id, 0.0))
        decode = min(decodes, key=lambda n: self.num_decoding.get(n.node_id, 0))
        start_s = max(now, self.free_s.get(prefill.node_id, 0.0))
        self.free_s[prefill.node_id] = start_s + prefill.prefill(request.num_tokens, 0)
        self.num_decoding[decode.node_id] = self.num_decoding.get(decode.node_id, 0) + 1
        return RoutingDecision(
            request_id=request.request_id,
            decode_node=decode.node_id,
            prefill_node=prefill.node_id,
            offloaded=is_long,
            reason=RouteReason.LONG if is_long else RouteReason.SHORT,
            cached_tokens=0,
            uncached_tokens=request.num_tokens,
            routed_tokens=request.num_tokens,
            held_tokens=0,
            threshold_tokens=self.t,
            predicted_bytes=0,
            predicted_ttft_s=None,
            view_version=view.version,
        )

    def observe(self, outcome, now):
        self.num_decoding[outcome.decision.decode_node] -= 1
