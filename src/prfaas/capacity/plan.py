"""What the planner answers. Plain values; nothing here computes."""

from __future__ import annotations

import attrs

from prfaas.capacity.throughput import RateForm, Stage
from prfaas.core import ClusterKind


@attrs.frozen(kw_only=True)
class ClusterPlan:
    """The roles of one cluster and its part of the traffic.

    Attributes:
        num_prefill, num_decode: N_p and N_d; a PRFAAS cluster only prefills.
        requests_per_s: its part of the maximum rate: requests prefilled by a PRFAAS cluster,
            requests decoded by a PD cluster.
    """

    cluster_id: str
    kind: ClusterKind
    system: str
    num_prefill: float
    num_decode: float
    requests_per_s: float


@attrs.frozen(kw_only=True)
class StageUse:
    """How full one stage of one cluster is at the maximum rate.

    Attributes:
        capacity_rps: requests per second of its own share that the stage can take; None when it
            has nothing to do.
        utilisation: from 0 to 1; 1 is saturated.
    """

    cluster_id: str
    stage: Stage
    capacity_rps: float | None
    utilisation: float


@attrs.frozen(kw_only=True)
class OperatingPlan:
    """One way to run the clusters, at the highest rate it sustains.

    Attributes:
        threshold_tokens: t; None when nothing can be prefilled remotely.
        offload_fraction: p.
        num_prfaas, num_prefill, num_decode: N_prfaas, N_p and N_d over all clusters.
        prfaas_rps, prefill_rps, decode_rps: Θ_prfaas, Θ_pd-p and Θ_pd-d, summed over clusters;
            None for a stage without traffic.
        requests_per_s: Λ_max.
        binding: the stage that binds it, in the cluster with the most traffic on that side.
        egress_bps: mean bits per second across the link at Λ_max.
        mean_ttft_s, p90_ttft_s: service time to the first token over the law of lengths: prefill,
            then the whole cache over an idle link, and one round trip if remote. No queueing:
            at Λ_max itself queues grow without bound.
        cost_per_hour: of all clusters; None when a price is not known.
        requests_per_price: requests per unit of price at Λ_max.
    """

    threshold_tokens: float | None
    offload_fraction: float
    clusters: tuple[ClusterPlan, ...]
    num_prfaas: float
    num_prefill: float
    num_decode: float
    prfaas_rps: float | None
    prefill_rps: float | None
    decode_rps: float
    requests_per_s: float
    binding: Stage
    egress_bps: float
    stages: tuple[StageUse, ...]
    mean_ttft_s: float
    p90_ttft_s: float
    cost_per_hour: float | None
    requests_per_price: float | None


@attrs.frozen(kw_only=True)
class Baseline:
    """What the same budget gives without selective offloading.

    Attributes:
        name: "homogeneous, equal GPUs", "homogeneous, equal cost" or "naive heterogeneous".
        plan: how it runs best.
        ratio: Λ_max of the plan over Λ_max of this baseline; None when the baseline carries
            nothing.
    """

    name: str
    plan: OperatingPlan
    ratio: float | None


@attrs.frozen(kw_only=True)
class Elasticity:
    """Per cent more Λ_max per per cent more of one parameter, from 10 % less to 10 % more of it.

    Threshold and whole-instance split are optimised anew at both ends.

    Attributes:
        parameter: "egress_bps", "num_prfaas", "remote_prefill_speed", "local_prefill_speed",
            "decode_step_s" or "mean_length".
        low_rps, high_rps: Λ_max with 10 % less and 10 % more of it.
        elasticity: d ln Λ_max / d ln parameter; None when nothing is carried.
    """

    parameter: str
    low_rps: float
    high_rps: float
    elasticity: float | None


@attrs.frozen(kw_only=True)
class ThresholdPoint:
    """Bounds on the arrival rate at one threshold and the chosen split; None is no bound."""

    threshold_tokens: float
    prfaas_rps: float | None
    prefill_rps: float | None
    decode_rps: float
    requests_per_s: float


@attrs.frozen(kw_only=True)
class SplitPoint:
    """Λ_max at one N_p of one PD cluster with the best threshold, the others as chosen."""

    cluster_id: str
    num_prefill: float
    threshold_tokens: float
    requests_per_s: float


@attrs.frozen(kw_only=True)
class FormPlan:
    """The answer in one form of the rates.

    Attributes:
        best: whole instances per role; fractional: N_p in hundredths, an instance shared in time.
        by_threshold: the curve of the rate over t at the chosen split.
        by_split: the curve of the rate over N_p, one PD cluster after another.
    """

    form: RateForm
    best: OperatingPlan
    fractional: OperatingPlan
    baselines: tuple[Baseline, ...]
    sensitivity: tuple[Elasticity, ...]
    by_threshold: tuple[ThresholdPoint, ...]
    by_split: tuple[SplitPoint, ...]


@attrs.frozen(kw_only=True)
class DeploymentPlan:
    """The answer in both forms. Compare with the paper in MEAN, with a queue in EXPECTATION."""

    mean: FormPlan
    expectation: FormPlan

    def of(self, form: RateForm) -> FormPlan:
        """Return the answer in ``form``."""
        return self.mean if form is RateForm.MEAN else self.expectation
