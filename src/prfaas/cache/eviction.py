"""Decides what a pool gives up for a request, and whether it is enough, before anything changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import attrs

from prfaas.cache.leases import LeaseTable
from prfaas.cache.prefix_index import PrefixIndex
from prfaas.cache.slabs import SlabAllocator
from prfaas.core import BlockHash, BlockId, GroupId, cdiv


@attrs.frozen
class GroupRoom:
    """What one group has to give.

    Attributes:
        units_per_slab: units in a slab of the group.
        num_units: units that are not pinned, in slabs of the group.
        num_idle_slabs: its slabs without a pinned unit.
    """

    units_per_slab: int
    num_units: int
    num_idle_slabs: int

    def slabs_missing(self, need: int) -> int:
        """Further slabs that the group wants for ``need`` units."""
        return cdiv(max(0, need - self.num_units), self.units_per_slab)

    def slabs_to_spare(self, need: int) -> int:
        """Slabs that the group can lose and still have ``need`` units."""
        return min(self.num_idle_slabs, max(0, self.num_units - need) // self.units_per_slab)


@attrs.frozen
class Room:
    """What a pool could give if everything evictable went; a value.

    Attributes:
        groups: by group.
        num_free_slabs: slabs that belong to no group.
    """

    groups: Mapping[GroupId, GroupRoom]
    num_free_slabs: int

    def must_move_slabs(self, needs: Mapping[GroupId, int]) -> bool:
        """Whether ``needs`` take more slabs than are free, whatever the groups evict themselves."""
        missing = sum(self.groups[g].slabs_missing(need) for g, need in needs.items())
        return missing > self.num_free_slabs

    def fits(self, needs: Mapping[GroupId, int]) -> bool:
        """Whether ``needs``, which name every group, can be had. Exact."""
        missing = sum(self.groups[g].slabs_missing(need) for g, need in needs.items())
        spare = sum(self.groups[g].slabs_to_spare(need) for g, need in needs.items())
        return missing <= self.num_free_slabs + spare


class Evictor:
    """Least-recently-used eviction over groups that share slabs.

    A unit is pinned (in the lease table), idle (indexed and not pinned) or free. In its own slabs
    a group gains one unit by evicting its oldest leaf. A slab changes group only when it is wholly
    free, so another group gives up an *idle slab*, one without a pinned unit, with all it holds.
    Whichever was used less recently goes first: the group's oldest leaf, or the oldest idle slab of
    a group that does not need it. So memory follows the traffic from group to group.

    Because users of a block also pin its parents, every unpinned block of a group can be evicted,
    and feasibility is exact arithmetic over a few counts per group.
    """

    def __init__(self, allocator: SlabAllocator, index: PrefixIndex, leases: LeaseTable) -> None:
        self._allocator = allocator
        self._index = index
        self._leases = leases
        self._num_pinned_units: Counter[int] = Counter()  # by slab
        self._idle_slabs: dict[GroupId, dict[int, float]] = {
            group_id: {} for group_id in allocator.group_ids
        }

    def __repr__(self) -> str:
        idle = ", ".join(f"{g}: {len(slabs)}" for g, slabs in self._idle_slabs.items())
        return f"<Evictor idle slabs by group {{{idle}}}>"

    def room(self, pins: Mapping[GroupId, Sequence[BlockId]]) -> Room:
        """What there is once these indexed blocks are pinned. Reads only."""
        groups = {}
        for group_id, idle in self._idle_slabs.items():
            units = self._allocator.units_per_slab(group_id)
            new = [b for b in pins.get(group_id, ()) if not self._leases.count(group_id, b)]
            num_pinned = self._leases.num_pinned(group_id) + len(new)
            groups[group_id] = GroupRoom(
                units,
                self._allocator.num_group_slabs(group_id) * units - num_pinned,
                len(idle) - len({b // units for b in new} & idle.keys()),
            )
        return Room(groups, self._allocator.num_free_slabs)

    def make_room(self, needs: Mapping[GroupId, int]) -> dict[GroupId, list[BlockHash]]:
        """Evicts until the allocator can serve ``needs``, which must fit; returns what went.

        Args:
            needs: units per group; names every group.
        """
        removed: dict[GroupId, list[BlockHash]] = {}
        while not self._allocator.can_allocate(needs):
            group_id, victims = self._choose(needs)
            gone: list[tuple[BlockHash, BlockId]] = []
            for victim in victims:
                if self._index.is_indexed(group_id, victim):
                    gone += self._index.remove_subtree(group_id, victim)
            removed.setdefault(group_id, []).extend(block_hash for block_hash, _ in gone)
            self.free(group_id, [block_id for _, block_id in gone])
        return removed

    def free(self, group_id: GroupId, block_ids: Sequence[BlockId]) -> None:
        """Gives units that are neither pinned nor indexed back to the allocator."""
        for slab in self._allocator.free(group_id, block_ids):
            self._idle_slabs[group_id].pop(slab, None)

    def on_pinned(self, group_id: GroupId, block_ids: Iterable[BlockId]) -> None:
        """Notes units that nobody held before."""
        self._index.set_busy(group_id, block_ids)
        for slab, count in self._by_slab(group_id, block_ids).items():
            self._num_pinned_units[slab] += count
            self._idle_slabs[group_id].pop(slab, None)

    def on_unpinned(self, group_id: GroupId, block_ids: Iterable[BlockId], stamp: float) -> None:
        """Notes units that nobody holds any more; those not indexed have been freed before."""
        for slab, count in self._by_slab(group_id, block_ids).items():
            self._num_pinned_units[slab] -= count
            if not self._num_pinned_units[slab]:
                del self._num_pinned_units[slab]
                if self._allocator.slab_owner(slab) == group_id:
                    self._idle_slabs[group_id][slab] = stamp

    def check(self) -> None:
        """Asserts every invariant."""
        pinned: Counter[int] = Counter()
        for group_id, idle in self._idle_slabs.items():
            pinned += self._by_slab(group_id, self._leases.pinned(group_id))
            assert list(idle.values()) == sorted(idle.values()), "idle slabs out of order"
            for oldest, _ in self._index.oldest(group_id, 1):
                assert self._index.is_leaf(group_id, oldest), "the oldest block has children"
        assert pinned == self._num_pinned_units
        for slab in range(self._allocator.num_slabs):
            owner = self._allocator.slab_owner(slab)
            filed = [g for g, idle in self._idle_slabs.items() if slab in idle]
            assert filed == ([] if owner is None or pinned[slab] else [owner]), f"slab {slab}"

    def _by_slab(self, group_id: GroupId, block_ids: Iterable[BlockId]) -> Counter[int]:
        units = self._allocator.units_per_slab(group_id)
        return Counter(block_id // units for block_id in block_ids)

    def _choose(self, needs: Mapping[GroupId, int]) -> tuple[GroupId, Sequence[BlockId]]:
        """The next group to evict from, and the units: a slab's, or leaves that save one slab."""
        room = self.room({})
        slab = min(
            (
                (stamp, group_id, slab)
                for group_id, group in room.groups.items()
                if group.slabs_to_spare(needs[group_id])
                for slab, stamp in islice(self._idle_slabs[group_id].items(), 1)
            ),
            default=None,
        )
        leaf = min(
            (
                (stamp, group_id)
                for group_id, need in needs.items()
                if need > self._allocator.num_free_units(group_id)
                for _, stamp in self._index.oldest(group_id, 1)
            ),
            default=None,
        )
        if leaf is None or (slab and (room.must_move_slabs(needs) or slab[0] < leaf[0])):
            assert slab is not None, "make_room was called for what does not fit"
            return slab[1], self._allocator.slab_units(slab[2])
        group_id = leaf[1]
        excess = needs[group_id] - self._allocator.num_free_units(group_id)
        num_leaves = (excess - 1) % room.groups[group_id].units_per_slab + 1
        youngest = slab[0] if slab else float("inf")
        leaves = self._index.oldest(group_id, num_leaves)
        return group_id, [block_id for block_id, stamp in leaves if stamp <= youngest]
