"""A fluid model of PD clusters for the role balancer: stages with rates, queues with lengths."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from random import Random

import attrs

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.paper.profiles import H20, H200
from prfaas.policy import (
    BalancerSettings,
    SplitLoad,
    SplitModel,
    ThroughputBalancer,
    lognormal_quantiles,
)
from prfaas.seams import (
    Arrived,
    ChangePhase,
    NodeDown,
    NodeLoad,
    NodeUp,
    Plan,
    RoleBalancer,
    RoleChanged,
    Served,
)
from prfaas.spec import preset

SPEC = preset("paper-1t")
SLOTS, STEP_S, OUTPUT = 20, 0.025, 1024
LENGTHS = lognormal_quantiles(num=512)
BAND = (0, 131_072)
REMOTE = tuple(NodeId(f"r{i}") for i in range(4))
LOCAL = tuple(NodeId(f"n{i}") for i in range(8))
# Reacts at once, for tests that are not about patience.
EAGER: dict[str, object] = {"cooldown_s": 0.0, "num_confirmations": 1, "window_s": 60.0}
STEADY = EAGER | {"window_s": 300.0}
DRAIN_S = {Role.DECODE: STEP_S * OUTPUT, Role.PREFILL: 3.0, Role.MIXED: 3.0}


def split_model(
    lengths: Sequence[int] = LENGTHS, output_tokens: float = OUTPUT, *, num_remote: float = 4
) -> SplitModel:
    return SplitModel(
        spec=SPEC,
        weights={n: count / len(lengths) for n, count in Counter(lengths).items()},
        num_remote=num_remote,
        remote_prefill_s=H200.prefill_s,
        local_prefill_s=H20.prefill_s,
        decode_node_s=output_tokens * STEP_S / SLOTS,
        link_bps=100e9,
        band=BAND,
    )


@cache
def _true_load(
    lengths: tuple[int, ...], output_tokens: float, num_remote: int, prefill: float, decode: int
) -> SplitLoad:
    return split_model(lengths, output_tokens, num_remote=num_remote).at(prefill, decode)


def split_roles(num_prefill: int, nodes: Sequence[NodeId] = LOCAL) -> dict[NodeId, Role]:
    return {n: Role.PREFILL if i < num_prefill else Role.DECODE for i, n in enumerate(nodes)}


def make_balancer(
    num_prefill: int = 3, nodes: Sequence[NodeId] = LOCAL, **settings: object
) -> ThroughputBalancer:
    return ThroughputBalancer(
        SPEC,
        baseline=split_roles(num_prefill, nodes),
        band=BAND,
        settings=BalancerSettings(**settings),  # type: ignore[arg-type]
        remote_prefill_s=H200.prefill_s,
        local_prefill_s=H20.prefill_s,
        link_bps=100e9,
        num_slots=SLOTS,
        decode_step_s=STEP_S,
        output_tokens=OUTPUT,
    )


class Fluid:
    """Feeds a balancer with arrivals, endings and loads, and carries out its plans.

    Args:
        balancer: under test.
        nodes: PD nodes, all of one cluster; ``num_remote`` PRFAAS nodes besides.
        rng: makes arrivals Poisson and lengths random; without it both are even.
        drain_s: from the old role to seconds of a change; None means that changes never end.
    """

    def __init__(
        self,
        balancer: RoleBalancer,
        *,
        nodes: Sequence[NodeId] = LOCAL,
        num_remote: int = 4,
        rng: Random | None = None,
        drain_s: Callable[[Role], float | None] = DRAIN_S.get,
    ) -> None:
        self.balancer, self.rng, self.drain_s = balancer, rng, drain_s
        self.now, self.due, self.index = 0.0, 0.0, 0
        self.lengths: Sequence[int] = LENGTHS
        self.output_tokens = OUTPUT
        self.roles: dict[NodeId, Role] = {}
        self.epochs: defaultdict[NodeId, int] = defaultdict(int)
        self.changing: dict[NodeId, tuple[int, float | None]] = {}
        self.num_done = 0
        self.served_s: Counter[tuple[NodeId, Role]] = Counter()
        self.num_remote = num_remote
        for node_id in REMOTE[:num_remote]:
            self.come_up(node_id, Role.PREFILL, ClusterKind.PRFAAS)
        for node_id in nodes:
            self.come_up(node_id, Role.MIXED)
        roles = self.plan().roles
        self.roles = {node_id: roles[node_id] for node_id in nodes}

    def come_up(self, node_id: NodeId, role: Role, kind: ClusterKind = ClusterKind.PD) -> None:
        self.epochs[node_id] += 1
        up = NodeUp(
            node_id=node_id,
            cluster_id=ClusterId(kind.value),
            kind=kind,
            role=role,
            epoch=self.epochs[node_id],
            num_slots=SLOTS,
        )
        self.balancer.observe(up, self.now)
        if kind is ClusterKind.PD:
            self.roles[node_id] = self.plan().roles[node_id]

    def go_down(self, node_id: NodeId) -> None:
        del self.roles[node_id]
        self.changing.pop(node_id, None)
        self.balancer.observe(NodeDown(node_id=node_id, epoch=self.epochs[node_id]), self.now)

    def plan(self) -> Plan:
        return self.balancer.plan(self.now)

    def load(self) -> SplitLoad:
        """The true load of the split that serves now."""
        num = Counter(self.roles.values())
        return _true_load(
            tuple(self.lengths),
            self.output_tokens,
            self.num_remote,
            num[Role.PREFILL] or 1e-6,
            num[Role.DECODE],
        )

    def best(self) -> SplitLoad:
        """The true load of the best whole split."""
        model = split_model(self.lengths, self.output_tokens, num_remote=self.num_remote)
        return model.best_whole(len(self.roles))

    def run(self, seconds: float, rps: float, *, loads_every_s: float = 10.0) -> None:
        """Lets time pass, second by second."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            self.arrive(rps)
            if self.now % loads_every_s == 0:
                self.report(rps)
            self.carry_out()
            for node_id, role in self.roles.items():
                self.served_s[node_id, role] += 1

    def arrive(self, rps: float) -> None:
        gap = self.rng.expovariate if self.rng else (lambda rate: 1 / rate)
        while rps and self.due <= self.now:
            self.due += gap(rps)
            # A stride that is coprime to 512 takes every length once per 512 arrivals.
            self.index = (self.index + 197) % len(self.lengths)
            tokens = self.rng.choice(self.lengths) if self.rng else self.lengths[self.index]
            self.balancer.observe(Arrived(routed_tokens=tokens), self.now)
            served = Served(output_tokens=self.output_tokens, step_s=STEP_S)
            self.balancer.observe(served, self.now)
        if not rps:
            self.due = self.now

    def report(self, rps: float) -> None:
        load = self.load()
        for node_id, role in self.roles.items():
            sample = NodeLoad(
                node_id=node_id,
                epoch=self.epochs[node_id],
                prefill_busy=min(1.0, rps * load.prefill_s) if role.prefills else 0.0,
                decode_busy=min(1.0, rps * load.decode_s) if role.decodes else 0.0,
                queued_tokens=0,
                num_waiting=0,
            )
            self.balancer.observe(sample, self.now)

    def carry_out(self) -> None:
        """Begins the changes that the plan asks for, and ends those that are drained."""
        plan = self.plan()
        for node_id, role in tuple(self.roles.items()):
            wanted = plan.roles[node_id]
            if wanted is role:
                self.changing.pop(node_id, None)
            elif node_id not in self.changing:
                drain_s = self.drain_s(role)
                ends_s = None if drain_s is None else self.now + drain_s
                self.changing[node_id] = (plan.epoch, ends_s)
                self.tell(node_id, plan.epoch, wanted, ChangePhase.STARTED)
            elif (ends_s := self.changing[node_id][1]) is not None and ends_s <= self.now:
                epoch, _ = self.changing.pop(node_id)
                self.roles[node_id] = wanted
                self.num_done += 1
                self.tell(node_id, epoch, wanted, ChangePhase.DONE)

    def tell(self, node_id: NodeId, epoch: int, role: Role, phase: ChangePhase) -> None:
        self.balancer.observe(
            RoleChanged(node_id=node_id, plan_epoch=epoch, role=role, phase=phase), self.now
        )


def num_prefill(fluid: Fluid) -> int:
    return Counter(fluid.roles.values())[Role.PREFILL]


def planned_prefill(fluid: Fluid) -> int:
    roles = fluid.plan().roles
    return sum(roles[node_id] is Role.PREFILL for node_id in fluid.roles)


def balancer_of(fluid: Fluid) -> ThroughputBalancer:
    assert isinstance(fluid.balancer, ThroughputBalancer)
    fluid.balancer.check()
    return fluid.balancer


def reason(fluid: Fluid) -> str:
    found = balancer_of(fluid).assessment
    assert found is not None
    return found.reason


def sample(fluid: Fluid, node_id: NodeId, **changes: object) -> NodeLoad:
    load = NodeLoad(
        node_id=node_id,
        epoch=fluid.epochs[node_id],
        prefill_busy=0.0,
        decode_busy=0.0,
        queued_tokens=0,
        num_waiting=0,
    )
    return attrs.evolve(load, **changes)  # type: ignore[arg-type]
