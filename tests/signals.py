"""A view of two clusters whose signals a test sets by hand, and the case study's profiles."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from random import Random

from prfaas.core import ClusterId, ClusterKind
from prfaas.seams import ClusterLoad, ClusterView, NodeHit, NodeView, RoutedRequest

_KNOTS = [1024, 8192, 16_000, 32_000, 64_000, 130_000]
_SECONDS = [0.44, 0.72, 1.10, 1.84, 3.48, 7.40]


def h200_prefill_s(num_tokens: float) -> float:
    """T_prefill of the case study's PRFAAS nodes, linear between its knots."""
    k = min(max(bisect_right(_KNOTS, num_tokens), 1), len(_KNOTS) - 1)
    slope = (_SECONDS[k] - _SECONDS[k - 1]) / (_KNOTS[k] - _KNOTS[k - 1])
    return _SECONDS[k - 1] + slope * (num_tokens - _KNOTS[k - 1])


def h20_prefill_s(num_tokens: float) -> float:
    """T_prefill of its PD nodes."""
    return 0.460 + 1.306e-4 * num_tokens + 2.855e-10 * num_tokens**2


def draw_length(rng: Random) -> int:
    """One length of its truncated log-normal distribution."""
    while not 128 <= (length := round(rng.lognormvariate(9.9, 1.0))) <= 131_072:
        pass
    return length


class SignalView(ClusterView):
    """Counts, queues and link signals as plain attributes. Its nodes cannot be asked for."""

    def __init__(self, *, num_remote: int = 4, num_local: int = 3, link_bps: float | None) -> None:
        self.num_nodes = {ClusterKind.PRFAAS: num_remote, ClusterKind.PD: num_local}
        self.queued_tokens = dict.fromkeys(ClusterKind, 0)
        self.rate_bps = link_bps
        self.backlog_bytes = 0
        self.loss: float | None = None

    @property
    def version(self) -> int:
        return 1

    def nodes(self) -> Sequence[NodeView]:
        raise AssertionError("with profiles, nobody has to look at every node")

    def hit(self, node_id: object, request: RoutedRequest) -> NodeHit:
        return NodeHit()

    def link_bps(self) -> float | None:
        return self.rate_bps

    def link_backlog_bytes(self) -> int:
        return self.backlog_bytes

    def link_loss(self) -> float | None:
        return self.loss

    def clusters(self) -> Sequence[ClusterLoad]:
        return [
            ClusterLoad(
                cluster_id=ClusterId(kind.value),
                kind=kind,
                num_prefill=num,
                num_decode=0,
                queued_tokens=self.queued_tokens[kind],
                num_active=0,
            )
            for kind, num in self.num_nodes.items()
        ]
