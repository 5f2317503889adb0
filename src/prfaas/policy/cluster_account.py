"""The live account of one cluster: sums over its nodes, and their order by load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from prfaas.core import ClusterId, ClusterKind, Role
from prfaas.policy.global_index import HitLevel
from prfaas.policy.load_order import LoadOrder
from prfaas.policy.node_account import NodeAccount
from prfaas.policy.node_set import NodeSet
from prfaas.seams import ClusterLoad, NodeHit

_MISS = NodeHit()
_FULL = 1 << 60
"""Added to the load of a full node: more than any load."""
_NOTHING = (0, 0)


class ClusterAccount:
    """Kept by `refresh` after every change of a node, never summed up anew.

    A node that takes work of a stage stands in that stage's order: by queued tokens for prefill,
    by requests for decode.
    """

    __slots__ = (
        "_cluster_id",
        "_counted",
        "_decode",
        "_kind",
        "_load",
        "_num_active",
        "_prefill",
        "_queued_tokens",
    )

    def __init__(self, cluster_id: ClusterId, kind: ClusterKind) -> None:
        self._cluster_id = cluster_id
        self._kind = kind
        self._counted: dict[int, tuple[int, int]] = {}
        self._queued_tokens = 0
        self._num_active = 0
        self._prefill = LoadOrder()
        self._decode = LoadOrder()
        self._load: ClusterLoad | None = None

    def __len__(self) -> int:
        """Nodes."""
        return len(self._counted)

    def refresh(self, node: NodeAccount) -> None:
        """Takes in a node, or what has changed of it."""
        if not node.takes_prefill:
            self._prefill.remove(node.position)
        if not node.takes_decode:
            self._decode.remove(node.position)
        self.count(node)

    def count(self, node: NodeAccount) -> None:
        """As `refresh`, for a node that takes what it took before."""
        position, queued, active = node.position, node.queued_tokens, len(node.active)
        queued_before, active_before = self._counted.get(position, _NOTHING)
        self._counted[position] = queued, active
        self._queued_tokens += queued - queued_before
        self._num_active += active - active_before
        max_active = node.up.max_active
        penalty = 0 if max_active is None or active < max_active else _FULL
        if node.takes_prefill:
            self._prefill.put(position, queued + penalty)
        if node.takes_decode:
            self._decode.put(position, active + penalty)
        self._load = None

    def forget(self, node: NodeAccount) -> None:
        """Takes out a node that has nothing to do any more."""
        del self._counted[node.position]
        self._prefill.remove(node.position)
        self._decode.remove(node.position)
        self._load = None

    def load(self) -> ClusterLoad:
        """The sums; the same object until something changes."""
        if self._load is None:
            self._load = ClusterLoad(
                cluster_id=self._cluster_id,
                kind=self._kind,
                num_prefill=len(self._prefill),
                num_decode=len(self._decode),
                queued_tokens=self._queued_tokens,
                num_active=self._num_active,
            )
        return self._load

    def least_loaded(
        self, stage: Role, levels: Sequence[HitLevel], excluded: NodeSet, rng: Random
    ) -> list[tuple[int, NodeHit]]:
        """For every hit among the nodes that take the stage, one of least load, by position.

        Nodes outside all levels have no hit.
        """
        order = self._prefill if stage is Role.PREFILL else self._decode
        rest = order.nodes & ~excluded if excluded else order.nodes
        found = []
        for level in levels:
            nodes = level.nodes & rest
            position = order.least(rng, nodes) if nodes else None
            if position is not None:
                rest ^= nodes
                found.append((position, level.hit))
        position = order.least(rng, rest) if rest else None
        if position is not None:
            found.append((position, _MISS))
        return found

    def check(self, nodes: Sequence[NodeAccount]) -> None:
        """Asserts that everything is the sum over ``nodes``."""
        assert self._counted == {n.position: (n.queued_tokens, len(n.active)) for n in nodes}
        assert self._queued_tokens == sum(n.queued_tokens for n in nodes)
        assert self._num_active == sum(len(n.active) for n in nodes)
        _check_order(
            self._prefill,
            nodes,
            lambda n: _order_key(n, n.queued_tokens) if n.takes_prefill else None,
        )
        _check_order(
            self._decode, nodes, lambda n: _order_key(n, len(n.active)) if n.takes_decode else None
        )
        assert self._load is None or self._load == ClusterLoad(
            cluster_id=self._cluster_id,
            kind=self._kind,
            num_prefill=sum(n.takes_prefill for n in nodes),
            num_decode=sum(n.takes_decode for n in nodes),
            queued_tokens=self._queued_tokens,
            num_active=self._num_active,
        )


def _order_key(node: NodeAccount, load: int) -> int:
    """Nodes that are full come after all others, whatever their load."""
    max_active = node.up.max_active
    is_full = max_active is not None and len(node.active) >= max_active
    return load + _FULL if is_full else load


def _check_order(
    order: LoadOrder, nodes: Sequence[NodeAccount], load: Callable[[NodeAccount], int | None]
) -> None:
    order.check()
    for node in nodes:
        assert order.load(node.position) == load(node), f"{node.up.node_id} is out of order"
    assert len(order) == sum(load(node) is not None for node in nodes)
