"""The two sides that may prefill: how strong they are, and how long their queues."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import attrs

from prfaas.core import ClusterKind, Role
from prfaas.policy.load_curve import PrefillSeconds, PrefillStage
from prfaas.seams import ClusterView, NodeView

_MAX_NODES = 2000
"""About so many nodes are asked for their rates; a mean over more is no better."""


@attrs.frozen(kw_only=True)
class Sides:
    """What a search needs to know of the nodes.

    Attributes:
        remote, local: the two stages.
        remote_queue_s, local_queue_s: seconds of work that wait, per node.
        is_timed: `prefill_s` are seconds. While nobody was measured they are tokens.
    """

    remote: PrefillStage
    local: PrefillStage
    remote_queue_s: float
    local_queue_s: float
    is_timed: bool


class SideMeter:
    """Reads the sides off a view.

    A side without a profile takes the mean of its measured rates, or the other side's time.

    Args:
        remote_prefill_s, local_prefill_s: profiles of one node; None takes the measured rates.
        size: lengths for which the profiles' answers are kept, as every search asks them again.
    """

    def __init__(
        self,
        remote_prefill_s: PrefillSeconds | None,
        local_prefill_s: PrefillSeconds | None,
        *,
        size: int,
    ) -> None:
        self._remote_s, self._local_s = (
            None if profile is None else lru_cache(maxsize=size)(profile)
            for profile in (remote_prefill_s, local_prefill_s)
        )
        self._rates: dict[ClusterKind, float] = {}

    def ask_nodes(self, view: ClusterView) -> None:
        """Takes the mean prefill rates anew, if a profile is missing."""
        if self._remote_s is None or self._local_s is None:
            nodes = view.nodes()
            stride = 1 + len(nodes) // _MAX_NODES
            self._rates = _mean_rates(nodes[::stride])
            if stride > 1 and len(self._rates) < len(ClusterKind):
                self._rates = _mean_rates(nodes)

    def read(self, view: ClusterView, mean_tokens: int) -> Sides | None:
        """The sides now, or None while one has no node.

        Args:
            view: asked for its clusters only.
            mean_tokens: of the lengths; queues are taken to consist of such requests.
        """
        num_remote = num_local = remote_tokens = local_tokens = 0
        for cluster in view.clusters():
            if cluster.kind is ClusterKind.PRFAAS:
                num_remote += cluster.num_prefill
                remote_tokens += cluster.queued_tokens
            else:
                num_local += cluster.num_prefill
                local_tokens += cluster.queued_tokens
        if not num_remote or not num_local:
            return None
        remote_s = self._remote_s or _prefill_s(self._rates.get(ClusterKind.PRFAAS))
        local_s = self._local_s or _prefill_s(self._rates.get(ClusterKind.PD))
        known = remote_s or local_s
        remote_s, local_s = remote_s or known or float, local_s or known or float
        mean = mean_tokens
        return Sides(
            remote=PrefillStage(num_nodes=num_remote, prefill_s=remote_s),
            local=PrefillStage(num_nodes=num_local, prefill_s=local_s),
            remote_queue_s=remote_tokens * remote_s(mean) / mean / num_remote,
            local_queue_s=local_tokens * local_s(mean) / mean / num_local,
            is_timed=known is not None,
        )


def _prefill_s(rate: float | None) -> PrefillSeconds | None:
    return None if rate is None else lambda num_tokens: num_tokens / rate


def _mean_rates(nodes: Sequence[NodeView]) -> dict[ClusterKind, float]:
    """Mean prefill rate of the measured nodes of each kind that has one."""
    rates: dict[ClusterKind, list[float]] = {kind: [] for kind in ClusterKind}
    for node in nodes:
        rate = node.prefill_tokens_per_s
        if rate is not None and 0 < rate < math.inf and node.takes(Role.PREFILL):
            rates[node.kind].append(rate)
    return {kind: sum(some) / len(some) for kind, some in rates.items() if some}
