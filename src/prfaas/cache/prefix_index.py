"""Which prefix every KV cache group can serve: the lookup half of a hybrid cache.

Usable without our allocator: block ids are the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, islice

from prfaas.cache.chain_index import ChainIndex
from prfaas.cache.slot_index import SlotIndex
from prfaas.core import BlockHash, BlockId, GroupId
from prfaas.errors import ConfigError, LocalProtocolError
from prfaas.seams.cache import PrefixMatch


class PrefixIndex:
    """The hit of a prompt: the longest length that *every* group can serve.

    Token groups match block by block, by bisection. Slot groups match only where each of them has a
    checkpoint; checkpoints are marked on the chains of the first token group, so that a lookup does
    not scan a long prompt for a rare checkpoint. Groups are evicted independently.

    Args:
        token_groups: groups cached block by block.
        slot_groups: groups cached as one state per boundary.
        block_size: tokens per block.
    """

    def __init__(
        self, *, token_groups: Iterable[GroupId], slot_groups: Iterable[GroupId], block_size: int
    ) -> None:
        self._block_size = block_size
        self._chains = {group_id: ChainIndex() for group_id in token_groups}
        self._slots = {group_id: SlotIndex() for group_id in slot_groups}
        self._groups: dict[GroupId, ChainIndex | SlotIndex] = {**self._chains, **self._slots}
        if block_size < 1 or not self._groups:
            raise ConfigError(
                f"block_size is {block_size} with {len(self._groups)} groups; "
                "use at least 1 token and 1 group"
            )
        self._first_chain = next(iter(self._chains.values()), None)

    def __repr__(self) -> str:
        indexed = ", ".join(f"{g}: {len(index)}" for g, index in self._groups.items())
        return f"<PrefixIndex entries by group {{{indexed}}}>"

    def match(self, block_hashes: Sequence[BlockHash], max_blocks: int) -> PrefixMatch:
        """What can be served of the first ``max_blocks`` blocks. Reads only.

        O(log blocks), plus the copying of one block table per token group.
        """
        limit = max(0, min(len(block_hashes), max_blocks))
        depths = {g: chain.depth(block_hashes, limit) for g, chain in self._chains.items()}
        held = min(depths.values(), default=limit)
        for group_id in self._slots:
            depths[group_id] = self._last_checkpoint(group_id, block_hashes, held)
        cached = self._common_checkpoint(block_hashes, held)
        if not self._chains:
            held = cached
        size = self._block_size
        held_hash = block_hashes[held - 1] if held else None
        cached_hash = block_hashes[cached - 1] if cached else None
        return PrefixMatch(
            num_cached_tokens=cached * size,
            num_held_tokens=held * size,
            block_ids={g: self.table(g, held_hash, held) or () for g in self._chains},
            slot_ids=self.checkpoint(cached_hash, cached) or {},
            depth_tokens={group_id: depth * size for group_id, depth in depths.items()},
            cached_hash=cached_hash,
            held_hash=held_hash,
        )

    def table(
        self, group_id: GroupId, block_hash: BlockHash | None, depth: int
    ) -> tuple[BlockId, ...] | None:
        """Blocks of a token group up to a hash; () for no hash, None unless it is at this depth."""
        if block_hash is None:
            return ()
        chain = self._chains[group_id]
        return chain.table(block_hash, depth) if chain.is_at(block_hash, depth) else None

    def checkpoint(self, block_hash: BlockHash | None, depth: int) -> dict[GroupId, BlockId] | None:
        """Slots of every slot group at a hash; {} for no hash, None if one is not there."""
        if block_hash is None:
            return {}
        found = {g: index.find(block_hash, depth) for g, index in self._slots.items()}
        slots = {g: slot for g, slot in found.items() if slot is not None}
        return slots if len(slots) == len(found) else None

    def find(self, group_id: GroupId, block_hash: BlockHash, depth: int) -> BlockId | None:
        """Block or slot of a hash whose prefix has ``depth`` blocks, if present."""
        return self._groups[group_id].find(block_hash, depth)

    def is_indexed(self, group_id: GroupId, block_id: BlockId) -> bool:
        return block_id in self._groups[group_id].hash_of

    def is_leaf(self, group_id: GroupId, block_id: BlockId) -> bool:
        """Whether an indexed entry has no children in its group."""
        return self._groups[group_id].is_leaf(block_id)

    def num_indexed(self, group_id: GroupId) -> int:
        return len(self._groups[group_id])

    def hashes(self, group_id: GroupId) -> tuple[BlockHash, ...]:
        """Everything findable in a group, parents before children."""
        return self._groups[group_id].hashes()

    def insert_block(
        self,
        group_id: GroupId,
        block_hashes: Sequence[BlockHash],
        depth: int,
        block_id: BlockId,
    ) -> None:
        """Adds the block that ends at ``depth`` of these hashes; in use until made idle.

        Raises:
            LocalProtocolError: its parent is absent, or the hash or block is indexed already.
        """
        block_hash = block_hashes[depth - 1]
        parent = block_hashes[depth - 2] if depth > 1 else None
        chain = self._chains[group_id]
        chain.insert(parent, block_hash, depth, block_id)
        if chain is self._first_chain:
            for slot_group, slots in self._slots.items():
                if block_hash in slots:
                    chain.mark(slot_group, block_hash, depth)

    def insert_slot(
        self, group_id: GroupId, block_hash: BlockHash, depth: int, slot_id: BlockId
    ) -> None:
        """Adds a state at exactly this boundary; in use until made idle. Rows need not be present.

        Raises:
            LocalProtocolError: the hash or slot is indexed already.
        """
        self._slots[group_id].insert(block_hash, depth, slot_id)
        if self._first_chain is not None:
            self._first_chain.mark(group_id, block_hash, depth)

    def set_busy(self, group_id: GroupId, block_ids: Iterable[BlockId]) -> None:
        """Protects entries from eviction. Ids that are not indexed are skipped."""
        idle = self._groups[group_id].idle
        for block_id in block_ids:
            idle.pop(block_id, None)

    def set_idle(self, group_id: GroupId, block_ids: Iterable[BlockId], stamp: float) -> None:
        """Makes entries evictable, oldest first: children before their parents.

        Args:
            group_id: their group.
            block_ids: indexed blocks or slots.
            stamp: time of this use; must not decrease from call to call.

        Raises:
            LocalProtocolError: an id is not indexed; nothing changed.
        """
        index = self._groups[group_id]
        ids = list(block_ids)
        if not index.hash_of.keys() >= set(ids):
            raise LocalProtocolError(
                f"some of blocks {ids} of group {group_id} are not indexed; insert them first"
            )
        for block_id in ids:
            index.idle.pop(block_id, None)
            index.idle[block_id] = stamp

    def num_idle(self, group_id: GroupId) -> int:
        """Entries that can be evicted, provided that users of a block also use its parents."""
        return len(self._groups[group_id].idle)

    def oldest(self, group_id: GroupId, limit: int) -> list[tuple[BlockId, float]]:
        """The least recently used evictable entries with their stamps, oldest first."""
        return list(islice(self._groups[group_id].idle.items(), limit))

    def remove(self, group_id: GroupId, block_id: BlockId) -> BlockHash:
        """Removes one entry without children.

        Raises:
            LocalProtocolError: it is unknown, in use, or has a child in its group.
        """
        index = self._groups[group_id]
        if not self.is_indexed(group_id, block_id) or not index.is_leaf(block_id):
            raise LocalProtocolError(
                f"block {block_id} of group {group_id} is not indexed or has children; "
                "remove children first, or call remove_subtree"
            )
        return self.remove_subtree(group_id, block_id)[0][0]

    def remove_subtree(
        self, group_id: GroupId, block_id: BlockId
    ) -> list[tuple[BlockHash, BlockId]]:
        """Removes an indexed entry with all its descendants; returns them, children first.

        Raises:
            LocalProtocolError: one of them is in use; nothing was removed.
        """
        index = self._groups[group_id]
        depth = index.depth_of(index.hash_of[block_id]) if isinstance(index, SlotIndex) else 0
        removed = index.remove(block_id)
        if depth and self._first_chain is not None:
            self._first_chain.unmark(group_id, removed[0][0], depth)
        return removed

    def check(self) -> None:
        """Asserts every invariant."""
        for index in self._groups.values():
            index.check()
        if self._first_chain is not None:
            for group_id, slots in self._slots.items():
                both = {h for h in slots.hashes() if h in self._first_chain}
                assert both == self._first_chain.marked(group_id), "marks differ from checkpoints"

    def _last_checkpoint(
        self, group_id: GroupId, block_hashes: Sequence[BlockHash], limit: int
    ) -> int:
        """Deepest of the first ``limit`` boundaries at which one slot group has a checkpoint."""
        if not limit:
            return 0
        if self._first_chain is not None:
            return self._first_chain.deepest_mark(group_id, block_hashes[limit - 1], limit)
        found = map(self._slots[group_id].__contains__, reversed(block_hashes[:limit]))
        return next(compress(range(limit, 0, -1), found), 0)

    def _common_checkpoint(self, block_hashes: Sequence[BlockHash], limit: int) -> int:
        """Deepest of the first ``limit`` boundaries at which all slot groups have a checkpoint."""
        while True:
            depths = (self._last_checkpoint(g, block_hashes, limit) for g in self._slots)
            lowest = min(depths, default=limit)
            if lowest == limit:
                return limit
            limit = lowest
