"""What a `ThresholdRouter` may do beyond comparing a length with t."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from prfaas.core import ClusterId
from prfaas.errors import ConfigError
from prfaas.policy.regime import RegimeSettings


@attrs.frozen(kw_only=True)
class RouterSettings:
    """What a `ThresholdRouter` may do beyond comparing a length with t.

    Attributes:
        strict: a request whose own side cannot take it is refused with a CapacityError instead of
            falling back to the other one. For those who must prove who prefilled.
        prefix_transfers: whoever acts on the decisions can move a cached prefix between clusters.
        setup_s: fixed time of such a move.
        regime: when the link has room for them.
        ttft_slo_s: TTFT that a request should meet; see `Objective`. None leaves all to t.
        prices: price of one second of one node of a cluster, in any unit, for requests that meet
            the SLO on both sides. Clusters that are not named are not compared.
        moved_share: work that may be moved for the SLO, as a share of all prefill work routed.
        moved_burst_s: such work, seconds of prefill, that may be moved at once.
    """

    strict: bool = False
    prefix_transfers: bool = False
    setup_s: float = 0.05
    regime: RegimeSettings = attrs.field(factory=RegimeSettings)
    ttft_slo_s: float | None = None
    prices: Mapping[ClusterId, float] = attrs.field(factory=dict)
    moved_share: float = 0.1
    moved_burst_s: float = 10.0

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.setup_s < math.inf:
            raise ConfigError(f"setup_s is {self.setup_s}; it must be finite and at least 0")
        if self.ttft_slo_s is not None and not 0 < self.ttft_slo_s < math.inf:
            raise ConfigError(f"ttft_slo_s is {self.ttft_slo_s}; it must be finite and above 0")
        if self.prices and self.ttft_slo_s is None:
            raise ConfigError(
                "prices are given without ttft_slo_s; they only decide between places that meet "
                "an SLO, so give one"
            )
        for cluster_id, price in self.prices.items():
            if not 0 <= price < math.inf:
                raise ConfigError(
                    f"the price of cluster {cluster_id!r} is {price}; it must be finite and at "
                    "least 0"
                )
        if not 0 <= self.moved_share <= 1 or not 0 <= self.moved_burst_s < math.inf:
            raise ConfigError(
                f"moved_share is {self.moved_share} and moved_burst_s {self.moved_burst_s}; they "
                "need 0 <= moved_share <= 1 and a finite burst of at least 0"
            )
