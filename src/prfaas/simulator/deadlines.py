"""Clients that give up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from prfaas.simulator.agenda import Agenda, Call
from prfaas.simulator.flight import Flight, Place

_TOLERANCE_S = 1e-9


class Deadlines:
    """Calls ``on_expired`` for each request that has not ended ``timeout_s`` after its arrival.

    Clients are equally patient, so they give up in the order in which they came, and one call is
    planned at a time.
    """

    def __init__(
        self, agenda: Agenda, timeout_s: float | None, on_expired: Callable[[Flight], None]
    ) -> None:
        self._agenda = agenda
        self._timeout_s = timeout_s
        self._on_expired = on_expired
        self._watched: deque[Flight] = deque()

    def watch(self, flight: Flight) -> None:
        """A request has arrived now."""
        if self._timeout_s is not None and flight.place is not Place.ENDED:
            self._watched.append(flight)
            if len(self._watched) == 1:
                self._agenda.at(flight.arrived_s + self._timeout_s, self._expire)

    def _expire(self, _: Call) -> None:
        assert self._timeout_s is not None
        watched = self._watched
        while watched:
            flight = watched[0]
            if flight.place is not Place.ENDED:
                due_s = flight.arrived_s + self._timeout_s
                if due_s > self._agenda.now + _TOLERANCE_S:
                    self._agenda.at(due_s, self._expire)
                    return
                self._on_expired(flight)
            watched.popleft()
