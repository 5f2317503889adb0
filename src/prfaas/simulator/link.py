"""One direction of the link between the clusters, shared equally by all that flows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prfaas.seams import Delivery
from prfaas.simulator.agenda import Agenda, Call, Job, Progress

OnSent = Callable[[Any], None]


class FluidLink:
    """Processor sharing: n flows get one n-th of the bandwidth each, as TCP streams nearly do.

    Args:
        agenda: the time.
        schedule: (from second, bits/s), ascending from 0.
    """

    def __init__(self, agenda: Agenda, schedule: Sequence[tuple[float, float]]) -> None:
        self._agenda = agenda
        self._flows = Progress(agenda, self._sent)
        self._schedule = list(schedule)
        self._position = 0
        self._bps = schedule[0][1]
        self._is_busy = False
        self._booked_s = self._stretch_s = 0.0
        self._capacity_since_s = 0.0
        self._capacity_bits = 0.0
        self._deliveries: list[tuple[float, float, float]] = []
        self.busy_s = 0.0
        self.sent_bytes = 0.0
        self._plan_change()

    def __repr__(self) -> str:
        return f"<FluidLink {self._bps} bit/s, {len(self._flows)} flows>"

    def __len__(self) -> int:
        """Flows under way."""
        return len(self._flows)

    def items(self) -> list[Any]:
        """What flows: the items given to `send`."""
        return [item for _, item in self._flows.items()]

    def send(self, num_bytes: float, on_sent: OnSent, item: Any) -> Job:
        """Starts a flow; ``on_sent(item)`` is called when its last byte has left."""
        if not self._is_busy:
            self._is_busy = True
            self._booked_s = self._stretch_s = self._agenda.now
        self._flows.set_rate(self._bps / (len(self._flows) + 1))
        return self._flows.add(8.0 * num_bytes, (on_sent, item))

    def stop(self, flow: Job) -> None:
        """Takes a flow off the link. Idempotent."""
        self._flows.remove(flow)
        self._share()

    def take_deliveries(self) -> tuple[Delivery, ...]:
        """What crossed since the last call, as senders measure it: only while they had to send."""
        self.account()
        taken, self._deliveries = self._deliveries, []
        return tuple(
            Delivery(num_bytes=round(num_bytes), start_s=start, end_s=end)
            for start, end, num_bytes in taken
        )

    def capacity_bytes(self) -> float:
        """What could have crossed since the start."""
        now = self._agenda.now
        return (self._capacity_bits + self._bps * (now - self._capacity_since_s)) / 8

    def account(self) -> None:
        """Brings ``sent_bytes`` and ``busy_s`` up to now."""
        now = self._agenda.now
        if not self._is_busy or now <= self._booked_s:
            return
        num_bytes = self._bps * (now - self._booked_s) / 8
        self.busy_s += now - self._booked_s
        self._booked_s = now
        if num_bytes > 0:  # a stall is part of the delivery that it delays
            self.sent_bytes += num_bytes
            self._deliver(self._stretch_s, now, num_bytes)
            self._stretch_s = now

    def _deliver(self, start_s: float, end_s: float, num_bytes: float) -> None:
        if self._deliveries and self._deliveries[-1][1] == start_s:
            start_s, _, earlier = self._deliveries.pop()
            num_bytes += earlier
        self._deliveries.append((start_s, end_s, num_bytes))

    def _sent(self, flow: tuple[OnSent, Any]) -> None:
        self._share()
        on_sent, item = flow
        on_sent(item)

    def _share(self) -> None:
        if len(self._flows):
            self._flows.set_rate(self._bps / len(self._flows))
        else:
            self.account()
            self._is_busy = False

    def _plan_change(self) -> None:
        if self._position + 1 < len(self._schedule):
            self._agenda.at(self._schedule[self._position + 1][0], self._change)

    def _change(self, _: Call) -> None:
        now = self._agenda.now
        self.account()
        self._capacity_bits += self._bps * (now - self._capacity_since_s)
        self._capacity_since_s = now
        self._position += 1
        self._bps = self._schedule[self._position][1]
        self._share()
        self._plan_change()
