"""The throughput model of arXiv 2604.15039: what a deployment can sustain, and how."""

from __future__ import annotations

from prfaas.capacity.lengths import EmpiricalLengths, LengthDistribution, LogNormalLengths
from prfaas.capacity.throughput import (
    Deployment,
    MaxRate,
    OperatingPoint,
    PrefillProfile,
    RateForm,
    Stage,
    StageRates,
    best_split,
    best_threshold,
    kv_throughput_bps,
    least_egress_bps,
    max_request_rate,
    stage_rates,
)

__all__ = [
    "Deployment",
    "EmpiricalLengths",
    "LengthDistribution",
    "LogNormalLengths",
    "MaxRate",
    "OperatingPoint",
    "PrefillProfile",
    "RateForm",
    "Stage",
    "StageRates",
    "best_split",
    "best_threshold",
    "kv_throughput_bps",
    "least_egress_bps",
    "max_request_rate",
    "stage_rates",
]
