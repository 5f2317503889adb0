"""One simulated node: a prefill queue, decode slots, and a cache."""

from __future__ import annotations

from collections import deque

from prfaas.core import Role, cdiv
from prfaas.errors import CapacityError
from prfaas.policy.conversion import Conversion
from prfaas.policy.schedule import decode_rounds
from prfaas.simulator.agenda import Agenda, Progress
from prfaas.simulator.flight import Flight, Place
from prfaas.simulator.listeners import NodeListener
from prfaas.simulator.node_cache import NodeCache
from prfaas.simulator.scenario import SimulatedNode
from prfaas.spec import ModelSpec


class Node:
    """Prefills one prompt at a time, first come first served, and decodes up to ``num_slots``.

    While it does both they alternate as in `StepSchedule`: a prompt segment of c seconds, then
    ``rounds`` decode steps of s seconds each. As a fluid, prompts advance at c / (c + rounds * s)
    of full speed, and decoding makes rounds / (c + rounds * s) steps per second; both rates hold
    until the batch or the prompt changes.

    Args:
        config: the node.
        spec: the model.
        agenda: the time.
        listener: hears what happens.
    """

    def __init__(
        self, config: SimulatedNode, spec: ModelSpec, agenda: Agenda, listener: NodeListener
    ) -> None:
        self.config = config
        self.node_id = config.node_id
        self.epoch = 1
        self.is_up = True
        self.conversion = Conversion(config.role)
        self.jobs: dict[Flight, None] = {}
        self._prefill_busy_s = self._decode_busy_s = 0.0
        self._spec = spec
        self._agenda = agenda
        self._listener = listener
        self._queue: deque[Flight] = deque()
        self._running: Flight | None = None
        self._ready: deque[Flight] = deque()
        self._prefill = Progress(agenda, self._prefilled)
        self._decode = Progress(agenda, self._decoded)
        self._rounds = 1
        self._num_prefills = self._num_decodes = 0
        self.cache = self._new_cache()

    def __repr__(self) -> str:
        return (
            f"<Node {self.node_id!r} {self.role.value}, {len(self._queue)} queued, "
            f"{len(self._ready)} ready, {len(self._decode)} decoding>"
        )

    @property
    def role(self) -> Role:
        """What it takes new work for, unless it is draining."""
        return self.conversion.role

    @property
    def is_full(self) -> bool:
        limit = self.config.max_active
        return limit is not None and len(self.jobs) >= limit

    def places(self) -> dict[Place, list[Flight]]:
        """Who is where in this node, for checks."""
        return {
            Place.QUEUED: list(self._queue),
            Place.PREFILLING: [] if self._running is None else [self._running],
            Place.DECODE_WAIT: list(self._ready),
            Place.DECODING: self._decode.items(),
        }

    def check(self) -> None:
        """Asserts that the counts are those of its requests."""
        prefills = [f for f in self.jobs if f.prefill is self]
        before = (Place.PREFIX, Place.QUEUED, Place.PREFILLING, Place.TRANSFER)
        assert self._num_prefills == sum(f.place in before for f in prefills), repr(self)
        assert self._num_decodes == sum(f.decode is self for f in self.jobs), repr(self)
        assert len(self._decode) <= (self.config.num_slots or len(self.jobs)), repr(self)

    def unbegun(self) -> tuple[Flight, ...]:
        """Queued prompts that the present role would not admit."""
        if self.role.prefills:
            return ()
        return tuple(self._queue)

    def check_drained(self) -> None:
        """Ends the change of role once no work of the old one is left."""
        if not self.conversion.is_draining:
            return
        if (self._num_prefills and not self.role.prefills) or (
            self._num_decodes and not self.role.decodes
        ):
            return
        self.conversion.drained()
        self._listener.drained(self)

    def pace(self, budget_tokens: int | None) -> None:
        """Sets the prompt tokens per decode step; None for the engine's own alternation."""
        self._rounds = decode_rounds(self.config.segment_tokens, budget_tokens)
        self._retime(len(self._decode))

    def admit(self, flight: Flight) -> None:
        """Makes room for a request that prefills here, decodes here, or both."""
        self.jobs[flight] = None
        self._num_prefills += flight.prefill is self
        self._num_decodes += flight.decode is self

    def enqueue(self, flight: Flight) -> None:
        """The prompt joins the queue."""
        flight.place = Place.QUEUED
        self._queue.append(flight)
        self.start_next()

    def shipped(self, flight: Flight) -> None:
        """The prefill side of a request is over: its entry is where it decodes."""
        self._num_prefills -= 1
        if flight.decode is not self:
            self._let_go(flight)
            if self._queue:
                self.start_next()
        self.check_drained()

    def land(self, flight: Flight) -> None:
        """The entry of a request is complete here; it decodes as soon as a slot is free."""
        if self.cache is not None and flight.prefill is not self:
            self.cache.commit(flight, self._agenda.now)
            self.cache.release(flight)
            self.start_next()  # the pool has room again
        limit = self.config.num_slots
        if limit is None or len(self._decode) < limit:
            self._start_decode(flight)
        else:
            flight.place = Place.DECODE_WAIT
            self._ready.append(flight)

    def drop(self, flight: Flight) -> None:
        """Forgets a request wherever it stands."""
        if flight not in self.jobs:
            return
        is_prefill_over = flight.place in (Place.DECODE_WAIT, Place.DECODING)
        self._num_prefills -= flight.prefill is self and not is_prefill_over
        self._num_decodes -= flight.decode is self
        if flight.prefill is self and flight.place is Place.QUEUED:
            self._queue.remove(flight)
        elif flight is self._running:
            self._stop_prefill(flight)
        elif flight.decode is self and flight.place is Place.DECODE_WAIT:
            self._ready.remove(flight)
        elif flight.decode is self and flight.place is Place.DECODING:
            self._stop_decode(flight)
        self._let_go(flight)
        self.start_next()
        self.check_drained()

    def crash(self) -> None:
        """Stops; the caller then drops its requests."""
        self.is_up = False
        self.conversion.drained()

    def restart(self) -> None:
        """Comes up again in its configured role, with nothing in its cache."""
        assert not self.jobs, f"{self!r} still holds requests"
        self.is_up = True
        self.epoch += 1
        self.conversion = Conversion(self.config.role)
        self.cache = self._new_cache()

    def prefill_share(self) -> float:
        """Share of the time until now in which it computed prompts; MIXED time counts in part."""
        busy_s, now = self._prefill_busy_s, self._agenda.now
        if self._running is not None and self._running.job is not None:
            busy_s += self._running.seconds - self._prefill.left(self._running.job)
        return busy_s / now if now else 0.0

    def decode_share(self) -> float:
        """Mean share of the decode slots that were taken until now; 0 if they have no limit."""
        now, num_slots = self._agenda.now, self.config.num_slots
        started_s = (flight.decode_start_s for flight in self._decode.items())
        busy_s = self._decode_busy_s + sum(now - start_s for start_s in started_s)
        return busy_s / (now * num_slots) if now and num_slots else 0.0

    def start_next(self) -> None:
        """Starts the first queued prompt, if the node is free and the pool has room."""
        while self.is_up and self._running is None and self._queue:
            flight = self._queue[0]
            if self.cache is not None:
                try:
                    flight.cached_tokens = self.cache.compute(flight, self._agenda.now)
                except CapacityError:
                    if self.cache.is_idle:
                        self._listener.never_fits(flight, self)
                        continue
                    return  # somebody's release makes room
            self._queue.popleft()
            self._start_prefill(flight)

    def _start_prefill(self, flight: Flight) -> None:
        num_new = flight.arrival.num_tokens - flight.cached_tokens
        flight.place = Place.PREFILLING
        flight.prefill_start_s = self._agenda.now
        flight.seconds = self.config.prefill(num_new, flight.cached_tokens)
        flight.segment_s = flight.seconds / cdiv(num_new, self.config.segment_tokens)
        self._running = flight
        self._retime(len(self._decode))
        flight.job = self._prefill.add(flight.seconds, flight)
        self._listener.prefill_started(flight)

    def _prefilled(self, flight: Flight) -> None:
        self._running = None
        flight.job = None
        flight.is_prefilled = True
        flight.prefilled_s = self._agenda.now
        self._prefill_busy_s += flight.seconds
        if self.cache is not None:
            self.cache.commit(flight, self._agenda.now)
        self._retime(len(self._decode))
        self._listener.prefill_done(flight)
        self.start_next()

    def _stop_prefill(self, flight: Flight) -> None:
        assert flight.job is not None
        self._prefill_busy_s += flight.seconds - self._prefill.left(flight.job)
        self._prefill.remove(flight.job)
        flight.job = None
        self._running = None
        self._retime(len(self._decode))

    def _start_decode(self, flight: Flight) -> None:
        flight.place = Place.DECODING
        flight.decode_start_s = self._agenda.now
        self._retime(len(self._decode) + 1)
        flight.job = self._decode.add(flight.arrival.output_tokens, flight)

    def _decoded(self, flight: Flight) -> None:
        flight.job = None
        self._decode_busy_s += self._agenda.now - flight.decode_start_s
        self._num_decodes -= 1
        self._fill_slot()
        self._let_go(flight)
        self._listener.decode_done(flight)
        if self._queue:
            self.start_next()
        self.check_drained()

    def _stop_decode(self, flight: Flight) -> None:
        assert flight.job is not None
        self._decode_busy_s += self._agenda.now - flight.decode_start_s
        self._decode.remove(flight.job)
        flight.job = None
        self._fill_slot()

    def _fill_slot(self) -> None:
        if self._ready:
            self._start_decode(self._ready.popleft())
        else:
            self._retime(len(self._decode))

    def _let_go(self, flight: Flight) -> None:
        del self.jobs[flight]
        if self.cache is not None:
            self.cache.release(flight)

    def _retime(self, batch: int) -> None:
        """Sets both rates for the present prompt and a batch of so many."""
        steps_s = self._rounds * self.config.step_s(batch) if batch else 0.0
        if self._running is None:
            if batch:
                self._decode.set_rate(self._rounds / steps_s)
        else:
            cycle_s = self._running.segment_s + steps_s
            self._prefill.set_rate(self._running.segment_s / cycle_s if cycle_s else 1.0)
            if batch:
                self._decode.set_rate(self._rounds / cycle_s)

    def _new_cache(self) -> NodeCache | None:
        config = self.config
        if config.pool_bytes is None:
            return None
        block_size = config.block_size or self._spec.granule_tokens
        return NodeCache(
            self._spec,
            config.pool_bytes,
            block_size,
            lambda events: self._listener.cache_changed(self, events),
        )
