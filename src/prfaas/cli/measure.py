"""Measures the prefill of an engine: how long new tokens take after a cached prefix."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from random import Random

import attrs

from prfaas.cache import PagedHybridCache, PoolGeometry
from prfaas.capacity import PrefillTime
from prfaas.core import RequestId, cdiv
from prfaas.errors import CapacityError, ConfigError
from prfaas.policy.schedule import segment_ends
from prfaas.seams import Engine, EntryMemory, PrefixMatch, Reservation
from prfaas.store import HostArena, PoolMemory

Measurement = tuple[float, float, float]
"""New tokens, cached tokens, seconds."""


@attrs.frozen(kw_only=True)
class Bench:
    """An engine and how to time it.

    Attributes:
        engine: any `prfaas.seams.Engine`.
        num_repeats: measurements per point after one that is thrown away; the median counts.
        num_token_ids: prompts are random ids below this; keep it within the vocabulary.
        clock: seconds, monotonic.
    """

    engine: Engine
    num_repeats: int = 3
    num_token_ids: int = 64
    clock: Callable[[], float] = time.perf_counter

    def __attrs_post_init__(self) -> None:
        for name, value in (
            ("num_repeats", self.num_repeats),
            ("num_token_ids", self.num_token_ids),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")

    def prefill_s(self, num_new: int, num_cached: int) -> float:
        """Return the median seconds from opening a request to the logits of its last token.

        As a worker does it: the request is opened from the rows and the state that a pool holds of
        the prefix, the new tokens run by segments, and their rows and state go to the pool.

        Raises:
            ConfigError: the prefix does not end on a granule, or the pool does not fit into memory.
        """
        granule = self.engine.spec.granule_tokens
        if num_new < 1 or num_cached < 0 or num_cached % granule:
            raise ConfigError(
                f"cannot measure {num_new} new after {num_cached} cached tokens; at least 1 must "
                f"be new, and a cached prefix is a multiple of the granule of {granule}"
            )
        rng = Random(0)
        prompt = [rng.randrange(self.num_token_ids) for _ in range(num_cached + num_new)]
        with _reserved(self.engine, len(prompt), num_cached) as (memory, entry):
            if num_cached:
                self._run(RequestId("prefix"), prompt[:num_cached], 0, memory, entry)
            seconds = []
            for number in range(self.num_repeats + 1):
                started_s = self.clock()
                self._run(RequestId(f"repeat {number}"), prompt, num_cached, memory, entry)
                seconds.append(self.clock() - started_s)
        return statistics.median(seconds[1:])

    def _run(
        self,
        request_id: RequestId,
        prompt: Sequence[int],
        start: int,
        memory: EntryMemory,
        entry: Reservation,
    ) -> None:
        """Prefill ``prompt[start:]``; the state after it goes to the slot of that position."""
        engine, stop = self.engine, len(prompt)
        if start:
            engine.open(request_id, start, memory, entry.checkpoint_slots.get(start))
        else:
            engine.open(request_id)
        try:
            position = start
            for end in segment_ends(start, stop, engine.segment_tokens):
                slots = entry.checkpoint_slots.get(end, entry.tail_slots) if end == stop else None
                engine.prefill(request_id, prompt[position:end], position, memory, slots)
                position = end
        finally:
            engine.close(request_id)


@contextmanager
def _reserved(
    engine: Engine, num_tokens: int, num_cached: int
) -> Iterator[tuple[EntryMemory, Reservation]]:
    """A pool with room for one request and for its state at ``num_cached``."""
    spec = engine.spec
    needed = spec.kv_bytes(cdiv(num_tokens, spec.granule_tokens) * spec.granule_tokens)
    pool_bytes = 2 * (needed + spec.fixed_bytes) + (1 << 20)
    has_states = any(not group.is_token_kind for group in spec.groups)
    checkpoints = [num_cached] if num_cached and has_states else []
    while True:
        geometry = PoolGeometry.for_spec(
            spec, block_size=spec.granule_tokens, pool_bytes=pool_bytes
        )
        try:
            entry = PagedHybridCache(geometry).reserve(
                RequestId("entry"), num_tokens, PrefixMatch(), now=0.0, checkpoints=checkpoints
            )
            if set(checkpoints) <= set(entry.checkpoint_slots):
                break
        except CapacityError:
            pass  # slabs were cut to fit; a larger pool has room
        pool_bytes *= 2
    arena = HostArena(geometry.pool_bytes)
    try:
        yield PoolMemory(arena, geometry).entry(entry), entry
    finally:
        arena.close()


def measure_grid(
    bench: Bench,
    lengths: Sequence[int],
    cached: Sequence[int],
    on_measured: Callable[[Measurement], None] = lambda _: None,
) -> list[Measurement]:
    """Measure every length after every prefix, shortest first."""
    grid: list[Measurement] = []
    for num_cached in sorted(set(cached)):
        for num_new in sorted(set(lengths)):
            measured = (num_new, num_cached, bench.prefill_s(num_new, num_cached))
            on_measured(measured)
            grid.append(measured)
    return grid


def between(lengths: Sequence[int]) -> list[int]:
    """Return lengths in the geometric middle of neighbours, to hold out of the table."""
    ordered = sorted(set(lengths))
    middles = (round((a * b) ** 0.5) for a, b in pairwise(ordered))
    return sorted(set(middles) - set(ordered))


def monotone(grid: Sequence[Measurement]) -> tuple[list[Measurement], float]:
    """Raise times that fall with more tokens, which only noise can do.

    Returns:
        The grid, no time below that of fewer new or fewer cached tokens, and the largest factor by
        which one was raised, 1.0 if none was.
    """
    raised: list[Measurement] = []
    most = 1.0
    for new, cached, seconds in sorted(grid, key=lambda one: (one[1], one[0])):
        least = max((s for n, c, s in raised if n <= new and c <= cached), default=0.0)
        most = max(most, least / seconds)
        raised.append((new, cached, max(seconds, least)))
    return raised, most


def held_out_errors(
    prefill: PrefillTime, held_out: Sequence[Measurement]
) -> list[tuple[Measurement, float, float]]:
    """Return (measured, predicted seconds, relative error) of points outside the table."""
    predicted = [prefill.prefill_s(new, cached) for new, cached, _ in held_out]
    return [
        (measured, seconds, seconds / measured[2] - 1)
        for measured, seconds in zip(held_out, predicted, strict=True)
    ]
