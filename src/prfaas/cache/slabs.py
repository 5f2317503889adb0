"""Hands out blocks and state slots of a pool of equal slabs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prfaas.cache.geometry import PoolGeometry
from prfaas.core import BlockId, GroupId, cdiv
from prfaas.errors import CapacityError, ConfigError, LocalProtocolError


class SlabAllocator:
    """Splits slabs into units of one KV cache group at a time.

    A slab is given to a group when that group's slabs are full, and returns to the free list with
    its last unit. Partly used slabs are filled first. O(1) per unit; deterministic.
    """

    def __init__(self, geometry: PoolGeometry) -> None:
        self._units_per_slab = {u.group_id: u.units_per_slab for u in geometry.units}
        self._free_slabs = list(range(geometry.num_slabs - 1, -1, -1))
        self._owners: list[GroupId | None] = [None] * geometry.num_slabs
        self._free_positions: list[list[int]] = [[] for _ in range(geometry.num_slabs)]
        self._partial: dict[GroupId, dict[int, None]] = {g: {} for g in self._units_per_slab}
        self._taken: dict[GroupId, set[BlockId]] = {g: set() for g in self._units_per_slab}
        self._num_slabs: dict[GroupId, int] = dict.fromkeys(self._units_per_slab, 0)

    def __repr__(self) -> str:
        used = ", ".join(f"{g}: {len(ids)}" for g, ids in self._taken.items())
        return (
            f"<SlabAllocator {len(self._free_slabs)} of {len(self._owners)} slabs free, "
            f"units by group {{{used}}}>"
        )

    @property
    def group_ids(self) -> tuple[GroupId, ...]:
        return tuple(self._units_per_slab)

    @property
    def num_slabs(self) -> int:
        return len(self._owners)

    @property
    def num_free_slabs(self) -> int:
        return len(self._free_slabs)

    def units_per_slab(self, group_id: GroupId) -> int:
        return self._units_per_slab[group_id]

    def num_group_slabs(self, group_id: GroupId) -> int:
        """Slabs that belong to a group now."""
        return self._num_slabs[group_id]

    def num_taken(self, group_id: GroupId) -> int:
        """Units of a group that are handed out."""
        return len(self._taken[group_id])

    def num_free_units(self, group_id: GroupId) -> int:
        """Units of a group that can be had without another slab."""
        capacity = self._num_slabs[group_id] * self._units_per_slab[group_id]
        return capacity - len(self._taken[group_id])

    def is_taken(self, group_id: GroupId, block_id: BlockId) -> bool:
        return block_id in self._taken[group_id]

    def taken(self, group_id: GroupId) -> frozenset[BlockId]:
        """All units of a group that are handed out; a copy."""
        return frozenset(self._taken[group_id])

    def slab_owner(self, slab: int) -> GroupId | None:
        return self._owners[slab]

    def slab_units(self, slab: int) -> tuple[BlockId, ...]:
        """Units of a slab that are handed out, in order; none for a free slab."""
        owner = self._owners[slab]
        if owner is None:
            return ()
        first = slab * self._units_per_slab[owner]
        ids = map(BlockId, range(first, first + self._units_per_slab[owner]))
        return tuple(block_id for block_id in ids if block_id in self._taken[owner])

    def can_allocate(self, needs: Mapping[GroupId, int]) -> bool:
        """Whether `allocate_many` would succeed now."""
        return self._num_slabs_for(needs) <= len(self._free_slabs)

    def allocate(self, group_id: GroupId, num_units: int) -> tuple[BlockId, ...]:
        """Takes units of one group. Raises CapacityError with nothing taken."""
        return self.allocate_many({group_id: num_units})[group_id]

    def allocate_many(self, needs: Mapping[GroupId, int]) -> dict[GroupId, tuple[BlockId, ...]]:
        """Takes units of several groups, all or nothing.

        Raises:
            ConfigError: a negative count.
            CapacityError: not enough free units and slabs; nothing was taken.
        """
        num_slabs = self._num_slabs_for(needs)
        if num_slabs > len(self._free_slabs):
            raise CapacityError(
                f"units {dict(needs)} (by group) need {num_slabs} more slabs, "
                f"{len(self._free_slabs)} of {len(self._owners)} are free; free some units first"
            )
        return {group_id: self._take(group_id, n) for group_id, n in needs.items()}

    def free(self, group_id: GroupId, block_ids: Sequence[BlockId]) -> tuple[int, ...]:
        """Gives units back; returns the slabs that no longer belong to the group.

        Raises:
            LocalProtocolError: a unit is not handed out, or named twice; nothing was freed.
        """
        taken = self._taken[group_id]
        if len(set(block_ids)) != len(block_ids) or not taken.issuperset(block_ids):
            wrong = sorted({b for b in block_ids if b not in taken or block_ids.count(b) > 1})
            raise LocalProtocolError(
                f"blocks {wrong} of group {group_id} are freed twice or were never allocated; "
                "free each block once"
            )
        units = self._units_per_slab[group_id]
        emptied = []
        for block_id in block_ids:
            slab, position = divmod(block_id, units)
            positions = self._free_positions[slab]
            if not positions:
                self._partial[group_id][slab] = None
            positions.append(position)
            if len(positions) == units:
                emptied.append(slab)
                self._return_slab(group_id, slab)
        taken.difference_update(block_ids)
        return tuple(emptied)

    def check(self) -> None:
        """Asserts every invariant."""
        owned: dict[GroupId, int] = dict.fromkeys(self._units_per_slab, 0)
        used: dict[GroupId, int] = dict.fromkeys(self._units_per_slab, 0)
        for slab, owner in enumerate(self._owners):
            positions = self._free_positions[slab]
            if owner is None:
                assert not positions, f"free slab {slab} has unit positions"
                assert slab in self._free_slabs, f"slab {slab} is lost"
                continue
            units = self._units_per_slab[owner]
            assert len(set(positions)) == len(positions) < units, f"slab {slab}: {positions}"
            assert (slab in self._partial[owner]) == bool(positions), f"slab {slab} misfiled"
            free = {BlockId(slab * units + position) for position in positions}
            assert not free & self._taken[owner], f"slab {slab}: free units are handed out"
            owned[owner] += 1
            used[owner] += units - len(positions)
        assert owned == self._num_slabs
        assert used == {g: len(ids) for g, ids in self._taken.items()}
        assert len(set(self._free_slabs)) == len(self._free_slabs)
        assert len(self._free_slabs) + sum(owned.values()) == len(self._owners)

    def _num_slabs_for(self, needs: Mapping[GroupId, int]) -> int:
        if any(n < 0 for n in needs.values()):
            raise ConfigError(f"units {dict(needs)} (by group) must each be at least 0")
        return sum(
            cdiv(max(0, n - self.num_free_units(group_id)), self._units_per_slab[group_id])
            for group_id, n in needs.items()
        )

    def _take(self, group_id: GroupId, num_units: int) -> tuple[BlockId, ...]:
        units = self._units_per_slab[group_id]
        partial = self._partial[group_id]
        ids: list[BlockId] = []
        while len(ids) < num_units:
            slab = next(iter(partial)) if partial else self._claim_slab(group_id)
            positions = self._free_positions[slab]
            keep = max(0, len(positions) - (num_units - len(ids)))
            first = slab * units
            ids += [BlockId(first + position) for position in reversed(positions[keep:])]
            del positions[keep:]
            if not positions:
                del partial[slab]
        self._taken[group_id].update(ids)
        return tuple(ids)

    def _claim_slab(self, group_id: GroupId) -> int:
        slab = self._free_slabs.pop()
        self._owners[slab] = group_id
        self._num_slabs[group_id] += 1
        self._free_positions[slab] = list(range(self._units_per_slab[group_id] - 1, -1, -1))
        self._partial[group_id][slab] = None
        return slab

    def _return_slab(self, group_id: GroupId, slab: int) -> None:
        del self._partial[group_id][slab]
        self._free_positions[slab].clear()
        self._owners[slab] = None
        self._num_slabs[group_id] -= 1
        self._free_slabs.append(slab)
