"""Where a request goes, and whether the nodes there take it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from random import Random

import attrs

from prfaas.core import NodeId
from prfaas.errors import CapacityError
from prfaas.policy import LoadLedger
from prfaas.seams import Arrived, RoleBalancer, RoutedRequest, Router, RoutingDecision
from prfaas.simulator.agenda import Agenda
from prfaas.simulator.flight import Flight
from prfaas.simulator.node import Node


@attrs.frozen
class Refusal:
    """A node does not take a request; ``is_busy`` if it might a little later."""

    node: Node
    is_busy: bool


class Dispatch:
    """Routes requests and asks the nodes of each decision, the decode node first.

    Attributes:
        decisions: every decision, if they are kept.
    """

    def __init__(
        self,
        agenda: Agenda,
        *,
        router: Router,
        ledger: LoadLedger,
        balancer: RoleBalancer,
        nodes: Mapping[NodeId, Node],
        rng: Random,
        counters: Counter[str],
        keep_decisions: bool,
    ) -> None:
        self._agenda = agenda
        self._router = router
        self._ledger = ledger
        self._balancer = balancer
        self._nodes = nodes
        self._rng = rng
        self._counters = counters
        self._keep_decisions = keep_decisions
        self.decisions: list[RoutingDecision] = []

    def route(self, flight: Flight) -> RoutingDecision | None:
        """The router's decision; None if no node can take the request now."""
        arrival = flight.arrival
        while True:
            routed = RoutedRequest(
                request_id=arrival.request_id,
                num_tokens=arrival.num_tokens,
                granule_hashes=arrival.granule_hashes,
                excluded=flight.excluded,
            )
            try:
                return self._router.route(routed, self._ledger, self._agenda.now, self._rng)
            except CapacityError:
                if not flight.excluded:
                    return None
                # Nodes that failed once may be all that is left.
                flight.excluded = frozenset()

    def admit(self, flight: Flight, decision: RoutingDecision) -> Refusal | None:
        """Begins an attempt; both nodes hold the request then, unless one of them refuses."""
        now = self._agenda.now
        flight.begin(decision)
        flight.num_attempts += 1
        if self._keep_decisions:
            self.decisions.append(decision)
        if flight.num_attempts == 1:
            self._balancer.observe(Arrived(routed_tokens=decision.routed_tokens), now)
        self._ledger.admit(decision, now)
        prefill = flight.prefill = self._nodes[decision.prefill_node]
        decode = flight.decode = self._nodes[decision.decode_node]
        refusal = self._refusal(flight, prefill, decode)
        if refusal is None:
            decode.admit(flight)
            if prefill is not decode:
                prefill.admit(flight)
        else:
            self._counters["refused"] += 1
        return refusal

    def _refusal(self, flight: Flight, prefill: Node, decode: Node) -> Refusal | None:
        if decode.is_full or not decode.role.decodes:
            return Refusal(decode, is_busy=True)
        if prefill is not decode:
            if prefill.is_full or not prefill.role.prefills:
                return Refusal(prefill, is_busy=True)
            if decode.cache is not None:
                try:  # room for the entry, before anybody computes it
                    flight.held_tokens = decode.cache.expect(flight, self._agenda.now)
                except CapacityError:
                    return Refusal(decode, is_busy=bool(decode.jobs))
        elif not decode.role.prefills:
            return Refusal(decode, is_busy=True)
        return None
