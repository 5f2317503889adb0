"""The rates of several clusters together, and the best way to run them."""

from __future__ import annotations

import math
from functools import cache

import attrs

from prfaas.capacity.lengths import LengthDistribution
from prfaas.capacity.load import Curve, LoadCurves, rate_of
from prfaas.capacity.problem import PlanningCluster, PlanningProblem
from prfaas.capacity.search import search_threshold, split_local, whole_if_whole
from prfaas.capacity.throughput import RateForm
from prfaas.spec import ModelSpec

Split = tuple[float, ...]
"""N_p of every PD cluster, in the problem's order."""

_EQUAL = 1 - 1e-9


@attrs.frozen(eq=False)
class LoadTable:
    """Load curves, each computed once however many fleets ask for it."""

    model: ModelSpec
    lengths: LengthDistribution
    _curves: dict[tuple[object, ...], Curve] = attrs.field(init=False, factory=dict)
    _loads: dict[RateForm, LoadCurves] = attrs.field(init=False, factory=dict)

    def kv_bits(self, num_tokens: float) -> float:
        """Bits of the cache of ``num_tokens``."""
        return 8 * self.model.kv_bytes(round(num_tokens))

    def above(self, function: Curve, form: RateForm, length_factor: float = 1.0) -> Curve:
        """Mean load of the requests above t, each length times ``length_factor``."""
        return self._curve("above", function, form, length_factor)

    def below(self, function: Curve, form: RateForm, length_factor: float = 1.0) -> Curve:
        """Mean load of the requests up to t, each length times ``length_factor``."""
        return self._curve("below", function, form, length_factor)

    def _curve(self, side: str, function: Curve, form: RateForm, factor: float) -> Curve:
        key = (side, function, form, factor)
        if key not in self._curves:
            if form not in self._loads:
                self._loads[form] = LoadCurves(self.lengths, form)
            loads = self._loads[form]
            make = loads.above if side == "above" else loads.below
            curve = make(lambda num_tokens: function(factor * num_tokens))
            self._curves[key] = cache(curve)  # searches meet at the same thresholds
        return self._curves[key]


@attrs.frozen(kw_only=True)
class Change:
    """Factors on the inputs, for sensitivities."""

    egress_bps: float = 1.0
    num_prfaas: float = 1.0
    remote_prefill_speed: float = 1.0
    local_prefill_speed: float = 1.0
    decode_step_s: float = 1.0
    mean_length: float = 1.0


@attrs.frozen(kw_only=True)
class Fleet:
    """A planning problem in one form of the rates.

    Every limit is in arrivals per second of the whole deployment. All clusters share one
    threshold. PRFAAS clusters add up, each bound by its instances or its egress, and all of them
    by the egress that they share. PD clusters add up, each bound by its own prefill or its own
    decode: a request stays in its PD cluster.
    """

    problem: PlanningProblem
    form: RateForm
    table: LoadTable
    change: Change = Change()

    _remote: tuple[tuple[float, Curve, float], ...] = attrs.field(init=False)
    _bits: Curve = attrs.field(init=False)
    _local: tuple[tuple[float, Curve, float], ...] = attrs.field(init=False)

    @_remote.default
    def _remote_parts(self) -> tuple[tuple[float, Curve, float], ...]:
        """(instances at unit speed, seconds of load, egress) per PRFAAS cluster."""
        by, problem = self.change, self.problem
        return tuple(
            (
                cluster.num_nodes * by.num_prfaas * by.remote_prefill_speed,
                self.table.above(self._prefill(cluster), self.form, by.mean_length),
                problem.usable_egress_bps(cluster) * by.egress_bps,
            )
            for cluster in problem.prfaas
        )

    @_bits.default
    def _bits_part(self) -> Curve:
        return self.table.above(self.table.kv_bits, self.form, self.change.mean_length)

    @_local.default
    def _local_parts(self) -> tuple[tuple[float, Curve, float], ...]:
        """(instances, seconds of load, decode rate of one instance) per PD cluster."""
        by, problem = self.change, self.problem
        return tuple(
            (
                cluster.num_nodes,
                self.table.below(self._prefill(cluster), self.form, by.mean_length),
                problem.systems[cluster.system].decode_rps(problem.output_tokens)
                / by.decode_step_s,
            )
            for cluster in problem.pd
        )

    def _prefill(self, cluster: PlanningCluster) -> Curve:
        return self.problem.systems[cluster.system].prefill.prefill_s

    def remote_limits(self, threshold: float) -> list[tuple[float, float]]:
        """(compute, egress) of every PRFAAS cluster; infinite when nothing is above t."""
        bits = self._bits(threshold)
        return [
            (rate_of(num, seconds(threshold)), rate_of(egress_bps, bits))
            for num, seconds, egress_bps in self._remote
        ]

    def local_limits(self, threshold: float, split: Split) -> list[tuple[float, float]]:
        """(prefill, decode) of every PD cluster."""
        return [
            (rate_of(num_prefill, load), max(0.0, num - num_prefill) * decode_rps)
            for (num, load, decode_rps), num_prefill in zip(
                self._local_loads(threshold), split, strict=True
            )
        ]

    def remote_rps(self, threshold: float) -> float:
        """Arrivals whose long part the PRFAAS clusters carry."""
        if self._bits(threshold) <= 0:
            return math.inf
        each = sum(min(limits) for limits in self.remote_limits(threshold))
        return min(each, self.shared_egress_rps(threshold))

    def shared_egress_rps(self, threshold: float) -> float:
        """Arrivals whose caches fit through the egress that all PRFAAS clusters share."""
        egress_bps = self.problem.usable_egress_bps() * self.change.egress_bps
        return rate_of(egress_bps, self._bits(threshold))

    def local_rps(self, threshold: float, split: Split) -> float:
        """Arrivals whose short part the PD clusters prefill, and all of which they decode."""
        return sum(min(limits) for limits in self.local_limits(threshold, split))

    def rate(self, threshold: float, split: Split) -> float:
        """Λ_max."""
        return min(self.remote_rps(threshold), self.local_rps(threshold, split))

    def best_threshold(self, split: Split) -> float:
        """The threshold of the highest rate; where decode binds, the one with most headroom."""
        fastest = self._search(lambda t: self.local_rps(t, split))
        roomiest = self._search(lambda t: sum(pair[0] for pair in self.local_limits(t, split)))
        enough = self.rate(fastest, split) * _EQUAL
        return roomiest if self.rate(roomiest, split) >= enough else fastest

    def best(self, granularity: float = 1.0) -> tuple[float, Split]:
        """The best threshold and split; N_p are multiples of ``granularity``.

        Exact for any number of PD clusters: at a fixed threshold each cluster's best split does
        not depend on the others', so one search over the threshold is a search over all splits.
        """
        threshold = self._best_threshold_of_any_split(granularity)
        split = tuple(
            whole_if_whole(num_prefill) for _, num_prefill in self._splits(threshold, granularity)
        )
        return self.best_threshold(split), split

    def best_rate(self) -> float:
        """Λ_max at the best threshold and whole-instance split."""
        threshold = self._best_threshold_of_any_split(1.0)
        local = sum(rate for rate, _ in self._splits(threshold, 1.0))
        return min(self.remote_rps(threshold), local)

    def _best_threshold_of_any_split(self, granularity: float) -> float:
        return self._search(lambda t: sum(rate for rate, _ in self._splits(t, granularity)))

    def _search(self, local_rps: Curve) -> float:
        return search_threshold(self.remote_rps, local_rps, self.table.lengths, self.form)

    def _splits(self, threshold: float, granularity: float) -> list[tuple[float, float]]:
        return [
            split_local(num, load, decode_rps, granularity)
            for num, load, decode_rps in self._local_loads(threshold)
        ]

    def _local_loads(self, threshold: float) -> list[tuple[float, float, float]]:
        """(instances, prefill seconds per arrival, decode rate of one) per PD cluster."""
        speed = self.change.local_prefill_speed
        return [(num, seconds(threshold) / speed, rate) for num, seconds, rate in self._local]
