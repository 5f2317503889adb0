"""Conformance of a `RoleBalancer`: what every policy must hold, whatever its idea."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from random import Random
from typing import TypeAlias, cast

import attrs

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.seams import (
    Arrived,
    BalancerEvent,
    ChangePhase,
    LinkRate,
    NodeDown,
    NodeLoad,
    NodeUp,
    Plan,
    RoleBalancer,
    RoleChanged,
    Served,
)

MakeBalancer: TypeAlias = Callable[[Mapping[NodeId, Role]], RoleBalancer]

_NUM_STEPS = 600
_CLUSTERS = {
    NodeId(f"{cluster}{i}"): ClusterId(cluster)
    for cluster, num in (("remote", 2), ("pd", 5), ("other", 3))
    for i in range(num)
}
_BASELINE = {
    NodeId(f"{cluster}{i}"): Role.PREFILL if i < 1 else Role.DECODE
    for cluster, num in (("pd", 5), ("other", 2))
    for i in range(num)
}


def check_balancer(make_balancer: MakeBalancer) -> None:
    """Runs every check of the `RoleBalancer` contract on fresh balancers.

    Args:
        make_balancer: returns a new balancer without history, for these configured roles of PD
            nodes; a node that is not named keeps the role that it came up with.

    Raises:
        AssertionError: the contract is broken; the message says where.
    """
    _check_still(make_balancer)
    _check_foreign_events(make_balancer)
    _check_lost_roles(make_balancer)
    for seed in range(3):
        _check_walk(make_balancer, seed)
    _check_repeatable(make_balancer)


class _Watched:
    """A balancer whose every plan is checked."""

    def __init__(self, balancer: RoleBalancer) -> None:
        self.balancer = balancer
        self.now = 0.0
        self.up: dict[NodeId, int] = {}
        self.epochs = count(1)
        self.last = balancer.plan(0.0)
        _require(not self.last.roles, f"{self.last} names nodes before any came up")

    def observe(self, event: BalancerEvent) -> Plan:
        self.balancer.observe(event, self.now)
        return self.plan()

    def plan(self) -> Plan:
        plan = self.balancer.plan(self.now)
        _require(
            self.balancer.plan(self.now) is plan,
            f"plan {plan.epoch} is another object at the same time, with nothing in between",
        )
        if plan is not self.last:
            _require(
                plan.epoch > self.last.epoch,
                f"plan {plan.epoch} follows plan {self.last.epoch}; epochs grow with every plan",
            )
        _check_roles(plan, self.up)
        self.last = plan
        return plan

    def come_up(self, node_id: NodeId) -> Plan:
        epoch = self.up[node_id] = next(self.epochs)
        return self.observe(_node_up(node_id, epoch))

    def go_down(self, node_id: NodeId) -> Plan:
        return self.observe(NodeDown(node_id=node_id, epoch=self.up.pop(node_id)))


def _check_roles(plan: Plan, up: Mapping[NodeId, int]) -> None:
    _require(
        plan.roles.keys() == up.keys(),
        f"plan {plan.epoch} has roles of {sorted(plan.roles)}, but {sorted(up)} are up",
    )
    for cluster_id in set(_CLUSTERS.values()):
        roles = {n: plan.roles[n] for n in up if _CLUSTERS[n] == cluster_id}
        if cluster_id == "remote":
            converted = [n for n, role in roles.items() if role is not Role.PREFILL]
            _require(not converted, f"plan {plan.epoch} converts PRFAAS nodes {converted}")
        elif roles:
            _require(
                any(role.prefills for role in roles.values()),
                f"plan {plan.epoch} leaves cluster {cluster_id} without prefill: {roles}",
            )
            _require(
                any(role.decodes for role in roles.values()),
                f"plan {plan.epoch} leaves cluster {cluster_id} without decode: {roles}",
            )


def _all_up(make_balancer: MakeBalancer) -> _Watched:
    watched = _Watched(make_balancer(_BASELINE))
    for node_id in _CLUSTERS:
        watched.come_up(node_id)
    return watched


def _check_still(make_balancer: MakeBalancer) -> None:
    watched = _all_up(make_balancer)
    plan = watched.plan()
    for node_id, role in _BASELINE.items():
        _require(
            plan.roles[node_id] is role,
            f"{node_id} is configured as {role.value}, and without any load the plan says "
            f"{plan.roles[node_id].value}",
        )
    for _ in range(200):
        watched.now += 5.0
        _require(watched.plan() is plan, f"the plan changed at {watched.now} s without any event")


def _check_foreign_events(make_balancer: MakeBalancer) -> None:
    watched = _all_up(make_balancer)
    plan = watched.plan()
    node_id, stranger = NodeId("pd0"), NodeId("stranger")
    events: list[BalancerEvent] = [
        NodeDown(node_id=stranger, epoch=9),
        NodeDown(node_id=node_id, epoch=watched.up[node_id] - 1),
        attrs.evolve(_node_up(node_id, 0), role=Role.DECODE),
        LinkRate(link_bps=None),
        cast("BalancerEvent", _Foreign()),
    ]
    for name in (node_id, stranger):
        for phase in ChangePhase:
            events += [
                RoleChanged(node_id=name, plan_epoch=epoch, role=Role.DECODE, phase=phase)
                for epoch in (plan.epoch, plan.epoch + 7)
            ]
        events.append(
            NodeLoad(
                node_id=name,
                epoch=watched.up.get(name, 0) - 1,
                prefill_busy=1.0,
                decode_busy=1.0,
                queued_tokens=10**9,
                num_waiting=10**6,
            )
        )
    for event in events:
        _require(watched.observe(event) is plan, f"{event} changed the plan; it means nothing")


def _check_lost_roles(make_balancer: MakeBalancer) -> None:
    for lost in (["pd0"], ["pd1", "pd2", "pd3", "pd4"]):
        watched = _all_up(make_balancer)
        for name in lost:
            watched.go_down(NodeId(name))
        for name in lost:
            watched.come_up(NodeId(name))
    watched = _all_up(make_balancer)
    for node_id in sorted(watched.up):
        watched.go_down(node_id)
    _require(not watched.plan().roles, f"{watched.last} names nodes when none is up")


def _check_walk(make_balancer: MakeBalancer, seed: int) -> None:
    """Random traffic, nodes that come and go, and changes that end well, badly or never."""
    rng = Random(seed)
    watched = _all_up(make_balancer)
    asked: dict[NodeId, tuple[int, Role]] = {}
    for _ in range(_NUM_STEPS):
        watched.now += rng.choice((0.01, 0.5, 2.0))
        plan = watched.plan()
        for node_id, role in plan.roles.items():
            if asked.get(node_id, (0, None))[1] is not role:
                asked[node_id] = plan.epoch, role
        watched.observe(_some_event(rng, watched, asked))
        if rng.random() < 0.03:
            node_id = rng.choice(sorted(_CLUSTERS))
            if node_id in watched.up and rng.random() < 0.5:
                watched.go_down(node_id)
            else:
                watched.come_up(node_id)


def _check_repeatable(make_balancer: MakeBalancer) -> None:
    one, two = _all_up(make_balancer), _all_up(make_balancer)
    rng = Random(17)
    asked = {node_id: (one.last.epoch, role) for node_id, role in one.last.roles.items()}
    for _ in range(300):
        one.now += 1.0
        two.now = one.now
        event = _some_event(rng, one, asked)
        first, second = one.observe(event), two.observe(event)
        _require(first == second, f"the same history gave {first} and {second}")


def _some_event(
    rng: Random, watched: _Watched, asked: Mapping[NodeId, tuple[int, Role]]
) -> BalancerEvent:
    known = sorted(node_id for node_id in watched.up if node_id in asked)
    kind = rng.randrange(8)
    if kind < 3 or not known:
        # Each tenth of a walk has its own mix, so that there is something to balance.
        scale = 10 ** (1 + int(watched.now / 40) % 4)
        return Arrived(routed_tokens=rng.randrange(1, 10 * scale))
    if kind == 3:
        return Served(output_tokens=rng.randrange(1, 3000), step_s=rng.uniform(0.001, 0.1))
    if kind == 4:
        return LinkRate(link_bps=rng.choice((None, 1e8, 1e10)))
    node_id = rng.choice(known)
    if kind == 5:
        epoch, role = asked[node_id]
        phase = rng.choice((*ChangePhase, ChangePhase.DONE))
        return RoleChanged(node_id=node_id, plan_epoch=epoch, role=role, phase=phase)
    return NodeLoad(
        node_id=node_id,
        epoch=watched.up[node_id],
        prefill_busy=rng.random(),
        decode_busy=rng.random(),
        queued_tokens=rng.randrange(10**6),
        num_waiting=rng.randrange(10),
    )


@attrs.frozen
class _Foreign:
    """An event of a later version."""


def _node_up(node_id: NodeId, epoch: int) -> NodeUp:
    cluster_id = _CLUSTERS[node_id]
    is_remote = cluster_id == "remote"
    return NodeUp(
        node_id=node_id,
        cluster_id=cluster_id,
        kind=ClusterKind.PRFAAS if is_remote else ClusterKind.PD,
        role=Role.PREFILL if is_remote else Role.DECODE,
        epoch=epoch,
        num_slots=4,
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
