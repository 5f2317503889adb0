"""Simulated time: calls in order of their time, and work that advances at a changing rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import simpy

_TOLERANCE_S = 1e-9
"""Work that is this close to its end is done: floats do not meet exactly. Where ``now`` is so late
that it cannot tell such times apart, twice its own step is as close as work can get."""


class Call(simpy.Event):
    """A call at a point of simulated time; it gets itself as its argument."""

    _ok = True  # of the class: every call is a success, and tells nothing
    _value: Any = None

    def __init__(self, env: simpy.Environment, call: Callable[[Call], None]) -> None:
        self.env = env
        self.callbacks = [call]

    def cancel(self) -> None:
        """Nothing happens when its time comes. Idempotent."""
        if self.callbacks:
            self.callbacks.clear()


class Agenda:
    """What will happen when, on SimPy's event queue; equal times keep the order of the asking.

    Attributes:
        now: seconds since the start.
        num_calls: calls made so far, cancelled ones included.
    """

    def __init__(self) -> None:
        self._env = simpy.Environment()
        self.now = 0.0
        self.num_calls = 0

    def __repr__(self) -> str:
        return f"<Agenda at {self.now} s, {len(self)} to come>"

    def __len__(self) -> int:
        """Calls to come, cancelled ones included."""
        return len(self._env._queue)

    @property
    def next_s(self) -> float:
        """When the next call is due; infinity if there is none."""
        return self._env.peek()

    def at(self, time_s: float, call: Callable[[Call], None]) -> Call:
        """Calls at ``time_s``, or now if that is past."""
        event = Call(self._env, call)
        delay_s = time_s - self.now
        self._env.schedule(event, delay=delay_s if delay_s > 0 else 0.0)
        return event

    def step(self, until_s: float = math.inf) -> bool:
        """Makes the next call, of which there must be one.

        If it is due after ``until_s`` only the time goes on, to that; then it returns False.
        """
        due_s = self._env.peek()
        if due_s > until_s:
            if until_s > self.now:
                self._env.run(until=until_s)
                self.now = until_s
            return False
        self.num_calls += 1
        self.now = due_s  # an attribute, since everybody reads it all the time
        self._env.step()
        return True


class Job:
    """One piece of work of a `Progress`; the owner keeps it to take it back."""

    __slots__ = ("item", "target")

    def __init__(self, target: float, item: Any) -> None:
        self.target = target
        self.item = item


class Progress:
    """Jobs that all advance at one rate, which is constant between changes.

    The sum of the rate over time is kept as one number, and each job ends where that number has
    grown by its amount. So a change of the rate touches no job, and costs O(log n) at most.

    Args:
        agenda: the time.
        on_done: called with a job's item when it ends.
    """

    __slots__ = (
        "_agenda",
        "_heap",
        "_num_added",
        "_num_jobs",
        "_on_done",
        "_rate",
        "_since_s",
        "_value",
        "_wake",
        "_wake_s",
    )

    def __init__(self, agenda: Agenda, on_done: Callable[[Any], None]) -> None:
        self._agenda = agenda
        self._on_done = on_done
        self._heap: list[tuple[float, int, Job]] = []
        self._num_jobs = 0
        self._num_added = 0
        self._rate = 0.0
        self._value = 0.0
        self._since_s = 0.0
        self._wake: Call | None = None
        self._wake_s = math.inf

    def __len__(self) -> int:
        return self._num_jobs

    def items(self) -> list[Any]:
        """Items of the jobs, in the order in which they end."""
        return [job.item for _, _, job in sorted(self._heap) if job.item is not None]

    @property
    def rate(self) -> float:
        return self._rate

    def set_rate(self, rate: float) -> None:
        """Changes the rate from now on; 0 stands still."""
        if rate != self._rate:
            self._advance()
            self._rate = rate
            self._arm()

    def add(self, amount: float, item: Any) -> Job:
        """Starts a job."""
        self._advance()
        if not self._num_jobs:
            self._value = 0.0  # so that it stays exact however long the run is
            self._heap.clear()
        job = Job(self._value + amount, item)
        self._num_added += 1
        self._num_jobs += 1
        heappush(self._heap, (job.target, self._num_added, job))
        if self._wake is None or self._heap[0][2] is job:
            self._arm()
        return job

    def left(self, job: Job) -> float:
        """What a running job still lacks."""
        self._advance()
        return max(0.0, job.target - self._value)

    def remove(self, job: Job) -> None:
        """Takes a job back. Idempotent; one that ended is not there."""
        if job.item is not None:
            job.item = None
            self._num_jobs -= 1
            self._arm()

    def _advance(self) -> None:
        now = self._agenda.now
        if now != self._since_s:
            self._value += self._rate * (now - self._since_s)
            self._since_s = now

    def _arm(self) -> None:
        """Makes sure of a wake-up no later than the next end; an early one does no harm."""
        heap = self._heap
        while heap and heap[0][2].item is None:
            heappop(heap)
        if not heap or self._rate <= 0:
            return
        due_s = self._since_s + (heap[0][0] - self._value) / self._rate
        if self._wake is None or due_s < self._wake_s:
            if self._wake is not None:
                self._wake.cancel()
            self._wake_s = due_s
            self._wake = self._agenda.at(due_s, self._fire)

    def _fire(self, _: Call) -> None:
        self._wake = None
        self._advance()
        close_s = max(_TOLERANCE_S, 2 * math.ulp(self._agenda.now))
        heap, reached = self._heap, self._value + self._rate * close_s
        done = []
        while heap and (heap[0][0] <= reached or heap[0][2].item is None):
            job = heappop(heap)[2]
            if job.item is not None:
                done.append(job.item)
                job.item = None
        if done:
            self._num_jobs -= len(done)
            for item in done:
                self._on_done(item)
        if heap:
            self._arm()
