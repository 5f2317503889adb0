"""Sets of nodes as whole numbers: bit p stands for the node at position p.

Union, intersection and difference are one operation each, whatever the number of nodes in them, and
sets that are equal compare equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TypeAlias

NodeSet: TypeAlias = int
"""Bit p is 1 if the node at position p is in the set; 0 is the empty set."""
_FEW = 8
"""Up to so many members are counted one by one."""


def members(nodes: NodeSet) -> Iterator[int]:
    """Positions in the set, ascending."""
    while nodes:
        lowest = nodes & -nodes
        yield lowest.bit_length() - 1
        nodes ^= lowest


def random_member(nodes: NodeSet, rng: Random) -> int:
    """One position of a set that is not empty; each is as likely as any other."""
    size = nodes.bit_count()
    if size == 1:
        return nodes.bit_length() - 1
    rank = int(rng.random() * size)
    if size <= _FEW:
        for _ in range(rank):
            nodes &= nodes - 1
        return (nodes & -nodes).bit_length() - 1
    # The member of that rank, by halving the set: counting bits is far cheaper than visiting them.
    position, width = 0, nodes.bit_length()
    while width > 1:
        half = width >> 1
        lower = nodes & ((1 << half) - 1)
        in_lower = lower.bit_count()
        if rank < in_lower:
            nodes, width = lower, half
        else:
            nodes >>= half
            rank -= in_lower
            position += half
            width -= half
    return position
