"""Which node can serve which prefix: a mirror of every node's cache, fed by its cache events.

Each node's mirror answers for itself; the holders of each block, gathered from all mirrors, answer
for all nodes at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from prfaas.core import BlockHash, GroupId, NodeId
from prfaas.errors import ConfigError, RemoteProtocolError
from prfaas.policy.holders import BlockHolders, HashHolders
from prfaas.policy.mirror import GroupHashes, Mirror
from prfaas.policy.node_set import NodeSet
from prfaas.seams import CacheEvent, NodeHit
from prfaas.spec import KVCacheGroup

_MISS = NodeHit()


@attrs.frozen(kw_only=True)
class HitLevel:
    """All nodes that a prompt hits in the same way; ``nodes`` holds their positions."""

    hit: NodeHit
    nodes: NodeSet


class GlobalPrefixIndex:
    """Predicts hits from cache events, group by group.

    A block hash is chained over everything before it, so one hash names one prefix. Token groups
    are prefix-closed in the cache (leaf-first eviction), which makes their depth a bisection; slot
    groups serve only a boundary at which each of them has a checkpoint.

    Nodes have positions, which are reused when a node is gone; a `NodeSet` is a set of them.

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
        self._mirrors: dict[NodeId, Mirror] = {}
        self._free_positions: list[int] = []
        self._holders: dict[int, BlockHolders] = {}
        self._misfits: NodeSet = 0
        self._version = 0
        self._num_ignored_events = 0
        self._num_gaps = 0

    def __repr__(self) -> str:
        lost = sum(mirror.needs_resync for mirror in self._mirrors.values())
        return (
            f"<GlobalPrefixIndex {len(self._mirrors)} nodes, {lost} of them need a resync, "
            f"{self._misfits.bit_count()} of another block size than said, "
            f"{self._num_ignored_events} events ignored>"
        )

    @property
    def version(self) -> int:
        """Grows whenever an answer may have changed."""
        return self._version

    @property
    def num_ignored_events(self) -> int:
        """Events and snapshots of unknown nodes, of other epochs, or seen before."""
        return self._num_ignored_events

    @property
    def num_gaps(self) -> int:
        """Times that events of a node were found missing."""
        return self._num_gaps

    @property
    def misfits(self) -> frozenset[NodeId]:
        """Nodes that were found to hold blocks of another size than `add` was told.

        Found by `levels`, where nodes of several sizes are known: such a node has a block that only
        a node of another size can have. Its other hits stand, since a hash names one prefix.
        """
        return frozenset(n for n, mirror in self._mirrors.items() if mirror.bit & self._misfits)

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
        self.drop(node_id)
        self._version += 1
        position = self._free_positions.pop() if self._free_positions else len(self._mirrors)
        self._mirrors[node_id] = Mirror(
            epoch, block_size, position, token_ids=self._token_ids, slot_ids=self._slot_ids
        )
        self._holders.setdefault(block_size, BlockHolders(block_size)).num_nodes += 1

    def drop(self, node_id: NodeId) -> None:
        """Forgets a node. Idempotent."""
        mirror = self._mirrors.pop(node_id, None)
        if mirror is None:
            return
        self._version += 1
        self._clear(mirror)
        self._free_positions.append(mirror.position)
        holders = self._holders[mirror.block_size]
        holders.num_nodes -= 1
        if not holders.num_nodes:
            del self._holders[mirror.block_size]

    def position(self, node_id: NodeId) -> int:
        """Where a node stands in every `NodeSet`, from `add` to `drop`.

        Raises:
            KeyError: the index does not know the node.
        """
        return self._mirrors[node_id].position

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
        self._version += 1
        has_gap = event.sequence != mirror.sequence + 1
        mirror.sequence = event.sequence
        if has_gap:
            self._num_gaps += 1
            mirror.needs_resync = True
            self._clear(mirror)
        elif not mirror.needs_resync:
            hashes, holders = self._kind(mirror, event.group_id)
            holders.add(mirror.bit, hashes.store(event.group_id, event.stored))
            holders.discard(mirror.bit, hashes.remove(event.group_id, event.removed))
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
        self._version += 1
        mirror.sequence = sequence
        mirror.needs_resync = False
        self._clear(mirror)
        for group_id, stored in snapshot.items():
            hashes, holders = self._kind(mirror, group_id)
            holders.add(mirror.bit, hashes.store(group_id, stored))
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
        num_held = mirror.last_row(granule_hashes, num_blocks)
        if not num_held:
            return _MISS
        num_cached = min(num_held, (num_tokens - 1) // block_tokens)
        if self._slot_ids:
            num_cached = mirror.last_checkpoint(granule_hashes, num_cached)
        return NodeHit(
            num_cached_tokens=num_cached * block_tokens, num_held_tokens=num_held * block_tokens
        )

    def levels(self, granule_hashes: Sequence[BlockHash], num_tokens: int) -> Sequence[HitLevel]:
        """`hit` of all nodes at once: who can serve what of a prompt of ``num_tokens``.

        Every node that holds anything of the prompt is in exactly one level, and no two levels have
        the same hit. The work grows with the number of different hits, not with that of nodes.
        """
        if not granule_hashes:
            return []
        levels: dict[tuple[int, int], NodeSet] = {}
        for size, holders in self._holders.items():
            block_tokens = size * self._granule_tokens
            num_blocks = min(len(granule_hashes) // size, num_tokens // block_tokens)
            limit = (num_tokens - 1) // block_tokens
            depths = holders.row_depths(granule_hashes, num_blocks)
            if self._slot_ids:
                hits = holders.hits(granule_hashes, depths, limit)
            else:
                hits = [(min(depth, limit), depth, nodes) for depth, nodes in depths]
            for num_cached, num_held, nodes in hits:
                key = num_cached * block_tokens, num_held * block_tokens
                levels[key] = levels.get(key, 0) | nodes
        if len(self._holders) > 1:
            self._note_misfits(granule_hashes)
        return [
            HitLevel(hit=NodeHit(num_cached_tokens=cached, num_held_tokens=held), nodes=nodes)
            for (cached, held), nodes in levels.items()
        ]

    def check(self) -> None:
        """Asserts the invariants of every mirror, and that the holders agree with all of them."""
        for node_id, mirror in self._mirrors.items():
            mirror.rows.check()
            mirror.checkpoints.check()
            held = [*mirror.rows.by_group.values(), *mirror.checkpoints.by_group.values()]
            assert not (mirror.needs_resync and any(held)), f"{node_id} serves after a gap"
        positions = [mirror.position for mirror in self._mirrors.values()]
        assert sorted(positions + self._free_positions) == list(
            range(len(positions) + len(self._free_positions))
        ), "two nodes at one position, or a position lost"
        assert set(self._holders) == {mirror.block_size for mirror in self._mirrors.values()}
        for size, holders in self._holders.items():
            mirrors = [m for m in self._mirrors.values() if m.block_size == size]
            assert holders.num_nodes == len(mirrors)
            holders.check((m.bit, m.rows.everywhere, m.checkpoints.everywhere) for m in mirrors)

    def _kind(self, mirror: Mirror, group_id: GroupId) -> tuple[GroupHashes, HashHolders]:
        """Where this group's hashes are kept: for the node, and for all nodes of its size."""
        holders = self._holders[mirror.block_size]
        if group_id in self._token_ids:
            return mirror.rows, holders.rows
        return mirror.checkpoints, holders.checkpoints

    def _clear(self, mirror: Mirror) -> None:
        """Forgets the blocks of a node, which holds none of them any more."""
        holders = self._holders[mirror.block_size]
        holders.rows.discard(mirror.bit, mirror.rows.everywhere)
        holders.checkpoints.discard(mirror.bit, mirror.checkpoints.everywhere)
        mirror.clear()
        self._misfits &= ~mirror.bit

    def _note_misfits(self, granule_hashes: Sequence[BlockHash]) -> None:
        for size, holders in self._holders.items():
            for other_size in self._holders:
                if other_size != size:
                    self._misfits |= holders.misfits(granule_hashes, other_size)

    def _check_group(self, node_id: NodeId, group_id: GroupId) -> None:
        if group_id not in self._token_ids and group_id not in self._slot_ids:
            raise RemoteProtocolError(
                f"node {node_id!r} reports KV cache group {group_id}, the model has groups "
                f"{sorted(self._token_ids + self._slot_ids)}; run the same model spec on both sides"
            )

    def _current(self, node_id: NodeId, epoch: int) -> Mirror | None:
        mirror = self._mirrors.get(node_id)
        return mirror if mirror is not None and mirror.epoch == epoch else None
