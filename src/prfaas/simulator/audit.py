"""Conservation: every request is in exactly one place."""

from __future__ import annotations

from collections.abc import Iterable

from prfaas.simulator.flight import Flight, Place
from prfaas.simulator.node import Node
from prfaas.simulator.shipping import Shipping


def check_places(
    flights: Iterable[Flight],
    waiting: Iterable[Flight],
    nodes: Iterable[Node],
    shipping: Shipping,
) -> None:
    """Asserts that each of ``flights`` is found once, where it says that it is, and nobody else is
    found anywhere; and that only its own nodes hold it."""
    found: dict[Flight, list[Place]] = {flight: [] for flight in flights}
    holders: dict[Flight, set[Node]] = {flight: set() for flight in found}
    for flight in waiting:
        found[flight].append(Place.WAITING)
    for node in nodes:
        node.check()
        for flight in node.jobs:
            holders[flight].add(node)
        for place, there in node.places().items():
            for flight in there:
                found[flight].append(place)
    for link in (shipping.egress, shipping.ingress):
        for flight in link.items():
            if flight.place is not Place.PREFILLING:  # its rows may flow meanwhile
                found[flight].append(flight.place)
    at_gateway = (Place.WAITING, Place.PAUSED)
    for flight, places in found.items():
        if flight.timer is not None:
            places.append(flight.place)
        assert places == [flight.place], f"{flight!r} is in {places}"
        if flight.place in at_gateway:
            expected: set[Node | None] = set()
        elif flight.place in (Place.DECODE_WAIT, Place.DECODING):
            expected = {flight.decode}
        else:
            expected = {flight.prefill, flight.decode}
        assert holders[flight] == expected, f"{flight!r} is held by {holders[flight]}"
