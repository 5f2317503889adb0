"""The nodes of a simulation, kept in step with the ledger and the balancer's plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prfaas.core import NodeId, Role
from prfaas.policy import LoadLedger, ThresholdController
from prfaas.seams import (
    CacheEvent,
    ChangePhase,
    LinkRate,
    NodeDown,
    NodeUp,
    RoleBalancer,
    RoleChanged,
)
from prfaas.simulator.agenda import Agenda, Call
from prfaas.simulator.link import FluidLink
from prfaas.simulator.listeners import FleetListener
from prfaas.simulator.node import Node
from prfaas.simulator.result import RoleConversion
from prfaas.simulator.scenario import Failure, Scenario


class Fleet:
    """Nodes, their roles and their crashes, as `prfaas.runtime` keeps them.

    Args:
        scenario: the nodes and what happens to them.
        agenda: the time.
        ledger: told of every change.
        balancer: says which role each node should have.
        controller: gets the band of the plan, if there is one.
        counters: counts what happens.
        listener: hears what happens.
    """

    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        *,
        ledger: LoadLedger,
        balancer: RoleBalancer,
        controller: ThresholdController | None,
        counters: Counter[str],
        listener: FleetListener,
    ) -> None:
        self._spec = scenario.spec
        self._event_delay_s = scenario.event_delay_s
        self._agenda = agenda
        self._ledger = ledger
        self._balancer = balancer
        self._controller = controller
        self._counters = counters
        self._listener = listener
        self._num_changes = 0
        self._applied = (-1, -1)
        self._is_applying = False
        self.conversions: list[RoleConversion] = []
        self.nodes: dict[NodeId, Node] = {
            config.node_id: Node(config, scenario.spec, agenda, listener)
            for config in scenario.nodes
        }
        for failure in scenario.failures:
            self._plan_crash(failure)

    def __repr__(self) -> str:
        up = sum(node.is_up for node in self.nodes.values())
        return f"<Fleet {up} of {len(self.nodes)} nodes up>"

    def start(self) -> None:
        """Takes all nodes into service."""
        for node in self.nodes.values():
            self._enlist(node)
        self.apply_plan()

    def control(self, egress: FluidLink) -> None:
        """The periodic part: link estimate, loads, plan, threshold."""
        now = self._agenda.now
        self._ledger.observe_link(egress.take_deliveries(), now)
        self._balancer.observe(LinkRate(link_bps=self._ledger.link_bps()), now)
        for load in self._ledger.loads(now):
            self._balancer.observe(load, now)
        self.apply_plan()
        if self._controller is not None:
            self._controller.update(self._ledger, now)

    def apply_plan(self) -> None:
        """Puts the balancer's plan into force, if it is a new one or the nodes changed."""
        if self._is_applying:
            return  # the loop below looks again
        self._is_applying = True
        while True:
            plan = self._balancer.plan(self._agenda.now)
            state = (plan.epoch, self._num_changes)
            if state == self._applied:
                break
            self._applied = state
            if self._controller is not None:
                self._controller.set_band(plan.threshold_band)
            for node in self.nodes.values():
                if node.is_up:
                    node.pace(plan.prefill_budgets.get(node.node_id))
                    self._set_role(node, plan.roles.get(node.node_id, node.role), plan.epoch)
            self._listener.fleet_changed()
        self._is_applying = False

    def drained(self, node: Node) -> None:
        """No work of the node's earlier role is left."""
        now = self._agenda.now
        self._ledger.draining(node.node_id, False)
        for i, conversion in enumerate(self.conversions):
            if conversion.node_id == node.node_id and conversion.done_s is None:
                self.conversions[i] = RoleConversion(
                    node_id=node.node_id,
                    role=node.role,
                    plan_epoch=conversion.plan_epoch,
                    at_s=conversion.at_s,
                    done_s=now,
                )
        self._tell(node, node.conversion.plan_epoch, ChangePhase.DONE)
        self.apply_plan()
        self._listener.fleet_changed()

    def cache_changed(self, node: Node, events: Sequence[CacheEvent]) -> None:
        """Tells the ledger, as soon as the news has reached it."""
        epoch = node.epoch

        def deliver(_: Call | None) -> None:
            for event in events:
                self._ledger.cache_event(node.node_id, epoch, event)

        self._counters["cache_events"] += len(events)
        if self._event_delay_s:
            self._agenda.at(self._agenda.now + self._event_delay_s, deliver)
        else:
            deliver(None)

    def _set_role(self, node: Node, wanted: Role, plan_epoch: int) -> None:
        if wanted is node.role:
            return
        node.conversion.ask(wanted, plan_epoch)
        self._counters["conversions"] += 1
        self.conversions.append(
            RoleConversion(
                node_id=node.node_id,
                role=wanted,
                plan_epoch=plan_epoch,
                at_s=self._agenda.now,
                done_s=None,
            )
        )
        self._ledger.role_changed(node.node_id, wanted)
        self._ledger.draining(node.node_id, True)
        self._tell(node, plan_epoch, ChangePhase.STARTED)
        for flight in node.unbegun():
            self._listener.give_back(flight, node)
        node.check_drained()

    def _tell(self, node: Node, plan_epoch: int, phase: ChangePhase) -> None:
        event = RoleChanged(
            node_id=node.node_id, plan_epoch=plan_epoch, role=node.role, phase=phase
        )
        self._balancer.observe(event, self._agenda.now)

    def _enlist(self, node: Node) -> None:
        config = node.config
        up = NodeUp(
            node_id=node.node_id,
            cluster_id=config.cluster_id,
            kind=config.kind,
            role=node.role,
            epoch=node.epoch,
            max_active=config.max_active,
            num_slots=config.num_slots,
        )
        granule_tokens = self._spec.granule_tokens
        block_size = (config.block_size or granule_tokens) // granule_tokens
        self._ledger.node_up(up, block_size=block_size)
        self._balancer.observe(up, self._agenda.now)
        self._num_changes += 1

    def _plan_crash(self, failure: Failure) -> None:
        node = self.nodes[failure.node_id]

        def crash(_: Call) -> None:
            if node.is_up:
                self._crash(node)
                if failure.for_s is not None:
                    self._agenda.at(failure.at_s + failure.for_s, restart)

        def restart(_: Call) -> None:
            node.restart()
            self._enlist(node)
            self.apply_plan()

        self._agenda.at(failure.at_s, crash)

    def _crash(self, node: Node) -> None:
        self._counters["nodes_lost"] += 1
        node.crash()
        down = NodeDown(node_id=node.node_id, epoch=node.epoch)
        self._ledger.node_down(down)
        self._balancer.observe(down, self._agenda.now)
        self._num_changes += 1
        self._listener.lose(node)
        self.apply_plan()
