"""The throughput model of arXiv 2604.15039: what a deployment can sustain, and how."""

from __future__ import annotations

from prfaas.capacity.decode_profile import DecodeProfile, mixed_capacity, time_slicing_loss
from prfaas.capacity.lengths import EmpiricalLengths, LengthDistribution, LogNormalLengths
from prfaas.capacity.plan import (
    Baseline,
    ClusterPlan,
    DeploymentPlan,
    Elasticity,
    FormPlan,
    OperatingPlan,
    SplitPoint,
    StageUse,
    ThresholdPoint,
)
from prfaas.capacity.planner import plan_deployment
from prfaas.capacity.prefill_profile import PrefillProfile, PrefillTime
from prfaas.capacity.prefill_surface import PrefillSurface
from prfaas.capacity.problem import Objective, PlanningCluster, PlanningProblem, System
from prfaas.capacity.search import best_split, best_threshold
from prfaas.capacity.throughput import (
    Deployment,
    MaxRate,
    OperatingPoint,
    RateForm,
    Stage,
    StageRates,
    kv_throughput_bps,
    least_egress_bps,
    max_request_rate,
    stage_rates,
)

__all__ = [
    "Baseline",
    "ClusterPlan",
    "DecodeProfile",
    "Deployment",
    "DeploymentPlan",
    "Elasticity",
    "EmpiricalLengths",
    "FormPlan",
    "LengthDistribution",
    "LogNormalLengths",
    "MaxRate",
    "Objective",
    "OperatingPlan",
    "OperatingPoint",
    "PlanningCluster",
    "PlanningProblem",
    "PrefillProfile",
    "PrefillSurface",
    "PrefillTime",
    "RateForm",
    "SplitPoint",
    "Stage",
    "StageRates",
    "StageUse",
    "System",
    "ThresholdPoint",
    "best_split",
    "best_threshold",
    "kv_throughput_bps",
    "least_egress_bps",
    "max_request_rate",
    "mixed_capacity",
    "plan_deployment",
    "stage_rates",
    "time_slicing_loss",
]
