"""Nodes in the order of their load, for finding one of least load in any set of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from random import Random

from prfaas.policy.node_set import NodeSet, members, random_member

_CHUNK = 64
"""Different loads per chunk, after a split; up to twice as many before it."""
_FEW = 8
"""A set of so few nodes, few also beside all nodes, is looked at node by node."""


class _Chunk:
    """Neighbours in the order: their loads, ascending, and the nodes that have one of them."""

    __slots__ = ("loads", "nodes")

    def __init__(self, loads: list[int], nodes: NodeSet) -> None:
        self.loads = loads
        self.nodes = nodes


class LoadOrder:
    """Positions of nodes, ordered by a whole number.

    Nodes of equal load form one set, and neighbouring loads one chunk with the union of their
    sets. A search for the least load inside a wanted set skips a chunk that has none of its nodes
    in one step, so it costs (number of different loads) / 64 + 128 steps at most, and a change of
    load a bisection.
    """

    __slots__ = ("_chunks", "_equals", "_floors", "_loads", "_nodes")

    def __init__(self) -> None:
        self._nodes: NodeSet = 0
        self._loads: dict[int, int] = {}
        self._equals: dict[int, NodeSet] = {}
        self._chunks: list[_Chunk] = []
        self._floors: list[int] = []
        """Loads from floor i up to floor i + 1 belong to chunk i; smaller ones to chunk 0 too."""

    def __len__(self) -> int:
        return len(self._loads)

    def __repr__(self) -> str:
        return f"<LoadOrder {len(self._loads)} nodes, {len(self._equals)} different loads>"

    @property
    def nodes(self) -> NodeSet:
        """All nodes that are in the order."""
        return self._nodes

    def load(self, position: int) -> int | None:
        """Load of a node; None if it is not in the order."""
        return self._loads.get(position)

    def put(self, position: int, load: int) -> None:
        """Takes in a node, or changes its load."""
        old = self._loads.get(position)
        if old == load:
            return
        bit = 1 << position
        self._loads[position] = load
        if old is None:
            self._nodes |= bit
            self._enter(load, bit)
        elif len(self._chunks) == 1 and len(self._chunks[0].loads) < 2 * _CHUNK - 1:
            self._move(self._chunks[0].loads, old, load, bit)
        else:
            self._leave(old, bit)
            self._enter(load, bit)

    def remove(self, position: int) -> None:
        """Takes a node out. Idempotent."""
        load = self._loads.pop(position, None)
        if load is not None:
            bit = 1 << position
            self._nodes ^= bit
            self._leave(load, bit)

    def least(self, rng: Random, within: NodeSet | None = None) -> int | None:
        """Position of a node of least load, at random among equals; None if there is no node.

        Args:
            rng: draws among equals.
            within: only nodes of this set are looked at; positions that are not in the order do
                not matter. None for all nodes.
        """
        wanted = self._nodes if within is None else within & self._nodes
        if wanted == self._nodes and wanted:
            return random_member(self._equals[self._chunks[0].loads[0]], rng)
        size = wanted.bit_count()
        if size <= 1:
            return wanted.bit_length() - 1 if size else None
        if size <= _FEW and size * size <= len(self._loads):
            return self._least_of_few(wanted, rng)
        for chunk in self._chunks:
            found = chunk.nodes & wanted
            if found:
                break
        for load in chunk.loads:
            equals = self._equals[load] & found
            if equals:
                break
        return random_member(equals, rng)

    def check(self) -> None:
        """Asserts the invariants."""
        union = 0
        for load, nodes in self._equals.items():
            assert nodes, f"nobody has load {load}"
            assert not union & nodes
            assert all(self._loads[position] == load for position in members(nodes))
            union |= nodes
        assert union == self._nodes
        assert self._nodes.bit_count() == len(self._loads)
        loads = [load for chunk in self._chunks for load in chunk.loads]
        assert loads == sorted(self._equals)
        assert len(self._floors) == len(self._chunks)
        for index, chunk in enumerate(self._chunks):
            assert 0 < len(chunk.loads) < 2 * _CHUNK
            floors = self._floors
            assert all(bisect_right(floors, load, 1) - 1 == index for load in chunk.loads)
            union = 0
            for load in chunk.loads:
                union |= self._equals[load]
            assert union == chunk.nodes

    def _least_of_few(self, wanted: NodeSet, rng: Random) -> int:
        least, equals = None, 0
        while wanted:
            bit = wanted & -wanted
            load = self._loads[bit.bit_length() - 1]
            if least is None or load < least:
                least, equals = load, bit
            elif load == least:
                equals |= bit
            wanted ^= bit
        return random_member(equals, rng)

    def _move(self, loads: list[int], old: int, load: int, bit: NodeSet) -> None:
        """`_leave` and `_enter` where there is one chunk, and stays one: that of few nodes."""
        equals = self._equals
        rest = equals[old] ^ bit
        if rest:
            equals[old] = rest
        else:
            del equals[old], loads[bisect_left(loads, old)]
        if load in equals:
            equals[load] |= bit
        else:
            equals[load] = bit
            insort(loads, load)

    def _enter(self, load: int, bit: NodeSet) -> None:
        if not self._chunks:
            self._chunks.append(_Chunk([], 0))
            self._floors.append(load)
        index = bisect_right(self._floors, load, 1) - 1
        chunk = self._chunks[index]
        chunk.nodes |= bit
        equals = self._equals.get(load)
        if equals is not None:
            self._equals[load] = equals | bit
            return
        self._equals[load] = bit
        insort(chunk.loads, load)
        if len(chunk.loads) == 2 * _CHUNK:
            upper = chunk.loads[_CHUNK:]
            del chunk.loads[_CHUNK:]
            nodes = 0
            for each in upper:
                nodes |= self._equals[each]
            chunk.nodes ^= nodes
            self._chunks.insert(index + 1, _Chunk(upper, nodes))
            self._floors.insert(index + 1, upper[0])

    def _leave(self, load: int, bit: NodeSet) -> None:
        index = bisect_right(self._floors, load, 1) - 1
        chunk = self._chunks[index]
        chunk.nodes ^= bit
        rest = self._equals[load] ^ bit
        if rest:
            self._equals[load] = rest
            return
        del self._equals[load]
        del chunk.loads[bisect_left(chunk.loads, load)]
        if not chunk.loads:
            del self._chunks[index], self._floors[index]
        elif index and len(chunk.loads) + len(self._chunks[index - 1].loads) <= _CHUNK:
            # Small neighbours become one, or chunks would get many and empty.
            self._chunks[index - 1].loads += chunk.loads
            self._chunks[index - 1].nodes |= chunk.nodes
            del self._chunks[index], self._floors[index]
