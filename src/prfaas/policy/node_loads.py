"""The measured load of each node, without the samples of a cold start."""

from __future__ import annotations

import math
from collections.abc import Collection

import attrs

from prfaas.core import NodeId, Role
from prfaas.seams import NodeLoad

_NEW_SHARE = 0.3
"""Weight of the newest sample in the smoothed busy shares."""


@attrs.define(kw_only=True)
class _Measured:
    num_ignored: int
    since_s: float
    has_samples: bool = False
    prefill_busy: float = 0.0
    decode_busy: float = 0.0
    queued_tokens: int = 0
    num_waiting: int = 0


class NodeLoads:
    """Busy shares, smoothed, and queues, as last reported.

    Args:
        num_ignored: samples of a node that do not count after it came up or converted.
    """

    def __init__(self, num_ignored: int) -> None:
        self._num_ignored = num_ignored
        self._nodes: dict[NodeId, _Measured] = {}

    def __repr__(self) -> str:
        return f"<NodeLoads of {len(self._nodes)} nodes>"

    def begin(self, node_id: NodeId, now: float) -> None:
        """A node came up, or came to serve another role: it is cold."""
        self._nodes[node_id] = _Measured(num_ignored=self._num_ignored, since_s=now)

    def forget(self, node_id: NodeId) -> None:
        self._nodes.pop(node_id, None)

    def observe(self, event: NodeLoad, now: float) -> float | None:
        """Takes in a sample; returns the seconds it spent on prompts, or None if it is ignored."""
        node = self._nodes.get(event.node_id)
        if node is None:
            return None
        elapsed_s, node.since_s = max(0.0, now - node.since_s), now
        if not (math.isfinite(event.prefill_busy) and math.isfinite(event.decode_busy)):
            return None
        if node.num_ignored > 0:
            node.num_ignored -= 1
            return None
        prefill_busy = min(1.0, max(0.0, event.prefill_busy))
        decode_busy = min(1.0, max(0.0, event.decode_busy))
        share = _NEW_SHARE if node.has_samples else 1.0
        node.prefill_busy += share * (prefill_busy - node.prefill_busy)
        node.decode_busy += share * (decode_busy - node.decode_busy)
        node.queued_tokens, node.num_waiting = event.queued_tokens, event.num_waiting
        node.has_samples = True
        return prefill_busy * elapsed_s

    def prefill_busy(self, node_ids: Collection[NodeId]) -> float | None:
        """Mean over the nodes that were measured; None if none was."""
        shares = [node.prefill_busy for node in self._measured(node_ids)]
        return sum(shares) / len(shares) if shares else None

    def decode_busy(self, node_ids: Collection[NodeId]) -> float | None:
        """Mean over the nodes that were measured; None if none was."""
        shares = [node.decode_busy for node in self._measured(node_ids)]
        return sum(shares) / len(shares) if shares else None

    def queued_tokens(self, node_ids: Collection[NodeId]) -> int:
        return sum(node.queued_tokens for node in self._measured(node_ids))

    def num_waiting(self, node_ids: Collection[NodeId]) -> int:
        return sum(node.num_waiting for node in self._measured(node_ids))

    def least_loaded(self, node_ids: Collection[NodeId], role: Role) -> list[NodeId]:
        """Nodes of one role, the one with least to finish first; by id among equals."""
        cold = _Measured(num_ignored=0, since_s=0.0)

        def load(node_id: NodeId) -> tuple[float, float, NodeId]:
            node = self._nodes.get(node_id, cold)
            if role is Role.PREFILL:
                return node.queued_tokens, node.prefill_busy, node_id
            return node.num_waiting, node.decode_busy, node_id

        return sorted(node_ids, key=load)

    def _measured(self, node_ids: Collection[NodeId]) -> list[_Measured]:
        nodes = (self._nodes.get(node_id) for node_id in node_ids)
        return [node for node in nodes if node is not None and node.has_samples]
