"""Policies: what the clusters hold, where a request goes, and who plays which role."""

from prfaas.policy.balancer import FixedRoles
from prfaas.policy.balancer_settings import BalancerSettings
from prfaas.policy.forecast import PrefillTime
from prfaas.policy.global_index import GlobalPrefixIndex
from prfaas.policy.ledger import LoadLedger
from prfaas.policy.link import LinkEstimator
from prfaas.policy.load_curve import LoadCurve, PrefillSeconds, PrefillStage
from prfaas.policy.max_weight import MaxWeightRouter, MaxWeightSettings
from prfaas.policy.prediction import PredictionError
from prfaas.policy.regime import Regime, RegimeSettings
from prfaas.policy.router import ThresholdRouter
from prfaas.policy.router_settings import RouterSettings
from prfaas.policy.situation import Assessment
from prfaas.policy.split import FractionalSplit, SplitLoad, SplitModel
from prfaas.policy.threshold import ThresholdController
from prfaas.policy.threshold_settings import ThresholdSettings, lognormal_quantiles
from prfaas.policy.throughput_balancer import ThroughputBalancer

__all__ = [
    "Assessment",
    "BalancerSettings",
    "FixedRoles",
    "FractionalSplit",
    "GlobalPrefixIndex",
    "LinkEstimator",
    "LoadCurve",
    "LoadLedger",
    "MaxWeightRouter",
    "MaxWeightSettings",
    "PredictionError",
    "PrefillSeconds",
    "PrefillStage",
    "PrefillTime",
    "Regime",
    "RegimeSettings",
    "RouterSettings",
    "SplitLoad",
    "SplitModel",
    "ThresholdController",
    "ThresholdRouter",
    "ThresholdSettings",
    "ThroughputBalancer",
    "lognormal_quantiles",
]
