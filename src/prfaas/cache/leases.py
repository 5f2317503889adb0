"""Who uses which blocks, and until when: the holding half of a cache.

Usable alone: block ids may belong to any allocator. An engine whose pages are not tied to a group
uses one group id for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prfaas.core import BlockId, GroupId, RequestId
from prfaas.errors import LocalProtocolError


class LeaseTable:
    """Reference counts over (group, block), by owner, with optional deadlines.

    An owner holds a block at most once; several owners may hold the same block. O(1) per block.
    """

    def __init__(self) -> None:
        self._counts: dict[GroupId, dict[BlockId, int]] = {}
        self._held: dict[RequestId, dict[GroupId, dict[BlockId, None]]] = {}
        self._deadlines: dict[RequestId, float] = {}

    def __repr__(self) -> str:
        pinned = ", ".join(f"{g}: {len(counts)}" for g, counts in self._counts.items())
        return (
            f"<LeaseTable {len(self._held)} owners, {len(self._deadlines)} with a deadline, "
            f"blocks by group {{{pinned}}}>"
        )

    def __contains__(self, owner: object) -> bool:
        return owner in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_leases(self) -> int:
        """Owners with a deadline."""
        return len(self._deadlines)

    def open(self, owner: RequestId, *, lease_until_s: float | None = None) -> None:
        """Starts an owner that holds nothing yet. Raises LocalProtocolError if it exists."""
        if owner in self._held:
            raise LocalProtocolError(f"request {owner!r} holds blocks already; release it first")
        self._held[owner] = {}
        if lease_until_s is not None:
            self._deadlines[owner] = lease_until_s

    def pin(
        self, owner: RequestId, group_id: GroupId, block_ids: Iterable[BlockId]
    ) -> tuple[BlockId, ...]:
        """Holds blocks for an owner; returns those that nobody held before.

        Raises:
            LocalProtocolError: unknown owner, or it holds one of them already; nothing changed.
        """
        held = self._owner(owner).get(group_id, {})
        ids = dict.fromkeys(block_ids)
        if not held.keys().isdisjoint(ids):
            raise LocalProtocolError(
                f"request {owner!r} already holds blocks {sorted(held.keys() & ids)} of group "
                f"{group_id}; pin a block once per request"
            )
        counts = self._counts.setdefault(group_id, {})
        new = tuple(block_id for block_id in ids if block_id not in counts)
        for block_id in ids:
            counts[block_id] = counts.get(block_id, 0) + 1
        self._held[owner].setdefault(group_id, {}).update(ids)
        return new

    def unpin(
        self, owner: RequestId, group_id: GroupId, block_ids: Iterable[BlockId]
    ) -> tuple[BlockId, ...]:
        """Lets go of some blocks of an owner; returns those that nobody holds any more.

        Raises:
            LocalProtocolError: unknown owner, or it does not hold one of them; nothing changed.
        """
        held = self._owner(owner).get(group_id, {})
        ids = dict.fromkeys(block_ids)
        if not ids.keys() <= held.keys():
            raise LocalProtocolError(
                f"request {owner!r} does not hold blocks {sorted(ids.keys() - held.keys())} of "
                f"group {group_id}; unpin what was pinned"
            )
        for block_id in ids:
            del held[block_id]
        return self._drop(group_id, ids)

    def release(self, owner: RequestId) -> dict[GroupId, tuple[BlockId, ...]]:
        """Ends an owner; returns, per group, the blocks that nobody holds any more.

        Idempotent: an owner that is unknown or was released before held nothing.
        """
        self._deadlines.pop(owner, None)
        held = self._held.pop(owner, {})
        return {group_id: self._drop(group_id, ids) for group_id, ids in held.items()}

    def renew(self, owner: RequestId, lease_until_s: float) -> None:
        """Sets or moves an owner's deadline. Raises LocalProtocolError if it is unknown."""
        self._owner(owner)
        self._deadlines[owner] = lease_until_s

    def expired(self, now: float) -> tuple[RequestId, ...]:
        """Owners whose deadline has come, the earliest first. Reads only."""
        late = [(deadline, owner) for owner, deadline in self._deadlines.items() if deadline <= now]
        return tuple(owner for _, owner in sorted(late))

    def next_deadline(self) -> float | None:
        return min(self._deadlines.values(), default=None)

    def count(self, group_id: GroupId, block_id: BlockId) -> int:
        """Owners that hold a block."""
        return self._counts.get(group_id, {}).get(block_id, 0)

    def num_pinned(self, group_id: GroupId) -> int:
        """Blocks of a group that somebody holds, shared ones counted once."""
        return len(self._counts.get(group_id, ()))

    def pinned(self, group_id: GroupId) -> frozenset[BlockId]:
        """Blocks of a group that somebody holds; a copy."""
        return frozenset(self._counts.get(group_id, ()))

    def check(self) -> None:
        """Asserts every invariant."""
        counted: dict[GroupId, dict[BlockId, int]] = {group_id: {} for group_id in self._counts}
        for groups in self._held.values():
            for group_id, ids in groups.items():
                for block_id in ids:
                    counted[group_id][block_id] = counted[group_id].get(block_id, 0) + 1
        assert counted == self._counts, "reference counts differ from what the owners hold"
        assert self._deadlines.keys() <= self._held.keys(), "a deadline outlived its owner"

    def _owner(self, owner: RequestId) -> Mapping[GroupId, dict[BlockId, None]]:
        held = self._held.get(owner)
        if held is None:
            raise LocalProtocolError(
                f"request {owner!r} holds nothing; it was never reserved or is released"
            )
        return held

    def _drop(self, group_id: GroupId, block_ids: Iterable[BlockId]) -> tuple[BlockId, ...]:
        counts = self._counts.get(group_id, {})
        last = []
        for block_id in block_ids:
            count = counts[block_id] - 1
            if count:
                counts[block_id] = count
            else:
                del counts[block_id]
                last.append(block_id)
        return tuple(last)
