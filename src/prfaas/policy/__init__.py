"""Policies: what the clusters hold, where a request goes, and who plays which role."""

from prfaas.policy.balancer import FixedRoles
from prfaas.policy.global_index import GlobalPrefixIndex
from prfaas.policy.ledger import LoadLedger
from prfaas.policy.link import LinkEstimator
from prfaas.policy.load_curve import LoadCurve, PrefillSeconds, PrefillStage
from prfaas.policy.router import ThresholdRouter
from prfaas.policy.threshold import ThresholdController, ThresholdSettings, lognormal_quantiles

__all__ = [
    "FixedRoles",
    "GlobalPrefixIndex",
    "LinkEstimator",
    "LoadCurve",
    "LoadLedger",
    "PrefillSeconds",
    "PrefillStage",
    "ThresholdController",
    "ThresholdRouter",
    "ThresholdSettings",
    "lognormal_quantiles",
]
