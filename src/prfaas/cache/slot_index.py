"""The index of one slot group: checkpoints, each reusable at exactly one boundary."""

from __future__ import annotations

from prfaas.core import BlockHash, BlockId
from prfaas.errors import LocalProtocolError


class SlotIndex:
    """Block hash -> slot and depth for one slot group.

    ``idle`` orders the slots that nobody uses, oldest first, each with the stamp of its last use.
    """

    def __init__(self) -> None:
        self._slots: dict[BlockHash, tuple[BlockId, int]] = {}
        self.hash_of: dict[BlockId, BlockHash] = {}
        self.idle: dict[BlockId, float] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._slots

    def __repr__(self) -> str:
        return f"<SlotIndex {len(self._slots)} checkpoints, {len(self.idle)} idle>"

    def find(self, block_hash: BlockHash, depth: int) -> BlockId | None:
        """The slot of a hash at this depth, if present."""
        slot, found = self._slots.get(block_hash, (None, 0))
        return slot if found == depth else None

    def depth_of(self, block_hash: BlockHash) -> int:
        """Blocks up to the boundary of a hash, 0 if it has no checkpoint."""
        return self._slots.get(block_hash, (None, 0))[1]

    def insert(self, block_hash: BlockHash, depth: int, slot_id: BlockId) -> None:
        """Adds a checkpoint; it is in use until made idle.

        Raises:
            LocalProtocolError: the hash or the slot is indexed already.
        """
        if block_hash in self._slots or slot_id in self.hash_of:
            raise LocalProtocolError(
                f"hash {block_hash.hex()} or slot {slot_id} is indexed already; "
                "look a hash up before inserting it"
            )
        self._slots[block_hash] = slot_id, depth
        self.hash_of[slot_id] = block_hash

    def is_leaf(self, slot_id: BlockId) -> bool:
        return slot_id in self.hash_of

    def remove(self, slot_id: BlockId) -> list[tuple[BlockHash, BlockId]]:
        """Removes a checkpoint. Raises LocalProtocolError if it is in use."""
        if slot_id not in self.idle:
            raise LocalProtocolError(f"slot {slot_id} is in use; release it first")
        block_hash = self.hash_of.pop(slot_id)
        del self._slots[block_hash], self.idle[slot_id]
        return [(block_hash, slot_id)]

    def hashes(self) -> tuple[BlockHash, ...]:
        """All hashes, oldest insertion first."""
        return tuple(self._slots)

    def check(self) -> None:
        """Asserts every invariant."""
        assert self.hash_of == {slot: h for h, (slot, _) in self._slots.items()}
        assert self.idle.keys() <= self.hash_of.keys()
        assert list(self.idle.values()) == sorted(self.idle.values()), "recency is out of order"
