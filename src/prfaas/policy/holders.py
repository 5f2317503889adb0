"""Who holds which block: all nodes whose blocks have one size, asked about a prompt at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

from prfaas.core import BlockHash
from prfaas.policy.node_set import NodeSet


class HashHolders:
    """For every hash the set of nodes that hold it; no hash without a node."""

    __slots__ = ("nodes",)

    def __init__(self) -> None:
        self.nodes: dict[BlockHash, NodeSet] = {}

    def add(self, bit: NodeSet, hashes: Iterable[BlockHash]) -> None:
        """The node of ``bit`` holds these hashes too."""
        nodes = self.nodes
        # Along a prefix most hashes have the same holders: then they share one number.
        before, after = 0, bit
        for block_hash in hashes:
            holders = nodes.get(block_hash, 0)
            if holders is not before:
                before, after = holders, holders | bit if holders else bit
            nodes[block_hash] = after

    def discard(self, bit: NodeSet, hashes: Iterable[BlockHash]) -> None:
        """The node of ``bit``, which held these hashes, no longer does."""
        nodes = self.nodes
        before = after = 0
        for block_hash in hashes:
            holders = nodes[block_hash]
            if holders is not before:
                before, after = holders, holders & ~bit
            if after:
                nodes[block_hash] = after
            else:
                del nodes[block_hash]


class BlockHolders:
    """Rows and checkpoints of all nodes whose blocks have the same size.

    Attributes:
        block_size: granules per block.
        num_nodes: nodes of this size, with or without blocks.
        rows: nodes that have a block's rows in every token group.
        checkpoints: nodes that have state at a block's end in every slot group.
    """

    __slots__ = ("block_size", "checkpoints", "num_nodes", "rows")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_nodes = 0
        self.rows = HashHolders()
        self.checkpoints = HashHolders()

    def row_depths(
        self, granule_hashes: Sequence[BlockHash], num_blocks: int
    ) -> list[tuple[int, NodeSet]]:
        """Nodes by how many of the first ``num_blocks`` they have rows of; none for those with 0.

        Deepest first. The nodes that have a block all have the blocks before it, so one bisection
        serves all of them: it forks where some of its nodes go on and others do not.
        """
        size, rows = self.block_size, self.rows.nodes
        group = rows.get(granule_hashes[size - 1]) if num_blocks else None
        if group is None:
            return []
        depths, forks = [], [(1, num_blocks, group)]
        while forks:
            low, high, group = forks.pop()
            while low < high:
                middle = (low + high + 1) >> 1
                deeper = group & rows.get(granule_hashes[middle * size - 1], 0)
                if not deeper:
                    high = middle - 1
                    continue
                if deeper != group:
                    forks.append((low, middle - 1, group ^ deeper))
                    group = deeper
                low = middle
            depths.append((low, group))
        return depths

    def hits(
        self, granule_hashes: Sequence[BlockHash], depths: Sequence[tuple[int, NodeSet]], limit: int
    ) -> list[tuple[int, int, NodeSet]]:
        """Nodes by (deepest checkpoint among the first ``limit`` boundaries, depth of their rows).

        One walk from the deepest boundary down serves all nodes; it pauses whenever every node it
        has come past has found its checkpoint.

        Args:
            granule_hashes: of the prompt.
            depths: what `row_depths` returned.
            limit: boundaries that may serve; more rows than these do not help.
        """
        found: list[tuple[int, int, NodeSet]] = []
        waiting: list[tuple[int, NodeSet]] = []
        for index, (depth, group) in enumerate(depths):
            top = min(depth, limit)
            if not waiting and top:
                # Most caches have state where their rows end.
                holders = self.checkpoints.nodes.get(granule_hashes[top * self.block_size - 1], 0)
                if group & holders == group:
                    found.append((top, depth, group))
                    continue
            waiting = self._serve(granule_hashes, top, [*waiting, (depth, group)], found)
            bottom = depths[index + 1][0] if index + 1 < len(depths) else 0
            if waiting and bottom < top - 1 and self.checkpoints.nodes:
                for boundary in self._boundaries(granule_hashes, top - 1, bottom):
                    waiting = self._serve(granule_hashes, boundary, waiting, found)
                    if not waiting:
                        break
        return found + [(0, depth, group) for depth, group in waiting]

    def misfits(self, granule_hashes: Sequence[BlockHash], other_size: int) -> NodeSet:
        """Nodes that hold a block of another size although they lack what must precede it."""
        if other_size > len(granule_hashes):
            return 0
        holders = self.rows.nodes.get(granule_hashes[other_size - 1], 0)
        if holders and not other_size % self.block_size:
            holders &= ~self.rows.nodes.get(granule_hashes[self.block_size - 1], 0)
        return holders

    def _serve(
        self,
        granule_hashes: Sequence[BlockHash],
        boundary: int,
        waiting: list[tuple[int, NodeSet]],
        found: list[tuple[int, int, NodeSet]],
    ) -> list[tuple[int, NodeSet]]:
        """Moves nodes with a checkpoint at ``boundary`` to ``found``; returns the others."""
        if not boundary:
            return waiting
        holders = self.checkpoints.nodes.get(granule_hashes[boundary * self.block_size - 1], 0)
        if not holders:
            return waiting
        still = []
        for depth, group in waiting:
            served = group & holders
            if served:
                found.append((boundary, depth, served))
                group ^= served
            if group:
                still.append((depth, group))
        return still

    def _boundaries(
        self, granule_hashes: Sequence[BlockHash], top: int, bottom: int
    ) -> Iterable[int]:
        """Boundaries from ``top`` down to above ``bottom`` at which some node has a checkpoint."""
        size = self.block_size
        stop = bottom * size - 1
        hashes = granule_hashes[top * size - 1 : stop if stop >= 0 else None : -size]
        has_any = map(self.checkpoints.nodes.__contains__, hashes)
        return compress(range(top, bottom, -1), has_any)

    def check(self, bits: Iterable[tuple[NodeSet, set[BlockHash], set[BlockHash]]]) -> None:
        """Asserts that the sets say what (bit, rows, checkpoints) of every node say."""
        rows: dict[BlockHash, NodeSet] = {}
        checkpoints: dict[BlockHash, NodeSet] = {}
        for bit, row_hashes, checkpoint_hashes in bits:
            for nodes, hashes in ((rows, row_hashes), (checkpoints, checkpoint_hashes)):
                for block_hash in hashes:
                    nodes[block_hash] = nodes.get(block_hash, 0) | bit
        assert rows == self.rows.nodes
        assert checkpoints == self.checkpoints.nodes
