"""The cache of one simulated node, called as a server calls its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prfaas.cache import PagedHybridCache, PoolGeometry, checkpoint_positions
from prfaas.core import BlockHash, RequestId, round_down
from prfaas.errors import CapacityError
from prfaas.hashing import block_hashes
from prfaas.seams import CacheEvent
from prfaas.simulator.flight import Flight
from prfaas.spec import ModelSpec

OnEvents = Callable[[Sequence[CacheEvent]], None]


class NodeCache:
    """A real `PagedHybridCache` without bytes.

    Args:
        spec: the model.
        pool_bytes, block_size: the pool.
        on_events: told of every change of what the cache can serve.
    """

    def __init__(
        self, spec: ModelSpec, pool_bytes: int, block_size: int, on_events: OnEvents
    ) -> None:
        geometry = PoolGeometry.for_spec(spec, block_size=block_size, pool_bytes=pool_bytes)
        self.cache = PagedHybridCache(geometry)
        self._block_size = block_size
        self._granules = block_size // spec.granule_tokens
        self._on_events = on_events

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds anything, so that what does not fit now never will."""
        return self.cache.usage().num_requests == 0

    def compute(self, flight: Flight, now: float) -> int:
        """Reserves for a prompt that is about to be computed; returns its cached tokens.

        Raises: CapacityError.
        """
        num_tokens = flight.arrival.num_tokens
        match = self.cache.match(self._hashes(flight, num_tokens), max_tokens=num_tokens - 1)
        self.cache.reserve(
            _key(flight),
            num_tokens,
            match,
            now=now,
            checkpoints=checkpoint_positions(num_tokens, match, self._block_size),
        )
        self._publish()
        return match.num_cached_tokens

    def expect(self, flight: Flight, now: float) -> int:
        """Reserves for an entry that arrives from elsewhere; returns the rows that it has.

        Raises: CapacityError.
        """
        num_tokens = flight.arrival.num_tokens
        match = self.cache.match(self._hashes(flight, num_tokens), max_tokens=num_tokens)
        self.cache.reserve(_key(flight), num_tokens, match, now=now, receive=True)
        self._publish()
        return match.num_held_tokens

    def commit(self, flight: Flight, now: float) -> None:
        """The entry is complete."""
        self._commit(_key(flight), flight, flight.arrival.num_tokens, now)

    def release(self, flight: Flight) -> None:
        """The request lets go of what it reserved. Idempotent."""
        self.cache.release(_key(flight))

    def serves(self, flight: Flight, num_tokens: int) -> int:
        """How long a prefix of at most ``num_tokens`` it can send to another node."""
        hashes = self._hashes(flight, num_tokens)
        return self.cache.match(hashes, max_tokens=num_tokens).num_cached_tokens

    def install_prefix(self, flight: Flight, num_tokens: int, now: float) -> None:
        """A prefix of this length has landed. Where there is no room, it is dropped."""
        key = RequestId(f"{_key(flight)} prefix")
        num_tokens = round_down(num_tokens, self._block_size)
        match = self.cache.match(self._hashes(flight, num_tokens), max_tokens=num_tokens)
        if match.num_cached_tokens >= num_tokens:
            return
        try:
            self.cache.reserve(key, num_tokens, match, now=now, receive=True)
        except CapacityError:
            return
        self._commit(key, flight, num_tokens, now)
        self.cache.release(key)

    def _commit(self, key: RequestId, flight: Flight, num_tokens: int, now: float) -> None:
        hashes = self._hashes(flight, num_tokens)
        # Content that has no key cannot be found, so it is not committed.
        num_known = min(num_tokens, (len(hashes) + 1) * self._block_size - 1)
        self.cache.commit(key, hashes, num_known, now)
        self._publish()

    def _hashes(self, flight: Flight, num_tokens: int) -> tuple[BlockHash, ...]:
        known = block_hashes(flight.arrival.granule_hashes, self._granules)
        return known[: num_tokens // self._block_size]

    def _publish(self) -> None:
        events = self.cache.take_events()
        if events:
            self._on_events(events)


def _key(flight: Flight) -> RequestId:
    return flight.arrival.request_id
