"""What crosses the link: entries after a remote prefill, and prefixes before one."""

from __future__ import annotations

from collections.abc import Callable

from prfaas.core import ClusterKind
from prfaas.simulator.agenda import Agenda, Call
from prfaas.simulator.flight import Flight, Place
from prfaas.simulator.link import FluidLink
from prfaas.simulator.node import Node
from prfaas.simulator.scenario import SimulatedLink
from prfaas.spec import ModelSpec

OnLanded = Callable[[Flight], None]


class Shipping:
    """Moves entries and prefixes. Inside a cluster no bytes take time, and a prefix only its setup.

    Not pipelined, an entry of S bytes flows once its prompt is computed. Pipelined, all of it but
    a tail flows from the start of the prefill, and the tail once both are done: the recurrent
    state, which is not final before, and the last layer's rows. Either way it has landed
    `SimulatedLink.latency_s` after its last byte left.

    Args:
        link: None where nothing ever crosses.
        spec: gives the bytes.
        agenda: the time.
        fabric_setup_s: fixed time of a prefix inside a cluster.
        on_landed: an entry is complete at its decode node.
        on_prefix: a request has the prefix that it waited for, or goes on without.
    """

    def __init__(
        self,
        link: SimulatedLink | None,
        spec: ModelSpec,
        agenda: Agenda,
        *,
        fabric_setup_s: float,
        on_landed: OnLanded,
        on_prefix: OnLanded,
    ) -> None:
        link = link or SimulatedLink(schedule=((0.0, 0.0),))
        self._link = link
        self._spec = spec
        self._agenda = agenda
        self._fabric_setup_s = fabric_setup_s
        self._on_landed = on_landed
        self._on_prefix = on_prefix
        self._num_token_layers = sum(g.num_layers for g in spec.groups if g.is_token_kind) or 1
        self.egress = FluidLink(agenda, link.schedule)
        self.ingress = FluidLink(agenda, link.schedule)

    def __repr__(self) -> str:
        return f"<Shipping out {self.egress!r}, in {self.ingress!r}>"

    def fetch_prefix(self, flight: Flight, source: Node) -> None:
        """Sends the prefix that the decision names to the prefill node."""
        decision, target = flight.decision, flight.prefill
        assert decision is not None
        assert target is not None
        flight.place = Place.PREFIX
        flight.prefix_source = source
        if source.config.kind is target.config.kind:
            self._after(flight, self._fabric_setup_s, self._install_prefix)
        else:
            is_out = source.config.kind is ClusterKind.PRFAAS
            link = self.egress if is_out else self.ingress
            self._send(flight, link, decision.prefix_bytes, self._prefix_sent)

    def prefill_started(self, flight: Flight) -> None:
        """Rows may leave from now on."""
        if self._crosses(flight):
            flight.crossing_bytes = self._spec.kv_bytes_delta(
                flight.arrival.num_tokens, flight.held_tokens
            )
            if self._link.pipelined:
                rows = flight.crossing_bytes - self._tail_bytes(flight)
                self._send(flight, self.egress, rows, self._rows_sent)

    def prefill_done(self, flight: Flight) -> None:
        """The prompt is computed."""
        flight.place = Place.TRANSFER
        if not self._crosses(flight):
            self._on_landed(flight)
        elif not self._link.pipelined:
            self._send(flight, self.egress, flight.crossing_bytes, self._entry_sent)
        elif flight.flow is None:
            self._send_tail(flight)

    def stop(self, flight: Flight) -> None:
        """Whatever flows for a request is not wanted any more. Idempotent."""
        if flight.flow is not None:
            link, flow = flight.flow
            link.stop(flow)
            flight.flow = None

    def _send(self, flight: Flight, link: FluidLink, num_bytes: float, then: OnLanded) -> None:
        flight.flow = (link, link.send(num_bytes, then, flight))

    def _crosses(self, flight: Flight) -> bool:
        assert flight.prefill is not None
        return flight.prefill.config.kind is ClusterKind.PRFAAS

    def _tail_bytes(self, flight: Flight) -> float:
        num_tokens = flight.arrival.num_tokens
        states = self._spec.kv_bytes_delta(num_tokens, num_tokens)
        return states + (flight.crossing_bytes - states) / self._num_token_layers

    def _rows_sent(self, flight: Flight) -> None:
        flight.flow = None
        if flight.is_prefilled:
            self._send_tail(flight)

    def _send_tail(self, flight: Flight) -> None:
        self._send(flight, self.egress, self._tail_bytes(flight), self._entry_sent)

    def _entry_sent(self, flight: Flight) -> None:
        flight.flow = None
        self._after(flight, self._link.latency_s, self._on_landed)

    def _prefix_sent(self, flight: Flight) -> None:
        flight.flow = None
        self._after(flight, self._link.latency_s, self._install_prefix)

    def _install_prefix(self, flight: Flight) -> None:
        """What the source still has of the prefix is now at the prefill node as well."""
        decision, source, target = flight.decision, flight.prefix_source, flight.prefill
        assert decision is not None
        assert source is not None
        assert target is not None
        if source.cache is not None and target.cache is not None:
            num_tokens = source.cache.serves(flight, decision.prefix_tokens)
            target.cache.install_prefix(flight, num_tokens, self._agenda.now)
        self._on_prefix(flight)

    def _after(self, flight: Flight, delay_s: float, then: OnLanded) -> None:
        if delay_s <= 0:
            then(flight)
            return

        def call(_: Call) -> None:
            flight.timer = None
            then(flight)

        flight.timer = self._agenda.at(self._agenda.now + delay_s, call)
