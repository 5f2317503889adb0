"""The index of one token group: chains of blocks, prefix-closed and path-compressed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import chain

from prfaas.core import BlockHash, BlockId, GroupId
from prfaas.errors import LocalProtocolError


class _Run:
    """Consecutive blocks of one chain; other runs fork from it.

    ``start`` is the depth of the parent block: the block at position i has depth start + i + 1.
    ``forks`` are the runs that hang under the block of a depth; ``marks`` are, by slot group, the
    sorted depths that carry a mark.
    """

    __slots__ = ("forks", "hashes", "ids", "marks", "parent", "start")

    def __init__(self, parent: _Run | None, start: int) -> None:
        self.parent = parent
        self.start = start
        self.hashes: list[BlockHash] = []
        self.ids: list[BlockId] = []
        self.forks: dict[int, dict[_Run, None]] = {}
        self.marks: dict[GroupId, list[int]] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class ChainIndex:
    """Block hash -> block for one token group.

    Hashes are chained over the whole prefix, so one hash has one depth (its number of blocks) and
    one parent. The index is prefix-closed: depths are found by bisection, and only whole subtrees
    can be removed. A run keeps the ids of its blocks in one list, so that a table of thousands of
    blocks is a few slices. Blocks may be *marked* by slot groups that have a checkpoint there, so
    that the last checkpoint on a long path is found without a scan.

    ``idle`` orders the blocks that nobody uses, oldest first, each with the stamp of its last use.
    """

    def __init__(self) -> None:
        self._runs: dict[BlockHash, _Run] = {}
        self.hash_of: dict[BlockId, BlockHash] = {}
        self.idle: dict[BlockId, float] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._runs

    def __repr__(self) -> str:
        return f"<ChainIndex {len(self._runs)} blocks, {len(self.idle)} idle>"

    def depth(self, block_hashes: Sequence[BlockHash], limit: int) -> int:
        """Leading hashes present, of the first ``limit``. O(log limit)."""
        runs = self._runs
        low, high = 0, limit
        if not limit or block_hashes[0] not in runs:
            return 0  # most prompts share nothing
        while low < high:
            middle = (low + high + 1) // 2
            if block_hashes[middle - 1] in runs:
                low = middle
            else:
                high = middle - 1
        return low

    def find(self, block_hash: BlockHash, depth: int) -> BlockId | None:
        """The block of a hash at this depth, if present."""
        run = self._runs.get(block_hash)
        return None if run is None else run.ids[depth - run.start - 1]

    def is_at(self, block_hash: BlockHash, depth: int) -> bool:
        """Whether a hash is present, and at this depth."""
        run = self._runs.get(block_hash)
        if run is None or not run.start < depth <= run.end:
            return False
        return run.hashes[depth - run.start - 1] == block_hash

    def table(self, block_hash: BlockHash, depth: int) -> tuple[BlockId, ...]:
        """Blocks from the root to this hash, which must be present at this depth."""
        run = self._runs[block_hash]
        parts = [run.ids[: depth - run.start]]
        while run.parent is not None:
            depth, run = run.start, run.parent
            parts.append(run.ids[: depth - run.start])
        return tuple(parts[0] if len(parts) == 1 else chain.from_iterable(reversed(parts)))

    def insert(
        self, parent: BlockHash | None, block_hash: BlockHash, depth: int, block_id: BlockId
    ) -> None:
        """Adds one block under its parent (None at depth 1); it is in use until made idle.

        Raises:
            LocalProtocolError: the parent is absent, or the hash or the block is indexed already.
        """
        if block_hash in self._runs or block_id in self.hash_of:
            raise LocalProtocolError(
                f"hash {block_hash.hex()} or block {block_id} is indexed already; "
                "look a hash up before inserting it"
            )
        run = None if parent is None else self._runs.get(parent)
        if (run is None) != (depth == 1):
            raise LocalProtocolError(
                f"hash {block_hash.hex()} at depth {depth} has no indexed parent; "
                "insert parents before children"
            )
        if run is None or run.end != depth - 1:
            fork = _Run(run, depth - 1)
            if run is not None:
                run.forks.setdefault(depth - 1, {})[fork] = None
            run = fork
        run.hashes.append(block_hash)
        run.ids.append(block_id)
        self._runs[block_hash] = run
        self.hash_of[block_id] = block_hash

    def is_leaf(self, block_id: BlockId) -> bool:
        run = self._runs[self.hash_of[block_id]]
        return run.ids[-1] == block_id and run.end not in run.forks

    def remove(self, block_id: BlockId) -> list[tuple[BlockHash, BlockId]]:
        """Removes a block and everything below it; returns them, children before parents.

        Raises:
            LocalProtocolError: one of them is in use; nothing was removed.
        """
        run = self._runs[self.hash_of[block_id]]
        position = len(run.ids) - 1 if run.ids[-1] == block_id else run.ids.index(block_id)
        removed = _subtree(run, position)
        busy = [b for _, b in removed if b not in self.idle]
        if busy:
            raise LocalProtocolError(
                f"blocks {busy} at or below block {block_id} are in use; release them first"
            )
        for depth in range(run.start + position + 1, run.end + 1):
            run.forks.pop(depth, None)
        del run.hashes[position:], run.ids[position:]
        for marks in run.marks.values():
            del marks[bisect_right(marks, run.end) :]
        if not run.ids and run.parent is not None:
            siblings = run.parent.forks[run.start]
            del siblings[run]
            if not siblings:
                del run.parent.forks[run.start]
        for block_hash, removed_id in removed:
            del self._runs[block_hash], self.hash_of[removed_id], self.idle[removed_id]
        return removed

    def mark(self, group_id: GroupId, block_hash: BlockHash, depth: int) -> None:
        """Marks a block for a slot group, if the block is present."""
        run = self._runs.get(block_hash)
        if run is not None:
            insort(run.marks.setdefault(group_id, []), depth)

    def unmark(self, group_id: GroupId, block_hash: BlockHash, depth: int) -> None:
        """Takes a mark away, if the block is present."""
        run = self._runs.get(block_hash)
        if run is not None:
            marks = run.marks[group_id]
            del marks[bisect_left(marks, depth)]

    def deepest_mark(self, group_id: GroupId, block_hash: BlockHash, depth: int) -> int:
        """Depth of a slot group's last mark from the root to this hash, 0 for none.

        O(forks on the path * log marks).
        """
        run: _Run | None = self._runs[block_hash]
        while run is not None:
            marks = run.marks.get(group_id)
            if marks and marks[0] <= depth:
                return marks[bisect_right(marks, depth) - 1]
            depth, run = run.start, run.parent
        return 0

    def marked(self, group_id: GroupId) -> set[BlockHash]:
        """All blocks marked for a slot group; slow."""
        return {
            run.hashes[depth - run.start - 1]
            for run in dict.fromkeys(self._runs.values())
            for depth in run.marks.get(group_id, ())
        }

    def hashes(self) -> tuple[BlockHash, ...]:
        """All hashes, parents before children."""
        return tuple(self._runs)

    def check(self) -> None:
        """Asserts every invariant."""
        order = {block_hash: rank for rank, block_hash in enumerate(self._runs)}
        for run in dict.fromkeys(self._runs.values()):
            ranks = [order[block_hash] for block_hash in run.hashes]
            if run.parent is not None:
                ranks.insert(0, order[run.parent.hashes[run.start - run.parent.start - 1]])
                assert run in run.parent.forks[run.start], "a fork is not filed"
            assert ranks == sorted(ranks), "a block precedes its parent"
            assert (run.start == 0) == (run.parent is None), "a block lacks its parent"
            for block_hash, block_id in zip(run.hashes, run.ids, strict=True):
                assert self._runs[block_hash] is run
                assert self.hash_of[block_id] == block_hash
            for marks in run.marks.values():
                assert marks == sorted(set(marks)), "marks repeat"
                assert all(run.start < depth <= run.end for depth in marks), "a mark has no block"
            assert all(run.start < depth <= run.end for depth in run.forks), "a fork has no block"
            assert all(run.forks.values()), "an empty fork is kept"
        assert len(self.hash_of) == len(self._runs)
        assert self.idle.keys() <= self.hash_of.keys()
        assert list(self.idle.values()) == sorted(self.idle.values()), "recency is out of order"


def _subtree(run: _Run, position: int) -> list[tuple[BlockHash, BlockId]]:
    """Blocks from a position of a run on and all forks below, children before parents."""
    segments = [(run, position)]
    for segment, first in segments:  # grows as forks are found
        for depth in range(segment.start + first + 1, segment.end + 1):
            segments += [(fork, 0) for fork in segment.forks.get(depth, ())]
    removed: list[tuple[BlockHash, BlockId]] = []
    for segment, first in reversed(segments):
        pairs = zip(segment.hashes[first:], segment.ids[first:], strict=True)
        removed += reversed(list(pairs))
    return removed
