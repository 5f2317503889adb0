"""One admitted request: what it still weighs, and where."""

from __future__ import annotations

from prfaas.seams import RoutingDecision


class Flight:
    """A request between `LoadLedger.admit` and `LoadLedger.finished`.

    Attributes:
        decision: the nodes that it occupies.
        is_prefilled: its prefill node is done with it.
        prefix_bytes: of the prefix that goes to its prefill node first, what has not landed.
        cache_bytes: of the cache that it sends from a PRFAAS cluster, what has not landed.
    """

    __slots__ = ("cache_bytes", "decision", "is_prefilled", "prefix_bytes")

    def __init__(self, decision: RoutingDecision) -> None:
        self.decision = decision
        self.is_prefilled = False
        self.prefix_bytes = decision.prefix_bytes
        self.cache_bytes = decision.predicted_bytes if decision.offloaded else 0

    @property
    def link_bytes(self) -> int:
        """What has yet to cross the link for it."""
        return self.prefix_bytes + self.cache_bytes

    def land_prefix(self) -> int:
        """Its prefix is there, or no longer of use. Returns how many bytes that takes off."""
        landed, self.prefix_bytes = self.prefix_bytes, 0
        return landed

    def land(self) -> int:
        """Nothing of it will cross any more. Returns how many bytes that takes off."""
        landed = self.link_bytes
        self.prefix_bytes = self.cache_bytes = 0
        return landed
