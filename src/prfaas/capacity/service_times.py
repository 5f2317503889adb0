"""Service time to the first token over the law of lengths: no queue, an idle link."""

from __future__ import annotations

import bisect
import math

import attrs

from prfaas.capacity.fleet import LoadTable
from prfaas.capacity.load import Curve
from prfaas.capacity.throughput import RateForm

_NUM_QUANTILES = 2000
_ROUNDING = 1e-9

LocalRoute = tuple[float, Curve]
"""(share of the requests up to t, prefill) of a PD cluster."""

RemoteRoute = tuple[float, Curve, float]
"""(share of the requests above t, prefill, egress_bps) of a PRFAAS cluster."""


@attrs.frozen(eq=False)
class ServiceTimes:
    """Prefill, then the whole cache over the link and one round trip if remote.

    That reading of the paper's times to first token reproduces all six of its Table 6.
    """

    table: LoadTable
    _lengths: tuple[float, ...] = attrs.field(init=False)
    _values: dict[Curve, tuple[float, ...]] = attrs.field(init=False, factory=dict)

    @_lengths.default
    def _quantiles(self) -> tuple[float, ...]:
        quantile = self.table.lengths.quantile
        return tuple(quantile((i + 0.5) / _NUM_QUANTILES) for i in range(_NUM_QUANTILES))

    def mean_s(
        self, threshold: float, local: list[LocalRoute], remote: list[RemoteRoute], rtt_s: float
    ) -> float:
        """The mean over all lengths, whatever the form of the rates."""
        table, form = self.table, RateForm.EXPECTATION
        parts = [share * table.below(prefill, form)(threshold) for share, prefill in local]
        bits = table.above(table.kv_bits, form)(threshold)
        trip_s = table.lengths.share_above(threshold) * rtt_s
        for share, prefill, egress_bps in remote:
            seconds = table.above(prefill, form)(threshold)
            parts.append(share * (seconds + bits / egress_bps + trip_s))
        return math.fsum(parts)

    def p90_s(
        self, threshold: float, local: list[LocalRoute], remote: list[RemoteRoute], rtt_s: float
    ) -> float:
        """The 90 % quantile, from 2,000 evenly spaced quantiles of the lengths."""
        first = bisect.bisect_right(self._lengths, threshold)
        times: list[tuple[float, float]] = []
        for share, prefill in local:
            times += [(time_s, share) for time_s in self._at_quantiles(prefill)[:first]]
        bits = self._at_quantiles(self.table.kv_bits)[first:]
        for share, prefill, egress_bps in remote:
            seconds = self._at_quantiles(prefill)[first:]
            times += [
                (prefill_s + size / egress_bps + rtt_s, share)
                for prefill_s, size in zip(seconds, bits, strict=True)
            ]
        times.sort()
        left = 0.9 * sum(share for _, share in times)
        for time_s, share in times:
            left -= share
            if left <= _ROUNDING:
                return time_s
        return times[-1][0]

    def _at_quantiles(self, function: Curve) -> tuple[float, ...]:
        if function not in self._values:
            self._values[function] = tuple(map(function, self._lengths))
        return self._values[function]
