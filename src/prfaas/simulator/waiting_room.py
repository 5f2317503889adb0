"""Requests that no node can take now."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from prfaas.simulator.agenda import Agenda, Call
from prfaas.simulator.flight import Flight, Place


class WaitingRoom:
    """First come first served: whenever something changed, the first one tries again, and the next
    one only if that went well.

    Args:
        agenda: the time.
        attempt: sends a request off; False if still nobody can take it.
    """

    def __init__(self, agenda: Agenda, attempt: Callable[[Flight], bool]) -> None:
        self._agenda = agenda
        self._attempt = attempt
        self._flights: deque[Flight] = deque()
        self._retry: Call | None = None

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    def add(self, flight: Flight) -> None:
        flight.place = Place.WAITING
        self._flights.append(flight)

    def remove(self, flight: Flight) -> None:
        self._flights.remove(flight)

    def wake(self) -> None:
        """Something changed; they try again as soon as the present event is over."""
        if self._flights and self._retry is None:
            self._retry = self._agenda.at(self._agenda.now, self._try_again)

    def _try_again(self, _: Call) -> None:
        self._retry = None
        while self._flights and self._attempt(self._flights[0]):
            self._flights.popleft()
