"""Which node can serve which prefix: a mirror of every node's cache, fed by its cache events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

from prfaas.core import BlockHash, GroupId, NodeId
from prfaas.errors import ConfigError, RemoteProtocolError
from prfaas.seams import CacheEvent, NodeHit
from prfaas.spec import KVCacheGroup

_MISS = NodeHit()


class _GroupHashes:
    """The hashes that several groups hold, and those that all of them hold."""

    __slots__ = ("by_group", "everywhere", "group_ids")

    def __init__(self, group_ids: tuple[GroupId, ...]) -> None:
        self.group_ids = group_ids
        self.by_group: dict[GroupId, set[BlockHash]] = {g: set() for g in group_ids}
        # A single group's own set is the set that all groups hold.
        self.everywhere = self.by_group[group_ids[0]] if len(group_ids) == 1 else set()

    def store(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> None:
        self.by_group[group_id].update(hashes)
        if len(self.group_ids) > 1:
            self.everywhere.update(set(hashes).intersection(*self.by_group.values()))

    def remove(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> None:
        self.by_group[group_id].difference_update(hashes)
        self.everywhere.difference_update(hashes)

    def check(self) -> None:
        if self.by_group:
            assert self.everywhere == set.intersection(*self.by_group.values())
        else:
            assert not self.everywhere


class _Mirror:
    """One node's cache as far as its events tell."""

    __slots__ = ("block_size", "checkpoints", "epoch", "needs_resync", "rows", "sequence")

    def __init__(
        self, epoch: int, block_size: int, rows: _GroupHashes, checkpoints: _GroupHashes
    ) -> None:
        self.epoch = epoch
        self.block_size = block_size
        self.rows = rows
        self.checkpoints = checkpoints
        self.sequence = 0
        self.needs_resync = False

    def kind(self, group_id: GroupId) -> _GroupHashes:
        return self.rows if group_id in self.rows.group_ids else self.checkpoints

    def replace(self, snapshot: Mapping[GroupId, Sequence[BlockHash]]) -> None:
        """Forgets everything but ``snapshot``."""
        self.rows = _GroupHashes(self.rows.group_ids)
        self.checkpoints = _GroupHashes(self.checkpoints.group_ids)
        for group_id, hashes in snapshot.items():
            self.kind(group_id).store(group_id, hashes)


class GlobalPrefixIndex:
    """Predicts hits from cache events, group by group.

    A block hash is chained over everything before it, so one hash names one prefix. Token groups
    are prefix-closed in the cache (leaf-first eviction), which makes their depth a bisection; slot
    groups serve only a boundary at which each of them has a checkpoint.

    The first event of a cache epoch has sequence 1. After a gap the mirror serves nothing until it
    is given a snapshot, so a hit is never predicted from events that may have been undone.

    Args:
        groups: `ModelSpec.groups`.
        granule_tokens: tokens per hash.
    """

    def __init__(self, groups: Sequence[KVCacheGroup], *, granule_tokens: int) -> None:
        if granule_tokens < 1:
            raise ConfigError(f"granule_tokens is {granule_tokens}; it must be at least 1")
        self._granule_tokens = granule_tokens
        self._token_ids = tuple(g.group_id for g in groups if g.layer_spec.is_token_kind)
        self._slot_ids = tuple(g.group_id for g in groups if not g.layer_spec.is_token_kind)
        self._mirrors: dict[NodeId, _Mirror] = {}
        self._num_ignored_events = 0
        self._num_gaps = 0

    def __repr__(self) -> str:
        lost = sum(mirror.needs_resync for mirror in self._mirrors.values())
        return (
            f"<GlobalPrefixIndex {len(self._mirrors)} nodes, {lost} of them need a resync, "
            f"{self._num_ignored_events} events ignored>"
        )

    @property
    def num_ignored_events(self) -> int:
        """Events and snapshots of unknown nodes, of other epochs, or seen before."""
        return self._num_ignored_events

    @property
    def num_gaps(self) -> int:
        """Times that events of a node were found missing."""
        return self._num_gaps

    def add(self, node_id: NodeId, epoch: int, *, block_size: int = 1) -> None:
        """Starts an empty mirror; what was known of an earlier life of the node is forgotten.

        Args:
            node_id: the node.
            epoch: its epoch; events of any other one are ignored.
            block_size: granules per block of its pool.
        """
        if block_size < 1:
            raise ConfigError(
                f"block_size of node {node_id!r} is {block_size} granules; it must be at least 1"
            )
        self._mirrors[node_id] = _Mirror(
            epoch,
            block_size,
            rows=_GroupHashes(self._token_ids),
            checkpoints=_GroupHashes(self._slot_ids),
        )

    def drop(self, node_id: NodeId) -> None:
        """Forgets a node. Idempotent."""
        self._mirrors.pop(node_id, None)

    def apply(self, node_id: NodeId, epoch: int, event: CacheEvent) -> bool:
        """Takes in one event; returns whether predictions may have changed.

        Raises:
            RemoteProtocolError: the event names a group that the model does not have.
        """
        self._check_group(node_id, event.group_id)
        mirror = self._current(node_id, epoch)
        if mirror is None or event.sequence <= mirror.sequence:
            self._num_ignored_events += 1
            return False
        has_gap = event.sequence != mirror.sequence + 1
        mirror.sequence = event.sequence
        if has_gap:
            self._num_gaps += 1
            mirror.needs_resync = True
            mirror.replace({})
        elif not mirror.needs_resync:
            held = mirror.kind(event.group_id)
            held.store(event.group_id, event.stored)
            held.remove(event.group_id, event.removed)
        return has_gap or not mirror.needs_resync

    def needs_resync(self, node_id: NodeId) -> bool:
        """Whether events of this node were lost, so that it must send a snapshot."""
        mirror = self._mirrors.get(node_id)
        return mirror is not None and mirror.needs_resync

    def resync(
        self,
        node_id: NodeId,
        epoch: int,
        sequence: int,
        snapshot: Mapping[GroupId, Sequence[BlockHash]],
    ) -> bool:
        """Replaces the mirror by everything findable after event ``sequence``.

        Returns whether it was taken: a snapshot that ends before events already seen is not, and
        neither is one of another epoch.

        Raises:
            RemoteProtocolError: the snapshot names a group that the model does not have.
        """
        for group_id in snapshot:
            self._check_group(node_id, group_id)
        mirror = self._current(node_id, epoch)
        if mirror is None or sequence < mirror.sequence:
            self._num_ignored_events += 1
            return False
        mirror.sequence = sequence
        mirror.needs_resync = False
        mirror.replace(snapshot)
        return True

    def hit(self, node_id: NodeId, granule_hashes: Sequence[BlockHash], num_tokens: int) -> NodeHit:
        """Predicts what the node can serve of a prompt of ``num_tokens``. Reads only.

        The rows held may cover the whole prompt; the usable hit ends before its last token.
        """
        mirror = self._mirrors.get(node_id)
        if mirror is None:
            return _MISS
        block_tokens = mirror.block_size * self._granule_tokens
        num_blocks = min(len(granule_hashes) // mirror.block_size, num_tokens // block_tokens)
        num_held = _last_row(mirror, granule_hashes, num_blocks)
        if not num_held:
            return _MISS
        num_cached = min(num_held, (num_tokens - 1) // block_tokens)
        if self._slot_ids:
            num_cached = _last_checkpoint(mirror, granule_hashes, num_cached)
        return NodeHit(
            num_cached_tokens=num_cached * block_tokens, num_held_tokens=num_held * block_tokens
        )

    def check(self) -> None:
        """Asserts the invariants of every mirror."""
        for node_id, mirror in self._mirrors.items():
            mirror.rows.check()
            mirror.checkpoints.check()
            held = [*mirror.rows.by_group.values(), *mirror.checkpoints.by_group.values()]
            assert not (mirror.needs_resync and any(held)), f"{node_id} serves after a gap"

    def _check_group(self, node_id: NodeId, group_id: GroupId) -> None:
        if group_id not in self._token_ids and group_id not in self._slot_ids:
            raise RemoteProtocolError(
                f"node {node_id!r} reports KV cache group {group_id}, the model has groups "
                f"{sorted(self._token_ids + self._slot_ids)}; run the same model spec on both sides"
            )

    def _current(self, node_id: NodeId, epoch: int) -> _Mirror | None:
        mirror = self._mirrors.get(node_id)
        return mirror if mirror is not None and mirror.epoch == epoch else None


def _last_row(mirror: _Mirror, granule_hashes: Sequence[BlockHash], limit: int) -> int:
    """How many of the first ``limit`` blocks have rows in every token group, by bisection."""
    size, rows = mirror.block_size, mirror.rows.everywhere
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


def _last_checkpoint(mirror: _Mirror, granule_hashes: Sequence[BlockHash], limit: int) -> int:
    """The deepest of the first ``limit`` boundaries with a checkpoint in every slot group, or 0."""
    size, checkpoints = mirror.block_size, mirror.checkpoints.everywhere
    if not limit or not checkpoints:
        return 0
    if granule_hashes[limit * size - 1] in checkpoints:
        return limit
    found = map(checkpoints.__contains__, granule_hashes[limit * size - 1 :: -size])
    return next(compress(range(limit, 0, -1), found), 0)
