"""From a threshold and a split to everything worth knowing about it."""

from __future__ import annotations

import math

import attrs

from prfaas.capacity.fleet import Fleet, Split
from prfaas.capacity.plan import ClusterPlan, OperatingPlan, StageUse
from prfaas.capacity.search import whole_if_whole
from prfaas.capacity.service_times import LocalRoute, RemoteRoute, ServiceTimes
from prfaas.capacity.throughput import Stage

_REMOTE_STAGES = (Stage.PRFAAS_COMPUTE, Stage.EGRESS)
_LOCAL_STAGES = (Stage.PREFILL, Stage.DECODE)


def _shares(limits: list[tuple[float, float]]) -> list[float]:
    """Traffic per cluster: in proportion to what each can take, evenly if that says nothing."""
    ends = [min(pair) for pair in limits]
    total = sum(ends)
    if not 0 < total < math.inf:
        return [1 / len(ends)] * len(ends) if ends else []
    return [end / total for end in ends]


def _capacities(
    offload: float, remote_rps: float, local: list[tuple[float, float]]
) -> tuple[float | None, float | None, float]:
    """(Θ_prfaas, Θ_pd-p, Θ_pd-d): limits on arrivals back to each stage's own requests."""
    prefill_rps = sum(prefill for prefill, _ in local)
    return (
        remote_rps * offload if offload > 0 and remote_rps < math.inf else None,
        prefill_rps * (1 - offload) if offload < 1 and prefill_rps < math.inf else None,
        sum(decode for _, decode in local),
    )


@attrs.frozen(kw_only=True)
class _Choice:
    """A threshold and a split of one fleet, with the traffic of each cluster."""

    fleet: Fleet
    threshold: float
    split: Split
    remote: list[tuple[float, float]] = attrs.field(init=False)
    local: list[tuple[float, float]] = attrs.field(init=False)
    offload: float = attrs.field(init=False)
    rate: float = attrs.field(init=False)

    @remote.default
    def _remote_limits(self) -> list[tuple[float, float]]:
        return self.fleet.remote_limits(self.threshold)

    @local.default
    def _local_limits(self) -> list[tuple[float, float]]:
        return self.fleet.local_limits(self.threshold, self.split)

    @offload.default
    def _offload_fraction(self) -> float:
        return self.fleet.table.lengths.share_above(self.threshold)

    @rate.default
    def _max_rate(self) -> float:
        return self.fleet.rate(self.threshold, self.split)

    def clusters(self) -> tuple[ClusterPlan, ...]:
        problem = self.fleet.problem
        remote = zip(problem.prfaas, _shares(self.remote), strict=True)
        local = zip(problem.pd, self.split, _shares(self.local), strict=True)
        return (
            *(
                ClusterPlan(
                    cluster_id=cluster.cluster_id,
                    kind=cluster.kind,
                    system=cluster.system,
                    num_prefill=cluster.num_nodes,
                    num_decode=0,
                    requests_per_s=self.rate * self.offload * share,
                )
                for cluster, share in remote
            ),
            *(
                ClusterPlan(
                    cluster_id=cluster.cluster_id,
                    kind=cluster.kind,
                    system=cluster.system,
                    num_prefill=num_prefill,
                    num_decode=whole_if_whole(cluster.num_nodes - num_prefill),
                    requests_per_s=self.rate * share,
                )
                for cluster, num_prefill, share in local
            ),
        )

    def stages(self) -> tuple[StageUse, ...]:
        problem, uses = self.fleet.problem, []
        sides = (
            (problem.prfaas, self.remote, _REMOTE_STAGES, (self.offload, self.offload)),
            (problem.pd, self.local, _LOCAL_STAGES, (1 - self.offload, 1.0)),
        )
        for clusters, limits, stages, parts in sides:
            for cluster, pair, share in zip(clusters, limits, _shares(limits), strict=True):
                for stage, limit, part in zip(stages, pair, parts, strict=True):
                    # A link that clusters share is as full for each of them.
                    is_shared = stage is Stage.EGRESS and cluster.egress_bps is None
                    arrivals = self.rate if is_shared else self.rate * share
                    uses.append(
                        StageUse(
                            cluster_id=cluster.cluster_id,
                            stage=stage,
                            capacity_rps=limit * part if limit < math.inf else None,
                            utilisation=arrivals / limit if limit > 0 else 0.0,
                        )
                    )
        return tuple(uses)

    def binding(self) -> Stage:
        remote_binds = self.fleet.remote_rps(self.threshold) < sum(map(min, self.local))
        limits, stages = (
            (self.remote, _REMOTE_STAGES) if remote_binds else (self.local, _LOCAL_STAGES)
        )
        if remote_binds and sum(map(min, limits)) > self.fleet.shared_egress_rps(self.threshold):
            return Stage.EGRESS
        first, second = max(limits, key=min, default=(0.0, 0.0))
        return stages[0] if first <= second else stages[1]

    def routes(self) -> tuple[list[LocalRoute], list[RemoteRoute]]:
        problem = self.fleet.problem
        local: list[LocalRoute] = [
            (share, problem.systems[cluster.system].prefill.prefill_s)
            for cluster, share in zip(problem.pd, _shares(self.local), strict=True)
        ]
        remote: list[RemoteRoute] = [
            (
                share,
                problem.systems[cluster.system].prefill.prefill_s,
                problem.usable_egress_bps(cluster),
            )
            for cluster, share in zip(problem.prfaas, _shares(self.remote), strict=True)
        ]
        return local, remote


def operate(fleet: Fleet, times: ServiceTimes, threshold: float, split: Split) -> OperatingPlan:
    """Work out the rates, the use of every stage, the times and the cost of one choice."""
    choice = _Choice(fleet=fleet, threshold=threshold, split=split)
    problem, table = fleet.problem, fleet.table
    prfaas_rps, prefill_rps, decode_rps = _capacities(
        choice.offload, fleet.remote_rps(threshold), choice.local
    )
    cost = problem.cost_per_hour
    local, remote = choice.routes()
    return OperatingPlan(
        threshold_tokens=threshold if any(c.num_nodes for c in problem.prfaas) else None,
        offload_fraction=choice.offload,
        clusters=choice.clusters(),
        num_prfaas=whole_if_whole(sum(cluster.num_nodes for cluster in problem.prfaas)),
        num_prefill=whole_if_whole(sum(split)),
        num_decode=whole_if_whole(sum(c.num_nodes for c in problem.pd) - sum(split)),
        prfaas_rps=prfaas_rps,
        prefill_rps=prefill_rps,
        decode_rps=decode_rps,
        requests_per_s=choice.rate,
        binding=choice.binding(),
        egress_bps=choice.rate * table.above(table.kv_bits, fleet.form)(threshold),
        stages=choice.stages(),
        mean_ttft_s=times.mean_s(threshold, local, remote, problem.rtt_s),
        p90_ttft_s=times.p90_s(threshold, local, remote, problem.rtt_s),
        cost_per_hour=cost,
        requests_per_price=3600 * choice.rate / cost if cost else None,
    )
