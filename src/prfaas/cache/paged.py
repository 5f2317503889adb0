"""The reference HybridKVCache: slabs, prefix index and leases put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prfaas.cache.entry import Entry, EventLog
from prfaas.cache.eviction import Evictor
from prfaas.cache.geometry import PoolGeometry
from prfaas.cache.leases import LeaseTable
from prfaas.cache.prefix_index import PrefixIndex
from prfaas.cache.slabs import SlabAllocator
from prfaas.core import BlockHash, BlockId, GroupId, RequestId, cdiv
from prfaas.errors import CapacityError, ConfigError, LocalProtocolError
from prfaas.seams.cache import (
    CacheEvent,
    CacheUsage,
    HybridKVCache,
    PageState,
    PrefixMatch,
    Reservation,
)

DEFAULT_MAX_EVENTS = 65_536


class PagedHybridCache(HybridKVCache):
    """One pool for all groups; exact all-or-nothing reservations; least-recently-used eviction.

    Fresh blocks and slots are *uninitialised*: they hold whatever their last user left. Every slot
    in ``tail_slots`` and ``checkpoint_slots`` must be written before it is read (a linear layer
    that starts from nothing starts from zeros, not from its slot); only ``resume_slots`` hold a
    state.

    Checkpoints are requested most valuable first and given up from the end. A position is kept in
    all slot groups or in none, and one at ``num_tokens`` is dropped, since the tail slot serves it.

    Args:
        geometry: the pool.
        max_events: events kept for `take_events`; the oldest are dropped, which shows as a gap.
    """

    def __init__(self, geometry: PoolGeometry, *, max_events: int = DEFAULT_MAX_EVENTS) -> None:
        self._geometry = geometry
        self._block_size = geometry.block_size
        self._token_groups = geometry.token_groups
        self._slot_groups = geometry.slot_groups
        self._groups = (*self._token_groups, *self._slot_groups)
        self._allocator = SlabAllocator(geometry)
        self._index = PrefixIndex(
            token_groups=self._token_groups,
            slot_groups=self._slot_groups,
            block_size=self._block_size,
        )
        self._leases = LeaseTable()
        self._evictor = Evictor(self._allocator, self._index, self._leases)
        self._entries: dict[RequestId, Entry] = {}
        self._events = EventLog(max_events)
        self._now = float("-inf")
        self._num_checkpoints_skipped = 0

    def __repr__(self) -> str:
        groups = ", ".join(
            f"{g}: {self._leases.num_pinned(g)} pinned + {self._index.num_idle(g)} evictable"
            for g in self._groups
        )
        return (
            f"<{type(self).__name__} {len(self._entries)} requests, "
            f"{self._allocator.num_free_slabs} of {self._allocator.num_slabs} slabs free, {groups}>"
        )

    @property
    def geometry(self) -> PoolGeometry:
        return self._geometry

    @property
    def num_checkpoints_skipped(self) -> int:
        """Checkpoint positions that were asked for and not granted, because slots were scarce."""
        return self._num_checkpoints_skipped

    def match(self, block_hashes: Sequence[BlockHash], *, max_tokens: int) -> PrefixMatch:
        return self._index.match(block_hashes, max_tokens // self._block_size)

    def reserve(
        self,
        request_id: RequestId,
        num_tokens: int,
        match: PrefixMatch,
        *,
        now: float,
        checkpoints: Sequence[int] = (),
        receive: bool = False,
        lease_until_s: float | None = None,
    ) -> Reservation:
        if request_id in self._entries:
            raise LocalProtocolError(f"request {request_id!r} has a reservation; release it first")
        reused = match.num_held_tokens if receive else match.num_cached_tokens
        if num_tokens < reused or num_tokens < 0:
            raise ConfigError(
                f"num_tokens is {num_tokens} and the match reuses {reused}; reserve at least as "
                "many, or match with max_tokens at most num_tokens"
            )
        wanted = self._wanted_positions(checkpoints, num_tokens, match)
        tables, resume_slots, last_hash = self._resolve(match, receive=receive)
        pins = {**tables, **{g: (slot,) for g, slot in resume_slots.items()}}
        num_blocks = cdiv(num_tokens, self._block_size)
        needs = {g: num_blocks - len(table) for g, table in tables.items()}
        positions = self._affordable(request_id, wanted, needs, pins)
        needs |= dict.fromkeys(self._slot_groups, 1 + len(positions))

        self._now = max(self._now, now)
        self._num_checkpoints_skipped += len(wanted) - len(positions)
        self._leases.open(request_id, lease_until_s=lease_until_s)
        self._pin(request_id, pins)
        fresh = self._take(request_id, needs)
        reservation = Reservation(
            request_id=request_id,
            num_tokens=num_tokens,
            num_reused_tokens=reused,
            block_tables={g: table + fresh[g] for g, table in tables.items()},
            resume_slots=resume_slots,
            tail_slots={g: fresh[g][0] for g in self._slot_groups},
            checkpoint_slots={
                position: {g: fresh[g][i] for g in self._slot_groups}
                for i, position in enumerate(sorted(positions), start=1)
            },
        )
        self._entries[request_id] = self._entry(reservation, tables, last_hash)
        return reservation

    def commit(
        self, request_id: RequestId, block_hashes: Sequence[BlockHash], num_tokens: int, now: float
    ) -> None:
        entry = self._committable(request_id, block_hashes, num_tokens)
        if entry is None:
            return
        self._now = max(self._now, now)
        for group_id in self._token_groups:
            stored = self._index_blocks(entry, group_id, block_hashes)
            self._events.append(group_id, stored=stored)
        for group_id, stored in self._index_slots(entry, block_hashes, num_tokens).items():
            self._events.append(group_id, stored=stored)
        if len(block_hashes) > entry.depth:
            entry.depth, entry.last_hash = len(block_hashes), block_hashes[-1]

    def renew(self, request_id: RequestId, lease_until_s: float) -> None:
        self._leases.renew(request_id, lease_until_s)

    def expired(self, now: float) -> tuple[RequestId, ...]:
        return self._leases.expired(now)

    def next_deadline(self) -> float | None:
        """The earliest lease deadline."""
        return self._leases.next_deadline()

    def release(self, request_id: RequestId) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        for group_id, block_ids in self._leases.release(request_id).items():
            idle = [b for b in block_ids if self._index.is_indexed(group_id, b)]
            private = set(block_ids).difference(idle)
            if group_id in entry.chains:  # children before parents
                unused = set(idle)
                idle = [b for b in reversed(entry.chains[group_id]) if b in unused]
            self._evictor.free(group_id, [b for b in block_ids if b in private])
            self._index.set_idle(group_id, idle, self._now)
            self._evictor.on_unpinned(group_id, block_ids, self._now)

    def take_events(self) -> tuple[CacheEvent, ...]:
        return self._events.take()

    def snapshot(self) -> tuple[int, dict[GroupId, tuple[BlockHash, ...]]]:
        return self._events.sequence, {g: self._index.hashes(g) for g in self._groups}

    def usage(self) -> CacheUsage:
        return CacheUsage(
            num_slabs=self._allocator.num_slabs,
            num_free_slabs=self._allocator.num_free_slabs,
            blocks={g: self._allocator.num_taken(g) for g in self._groups},
            indexed={g: self._index.num_indexed(g) for g in self._groups},
            reserved={g: self._leases.num_pinned(g) for g in self._groups},
            num_requests=len(self._entries),
            num_leases=self._leases.num_leases,
            num_checkpoints_skipped=self._num_checkpoints_skipped,
        )

    def page_state(self, group_id: GroupId, block_id: BlockId) -> PageState:
        """State of one block or slot."""
        pinned = self._leases.count(group_id, block_id) > 0
        if self._index.is_indexed(group_id, block_id):
            return PageState.PINNED if pinned else PageState.VALID
        return PageState.WRITING if pinned else PageState.FREE

    def check(self) -> None:
        for part in (self._allocator, self._index, self._leases, self._evictor):
            part.check()
        for group_id in self._groups:
            taken = self._allocator.taken(group_id)
            pinned = self._leases.pinned(group_id)
            indexed = {b for b in taken if self._index.is_indexed(group_id, b)}
            assert len(indexed) == self._index.num_indexed(group_id), "an indexed block is free"
            assert taken == pinned | indexed, "a block is neither held nor findable"
            assert self._index.num_idle(group_id) == len(indexed - pinned), "idle differs"
        assert len(self._leases) == len(self._entries)
        for entry in self._entries.values():
            for group_id, chain in entry.chains.items():
                assert len(chain) == entry.depth, "a group was committed less far than others"
                pinned = self._leases.pinned(group_id)
                assert pinned.issuperset(chain)
                assert pinned.issuperset(entry.reservation.block_tables[group_id])

    def _wanted_positions(
        self, checkpoints: Sequence[int], num_tokens: int, match: PrefixMatch
    ) -> list[int]:
        lowest, size = match.num_cached_tokens, self._block_size
        wrong = [p for p in checkpoints if p % size or not lowest < p <= num_tokens]
        if wrong:
            raise ConfigError(
                f"checkpoints {wrong} are not multiples of block_size {size} above the {lowest} "
                f"cached and up to the {num_tokens} reserved tokens; see checkpoint_positions"
            )
        if not self._slot_groups:
            return []
        return [p for p in dict.fromkeys(checkpoints) if p < num_tokens]

    def _resolve(
        self, match: PrefixMatch, *, receive: bool
    ) -> tuple[dict[GroupId, tuple[BlockId, ...]], dict[GroupId, BlockId], BlockHash | None]:
        """Block tables, resume slots and hash of the reused prefix, as they are now."""
        tokens = match.num_held_tokens if receive else match.num_cached_tokens
        if not tokens:
            return {g: () for g in self._token_groups}, {}, None
        last_hash = match.held_hash if receive else match.cached_hash
        if last_hash is None:
            raise LocalProtocolError(
                f"the match of {tokens} tokens names no hash; pass what match() returned"
            )
        depth = tokens // self._block_size
        found = {g: self._index.table(g, last_hash, depth) for g in self._token_groups}
        tables = {g: table for g, table in found.items() if table is not None}
        slots = {} if receive else self._index.checkpoint(last_hash, depth)
        if len(tables) < len(found) or slots is None:
            raise CapacityError(
                f"some blocks of the matched {tokens} tokens are not here any more; match again"
            )
        return tables, slots, last_hash

    def _affordable(
        self,
        request_id: RequestId,
        wanted: Sequence[int],
        block_needs: Mapping[GroupId, int],
        pins: Mapping[GroupId, Sequence[BlockId]],
    ) -> Sequence[int]:
        """The checkpoints for which there is room besides what is needed, else CapacityError."""
        room = self._evictor.room(pins)
        for num_positions in range(len(wanted), -1, -1):
            needs = {**block_needs, **dict.fromkeys(self._slot_groups, 1 + num_positions)}
            if room.fits(needs):
                return wanted[:num_positions]
        pinned = {g: self._leases.num_pinned(g) for g in self._groups}
        if not self._entries:
            raise CapacityError(
                f"request {request_id!r} needs {needs} blocks and slots (by group) and does not "
                f"fit the empty pool of {self._allocator.num_slabs} slabs; enlarge the pool"
            )
        raise CapacityError(
            f"request {request_id!r} needs {needs} more blocks and slots (by group); "
            f"{len(self._entries)} requests hold {pinned} in a pool of "
            f"{self._allocator.num_slabs} slabs; retry after a release, or enlarge the pool"
        )

    def _take(
        self, request_id: RequestId, needs: Mapping[GroupId, int]
    ) -> dict[GroupId, tuple[BlockId, ...]]:
        """Evicts, allocates and pins; ``needs`` must fit."""
        for group_id, removed in self._evictor.make_room(needs).items():
            self._events.append(group_id, removed=removed)
        fresh = self._allocator.allocate_many(needs)
        self._pin(request_id, fresh)
        return fresh

    def _entry(
        self,
        reservation: Reservation,
        tables: Mapping[GroupId, tuple[BlockId, ...]],
        last_hash: BlockHash | None,
    ) -> Entry:
        waiting = dict(reservation.checkpoint_slots)
        if reservation.num_tokens and reservation.num_tokens % self._block_size == 0:
            waiting[reservation.num_tokens] = reservation.tail_slots
        return Entry(
            reservation=reservation,
            chains={g: list(table) for g, table in tables.items()},
            waiting=waiting,
            depth=reservation.num_reused_tokens // self._block_size,
            last_hash=last_hash,
        )

    def _pin(self, owner: RequestId, blocks: Mapping[GroupId, Sequence[BlockId]]) -> None:
        for group_id, block_ids in blocks.items():
            self._evictor.on_pinned(group_id, self._leases.pin(owner, group_id, block_ids))

    def _committable(
        self, request_id: RequestId, block_hashes: Sequence[BlockHash], num_tokens: int
    ) -> Entry | None:
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.check_commit(block_hashes, num_tokens, self._block_size)
        return entry

    def _index_blocks(
        self, entry: Entry, group_id: GroupId, block_hashes: Sequence[BlockHash]
    ) -> list[BlockHash]:
        """Makes complete blocks of one token group findable; returns the new hashes."""
        chain = entry.chains[group_id]
        table = entry.reservation.block_tables[group_id]
        stored, foreign = [], []
        for depth in range(len(chain) + 1, len(block_hashes) + 1):
            block_hash = block_hashes[depth - 1]
            block_id = self._index.find(group_id, block_hash, depth)
            if block_id is None:
                block_id = table[depth - 1]
                self._index.insert_block(group_id, block_hashes, depth, block_id)
                stored.append(block_hash)
            else:
                foreign.append(block_id)
            chain.append(block_id)
        self._pin(entry.reservation.request_id, {group_id: foreign})
        return stored

    def _index_slots(
        self, entry: Entry, block_hashes: Sequence[BlockHash], num_tokens: int
    ) -> dict[GroupId, list[BlockHash]]:
        """Makes states up to ``num_tokens`` findable; returns the new hashes by group."""
        stored: dict[GroupId, list[BlockHash]] = {g: [] for g in self._slot_groups}
        for position in [p for p in entry.waiting if p <= num_tokens]:
            depth = position // self._block_size
            block_hash = block_hashes[depth - 1]
            for group_id, slot in entry.waiting.pop(position).items():
                found = self._index.find(group_id, block_hash, depth)
                if found is None:
                    self._index.insert_slot(group_id, block_hash, depth, slot)
                    stored[group_id].append(block_hash)
                elif found != entry.reservation.resume_slots.get(group_id):
                    self._pin(entry.reservation.request_id, {group_id: [found]})
        return stored
