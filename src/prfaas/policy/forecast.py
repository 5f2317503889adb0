"""How long a prefill, a queue and a shipment will take: profiles first, measured rates after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, TypeGuard

from prfaas.core import ClusterId, Role
from prfaas.seams import NodeView

_SHARE = 0.05
"""Weight of the newest length in the mean length of a cluster."""


class PrefillTime(Protocol):
    """T_prefill of one node of a cluster."""

    def __call__(self, num_tokens: int, num_cached_tokens: int = 0, /) -> float:
        """Seconds for ``num_tokens`` that follow a cached prefix of ``num_cached_tokens``."""
        ...


class Forecast:
    """Predicts seconds of work on a node.

    A cluster with a profile is predicted by it. Any other by the rate that its node measured; a
    node that measured none takes the rate that was last seen in its cluster, and, with an assumed
    rate only, that of any cluster, and then the assumed one.

    Args:
        profiles: T_prefill of one node of a cluster.
        assumed_tokens_per_s: rate to go by while nothing is measured; None predicts None.
    """

    def __init__(
        self,
        profiles: Mapping[ClusterId, PrefillTime] | None = None,
        *,
        assumed_tokens_per_s: float | None = None,
    ) -> None:
        self._profiles = dict(profiles or {})
        self._assumed_tokens_per_s = assumed_tokens_per_s
        self._rates: dict[ClusterId, float] = {}
        self._any_rate: float | None = None
        self._mean_tokens: dict[ClusterId, float] = {}

    def has_profile(self, cluster_id: ClusterId) -> bool:
        """Whether the cluster is predicted by a profile."""
        return cluster_id in self._profiles

    def is_grounded(self, node: NodeView) -> bool:
        """Whether something measured, or a profile, stands behind what is predicted for it."""
        return node.cluster_id in self._profiles or self._measured_rate(node) is not None

    def observe(self, cluster_id: ClusterId, uncached_tokens: int) -> None:
        """Records the uncached length of a request that was sent to a cluster."""
        mean = self._mean_tokens.get(cluster_id)
        if mean is None:
            self._mean_tokens[cluster_id] = float(uncached_tokens)
        else:
            self._mean_tokens[cluster_id] = mean + _SHARE * (uncached_tokens - mean)

    def prefill_s(
        self, node: NodeView, num_tokens: int, num_cached_tokens: int = 0
    ) -> float | None:
        """Seconds to prefill ``num_tokens`` behind a cached prefix; None if nothing tells."""
        profile = self._profiles.get(node.cluster_id)
        if profile is not None:
            return profile(num_tokens, num_cached_tokens)
        rate = self._rate(node)
        return None if rate is None else num_tokens / rate

    def wait_s(self, node: NodeView) -> float | None:
        """Seconds until the node is done with what it has queued; None if nothing tells.

        Only the sum of the queued tokens is known, and T_prefill is not linear. A PREFILL node has
        `num_active` prompts queued, so they are taken as equally long. A MIXED node counts those
        that it decodes too: there a token costs what it costs in a prompt of the mean length that
        was sent to its cluster, or, before the first, in one prompt of all of them. Either way the
        prompt in progress counts in full, and the cached prefixes of the queue count as none.
        """
        queued = node.queued_tokens
        if queued <= 0:
            return 0.0
        profile = self._profiles.get(node.cluster_id)
        if profile is None:
            rate = self._rate(node)
            return None if rate is None else queued / rate
        if node.role is Role.PREFILL:
            num_prompts = float(max(1, min(node.num_active, queued)))
        else:
            mean = self._mean_tokens.get(node.cluster_id, queued)
            num_prompts = max(1.0, queued / mean)
        return num_prompts * profile(max(1, round(queued / num_prompts)), 0)

    def _rate(self, node: NodeView) -> float | None:
        rate = self._measured_rate(node)
        if rate is None and self._assumed_tokens_per_s is not None:
            return self._any_rate or self._assumed_tokens_per_s
        return rate

    def _measured_rate(self, node: NodeView) -> float | None:
        rate = node.prefill_tokens_per_s
        if is_measured(rate):
            self._rates[node.cluster_id] = self._any_rate = rate
            return rate
        return self._rates.get(node.cluster_id)


def ttft_s(
    *,
    wait_s: float,
    prefill_s: float,
    transfer_s: float = 0.0,
    backlog_s: float = 0.0,
    prefix_s: float = 0.0,
) -> float:
    """TTFT without the decode node's own wait.

    Queue, then the slower of prefill and transfer, which overlap layer by layer (Eq. 3 of arXiv
    2604.15039). A prefix that travels to the prefill node does so while the prompt waits. The link
    has to carry everything admitted before, ``backlog_s``, and then this: no earlier than that.
    """
    return max(max(wait_s, prefix_s) + max(prefill_s, transfer_s), backlog_s + transfer_s)


def is_measured(value: float | None) -> TypeGuard[float]:
    """Whether a rate is one: finite and above 0."""
    return value is not None and 0 < value < math.inf
