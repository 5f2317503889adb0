"""Who hears what happens in a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from prfaas.seams import CacheEvent
from prfaas.simulator.flight import Flight

if TYPE_CHECKING:
    from prfaas.simulator.node import Node


class NodeListener(Protocol):
    """Hears what a node does."""

    def prefill_started(self, flight: Flight) -> None: ...
    def prefill_done(self, flight: Flight) -> None: ...
    def decode_done(self, flight: Flight) -> None: ...
    def never_fits(self, flight: Flight, node: Node) -> None: ...
    def cache_changed(self, node: Node, events: Sequence[CacheEvent]) -> None: ...
    def drained(self, node: Node) -> None: ...


class FleetListener(NodeListener, Protocol):
    """Hears what becomes of the nodes, too."""

    def give_back(self, flight: Flight, node: Node) -> None: ...
    def lose(self, node: Node) -> None: ...
    def fleet_changed(self) -> None: ...
