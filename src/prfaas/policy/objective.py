"""When a request may leave the place that the threshold chose: for its SLO, or for the price."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from prfaas.core import ClusterId


@attrs.frozen
class Offer:
    """What a place is predicted to give: seconds to the first token, of work, and of waiting."""

    cluster_id: ClusterId
    ttft_s: float
    prefill_s: float
    wait_s: float


class Objective:
    """Compares the place that t chose with the one on the other side.

    A request that misses the SLO here and meets it there is moved. The work so moved is bounded:
    each request earns a share of its own prefill time, a move spends the time that it takes there.
    So under overload, when nearly all requests miss, t still decides over all but that share, and
    the balance of the stages that t stands for holds.

    Where both places meet the SLO, the cheaper one wins (price x seconds of prefill), but only if
    its node has nothing queued: it is given idle time, and as there is none under overload, t
    decides alone.
    """

    def __init__(
        self,
        *,
        ttft_slo_s: float,
        prices: Mapping[ClusterId, float],
        moved_share: float,
        moved_burst_s: float,
    ) -> None:
        self._ttft_slo_s = ttft_slo_s
        self._prices = dict(prices)
        self._moved_share = moved_share
        self._burst_s = moved_burst_s
        self._credit_s = moved_burst_s

    def __repr__(self) -> str:
        return f"<Objective TTFT {self._ttft_slo_s} s, {self._credit_s:.2f} s may be moved>"

    def moves(self, here: Offer, there: Offer) -> bool:
        """Whether a request leaves the place that t chose. Call it once for every request."""
        earned_s = self._moved_share * here.prefill_s
        self._credit_s = min(self._burst_s, self._credit_s + earned_s)
        if there.ttft_s > self._ttft_slo_s:
            return False
        if here.ttft_s > self._ttft_slo_s:
            if there.prefill_s > self._credit_s:
                return False
            self._credit_s -= there.prefill_s
            return True
        price, other_price = (self._prices.get(o.cluster_id) for o in (here, there))
        if price is None or other_price is None or there.wait_s > 0:
            return False
        return other_price * there.prefill_s < price * here.prefill_s
