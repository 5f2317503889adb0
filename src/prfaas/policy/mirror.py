"""One node's cache as far as its events tell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from prfaas.core import BlockHash, GroupId
from prfaas.policy.node_set import NodeSet


class GroupHashes:
    """The hashes that several groups of one node hold, and those that all of them hold."""

    __slots__ = ("by_group", "everywhere", "group_ids")

    def __init__(self, group_ids: tuple[GroupId, ...]) -> None:
        self.group_ids = group_ids
        self.by_group: dict[GroupId, set[BlockHash]] = {g: set() for g in group_ids}
        # A single group's own set is the set that all groups hold.
        self.everywhere = self.by_group[group_ids[0]] if len(group_ids) == 1 else set()

    def store(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Adds hashes to a group. Returns those that all groups hold now and did not before."""
        held, everywhere = self.by_group[group_id], self.everywhere
        if len(self.group_ids) == 1:
            new = [h for h in hashes if h not in everywhere]
            held.update(new)
            return new
        held.update(hashes)
        others = [known for g, known in self.by_group.items() if g != group_id]
        new = [h for h in hashes if h not in everywhere and all(h in other for other in others)]
        everywhere.update(new)
        return new

    def remove(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Takes hashes out of a group. Returns those that all groups held before."""
        gone = [h for h in dict.fromkeys(hashes) if h in self.everywhere]
        self.by_group[group_id].difference_update(hashes)
        self.everywhere.difference_update(gone)
        return gone

    def check(self) -> None:
        """Asserts the invariants."""
        if self.by_group:
            assert self.everywhere == set.intersection(*self.by_group.values())
        else:
            assert not self.everywhere


class Mirror:
    """One node's cache, with the number of its last event.

    Attributes:
        position: of the node, in every `NodeSet`.
        bit: the set of only this node.
        block_size: granules per block.
        rows: hashes that token groups hold.
        checkpoints: hashes that slot groups hold.
        sequence: of the last event.
        needs_resync: events were lost; nothing is known until a snapshot comes.
    """

    __slots__ = (
        "bit",
        "block_size",
        "checkpoints",
        "epoch",
        "needs_resync",
        "position",
        "rows",
        "sequence",
    )

    def __init__(
        self,
        epoch: int,
        block_size: int,
        position: int,
        *,
        token_ids: tuple[GroupId, ...],
        slot_ids: tuple[GroupId, ...],
    ) -> None:
        self.epoch = epoch
        self.block_size = block_size
        self.position = position
        self.bit: NodeSet = 1 << position
        self.rows = GroupHashes(token_ids)
        self.checkpoints = GroupHashes(slot_ids)
        self.sequence = 0
        self.needs_resync = False

    def clear(self) -> None:
        """Forgets all hashes."""
        self.rows = GroupHashes(self.rows.group_ids)
        self.checkpoints = GroupHashes(self.checkpoints.group_ids)

    def last_row(self, granule_hashes: Sequence[BlockHash], limit: int) -> int:
        """How many of the first ``limit`` blocks have rows in every token group, by bisection."""
        size, rows = self.block_size, self.rows.everywhere
        if not limit or granule_hashes[size - 1] not in rows:
            return 0  # most nodes share nothing with most prompts
        low, high = 1, limit
        while low < high:
            middle = (low + high + 1) // 2
            if granule_hashes[middle * size - 1] in rows:
                low = middle
            else:
                high = middle - 1
        return low

    def last_checkpoint(self, granule_hashes: Sequence[BlockHash], limit: int) -> int:
        """The deepest of the first ``limit`` boundaries with every slot group's state, or 0."""
        size, checkpoints = self.block_size, self.checkpoints.everywhere
        if not limit or not checkpoints:
            return 0
        if granule_hashes[limit * size - 1] in checkpoints:
            return limit
        found = map(checkpoints.__contains__, granule_hashes[limit * size - 1 :: -size])
        return next(compress(range(limit, 0, -1), found), 0)
