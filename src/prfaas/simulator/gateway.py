"""The simulated gateway: the calls of `prfaas.runtime`'s gateway, in the same order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from prfaas.core import RequestId
from prfaas.errors import ConfigError
from prfaas.policy import LoadLedger, ThresholdController
from prfaas.seams import (
    CacheEvent,
    RequestOutcome,
    RoleBalancer,
    Router,
    RoutingDecision,
    Served,
)
from prfaas.simulator.agenda import Agenda, Call
from prfaas.simulator.audit import check_places
from prfaas.simulator.deadlines import Deadlines
from prfaas.simulator.dispatch import Dispatch
from prfaas.simulator.fleet import Fleet
from prfaas.simulator.flight import Flight, Place
from prfaas.simulator.node import Node
from prfaas.simulator.request_log import Ending, RequestLog
from prfaas.simulator.scenario import Scenario
from prfaas.simulator.shipping import Shipping
from prfaas.simulator.waiting_room import WaitingRoom
from prfaas.workload import Arrival


class Gateway:
    """Takes requests in, routes them, and sees to it that each of them ends exactly once.

    Args:
        scenario, agenda: what is simulated, and the time.
        router, ledger, balancer, controller: the policy.
        rng: breaks ties between equal nodes.
        on_ended: called after a request ended.
    """

    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        *,
        router: Router,
        ledger: LoadLedger,
        balancer: RoleBalancer,
        controller: ThresholdController | None,
        rng: Random,
        on_ended: Callable[[], None],
    ) -> None:
        self._scenario = scenario
        self._agenda = agenda
        self._router = router
        self._ledger = ledger
        self._balancer = balancer
        self._on_ended = on_ended
        self._waiting = WaitingRoom(agenda, self._attempt)
        self._deadlines = Deadlines(agenda, scenario.timeout_s, self._time_out)
        self.flights: dict[RequestId, Flight] = {}
        self.log = RequestLog()
        self.counters: Counter[str] = Counter()
        self.shipping = Shipping(
            scenario.link,
            scenario.spec,
            agenda,
            fabric_setup_s=scenario.fabric_setup_s,
            on_landed=self._landed,
            on_prefix=self._enqueue,
        )
        self.fleet = Fleet(
            scenario,
            agenda,
            ledger=ledger,
            balancer=balancer,
            controller=controller,
            counters=self.counters,
            listener=self,
        )
        self._dispatch = Dispatch(
            agenda,
            router=router,
            ledger=ledger,
            balancer=balancer,
            nodes=self.fleet.nodes,
            rng=rng,
            counters=self.counters,
            keep_decisions=scenario.keep_decisions,
        )

    def __repr__(self) -> str:
        return f"<Gateway {len(self.flights)} requests, {len(self._waiting)} of them wait>"

    @property
    def decisions(self) -> Sequence[RoutingDecision]:
        """Every routing decision, if the scenario keeps them."""
        return self._dispatch.decisions

    def accept(self, arrival: Arrival) -> None:
        """A request arrives now.

        Raises: ConfigError if one of that id is under way.
        """
        if arrival.request_id in self.flights:
            raise ConfigError(f"request {arrival.request_id!r} is under way; ids are unique")
        flight = Flight(arrival, self._agenda.now, self._scenario.retry_s)
        self.flights[arrival.request_id] = flight
        if self._attempt(flight):
            self._deadlines.watch(flight)
        elif len(self._waiting) < (self._scenario.max_waiting or math.inf):
            self._waiting.add(flight)
            self._deadlines.watch(flight)
        else:
            self._end(flight, Ending.REJECTED)

    def prefill_started(self, flight: Flight) -> None:
        self.shipping.prefill_started(flight)

    def prefill_done(self, flight: Flight) -> None:
        assert flight.prefill is not None
        request_id, now = flight.arrival.request_id, self._agenda.now
        self._ledger.prefilled(request_id, now)
        self._ledger.observe_prefill(
            flight.prefill.node_id,
            flight.arrival.num_tokens - flight.cached_tokens,
            now - flight.prefill_start_s,
        )
        self.shipping.prefill_done(flight)

    def decode_done(self, flight: Flight) -> None:
        assert flight.decode is not None
        request_id, now = flight.arrival.request_id, self._agenda.now
        output_tokens = flight.arrival.output_tokens
        step_s = (now - flight.decode_start_s) / output_tokens
        self._ledger.observe_decode(flight.decode.node_id, 1, step_s)
        self._balancer.observe(Served(output_tokens=output_tokens, step_s=step_s), now)
        self._ledger.finished(request_id, now)
        self._router.observe(self._outcome(flight, ok=True), now)
        self._end(flight, Ending.OK)

    def never_fits(self, flight: Flight, node: Node) -> None:
        self.counters["pool_too_small"] += 1
        self._retry_later(flight, node, busy=False)

    def give_back(self, flight: Flight, node: Node) -> None:
        self.counters["given_back"] += 1
        self._retry_later(flight, node, busy=True)

    def cache_changed(self, node: Node, events: Sequence[CacheEvent]) -> None:
        self.fleet.cache_changed(node, events)

    def drained(self, node: Node) -> None:
        self.fleet.drained(node)

    def lose(self, node: Node) -> None:
        for flight in tuple(node.jobs):
            if flight in node.jobs:  # what the one before let go of may have moved it
                self._retry_later(flight, node, busy=False)
        for flight in tuple(self.flights.values()):
            if flight.place is Place.PREFIX and flight.prefix_source is node:
                self._stop(flight)
                self._enqueue(flight)

    def fleet_changed(self) -> None:
        self._waiting.wake()

    def check(self) -> None:
        """Asserts that every request is in exactly one place."""
        nodes = self.fleet.nodes.values()
        check_places(self.flights.values(), self._waiting, nodes, self.shipping)

    def _attempt(self, flight: Flight) -> bool:
        """Routes a request and sends it off; False if no node can take it now."""
        decision = self._dispatch.route(flight)
        if decision is None:
            return False
        refusal = self._dispatch.admit(flight, decision)
        if refusal is not None:
            self._retry_later(flight, refusal.node, busy=refusal.is_busy)
        elif decision.prefix_node is None:
            self._enqueue(flight)
        else:
            self.counters["prefixes_sent"] += 1
            self.shipping.fetch_prefix(flight, self.fleet.nodes[decision.prefix_node])
        return True

    def _enqueue(self, flight: Flight) -> None:
        assert flight.prefill is not None
        flight.prefix_source = None
        flight.prefill.enqueue(flight)

    def _landed(self, flight: Flight) -> None:
        assert flight.prefill is not None
        assert flight.decode is not None
        now = self._agenda.now
        flight.landed_s = now
        self._ledger.transferred(flight.arrival.request_id, now)
        flight.prefill.shipped(flight)
        flight.decode.land(flight)
        self._waiting.wake()

    def _retry_later(self, flight: Flight, node: Node, *, busy: bool) -> None:
        """This attempt is over; the next one comes after a pause and avoids ``node``."""
        self._stop(flight)
        self._abandon(flight)
        flight.num_failed += not busy
        if flight.num_failed >= self._scenario.max_attempts:
            self._end(flight, Ending.FAILED)
            return
        self.counters["retries"] += 1
        flight.excluded |= {node.node_id}
        longer_s = min(2 * flight.pause_s, self._scenario.max_retry_s)
        flight.pause_s = longer_s if busy else self._scenario.retry_s
        flight.place = Place.PAUSED

        def again(_: Call) -> None:
            flight.timer = None
            if not self._attempt(flight):
                self._waiting.add(flight)

        flight.timer = self._agenda.at(self._agenda.now + flight.pause_s, again)

    def _stop(self, flight: Flight) -> None:
        """Nothing moves it any more."""
        self.shipping.stop(flight)
        if flight.timer is not None:
            flight.timer.cancel()
            flight.timer = None

    def _abandon(self, flight: Flight) -> None:
        """Ends the attempt that is under way, if there is one, without an answer."""
        if flight.decision is None:
            return
        for node in (flight.prefill, flight.decode):
            if node is not None:
                node.drop(flight)
        now = self._agenda.now
        self._ledger.finished(flight.arrival.request_id, now)
        self._router.observe(self._outcome(flight, ok=False), now)
        flight.decision = None
        self._waiting.wake()

    def _outcome(self, flight: Flight, *, ok: bool) -> RequestOutcome:
        assert flight.decision is not None
        if not ok:
            return RequestOutcome(decision=flight.decision, ok=False)
        return RequestOutcome(
            decision=flight.decision,
            ok=True,
            cached_tokens=flight.cached_tokens,
            queue_s=flight.prefill_start_s - flight.arrived_s,
            prefill_s=flight.prefilled_s - flight.prefill_start_s,
            transfer_s=flight.landed_s - flight.prefilled_s,
            decode_wait_s=flight.decode_start_s - flight.landed_s,
            ttft_s=flight.landed_s - flight.arrived_s,
            received_bytes=flight.crossing_bytes,
        )

    def _end(self, flight: Flight, ending: Ending) -> None:
        flight.place = Place.ENDED
        del self.flights[flight.arrival.request_id]
        self.log.append(flight, ending, self._agenda.now)
        self._waiting.wake()
        self._on_ended()

    def _time_out(self, flight: Flight) -> None:
        self._stop(flight)
        self._abandon(flight)
        if flight.place is Place.WAITING:
            self._waiting.remove(flight)
        self._end(flight, Ending.TIMED_OUT)
