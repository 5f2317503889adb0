"""Prefill-as-a-Service for hybrid-attention models, as a library.

Values and policies are imported at once; what touches the world, and the simulator, on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from prfaas.cache import NullCache, PagedHybridCache, PoolGeometry
from prfaas.capacity import PlanningProblem, plan_deployment
from prfaas.core import ClusterKind, DType, Handoff, Request, Role
from prfaas.errors import PrfaasError
from prfaas.policy import (
    FixedRoles,
    GlobalPrefixIndex,
    LinkEstimator,
    LoadLedger,
    MaxWeightRouter,
    ThresholdController,
    ThresholdRouter,
    ThroughputBalancer,
)
from prfaas.seams import Engine, HybridKVCache, Plan, RoleBalancer, Router, Transport
from prfaas.spec import (
    FullAttentionSpec,
    LinearStateSpec,
    MLASpec,
    ModelSpec,
    SlidingWindowSpec,
    preset,
)

if TYPE_CHECKING:
    from prfaas.runtime import Client, Door, Gateway, Node, Worker, WorkerConfig
    from prfaas.simulator import Scenario, SimulatedLink, SimulatedNode, Simulator
    from prfaas.store import HostArena, PoolMemory
    from prfaas.transport import connect, listen

__version__ = "0.1.0"

_LAZY = {
    "Client": "prfaas.runtime",
    "Door": "prfaas.runtime",
    "Gateway": "prfaas.runtime",
    "HostArena": "prfaas.store",
    "Node": "prfaas.runtime",
    "PoolMemory": "prfaas.store",
    "Scenario": "prfaas.simulator",
    "SimulatedLink": "prfaas.simulator",
    "SimulatedNode": "prfaas.simulator",
    "Simulator": "prfaas.simulator",
    "Worker": "prfaas.runtime",
    "WorkerConfig": "prfaas.runtime",
    "connect": "prfaas.transport",
    "listen": "prfaas.transport",
}

__all__ = [
    "Client",
    "ClusterKind",
    "DType",
    "Door",
    "Engine",
    "FixedRoles",
    "FullAttentionSpec",
    "Gateway",
    "GlobalPrefixIndex",
    "Handoff",
    "HostArena",
    "HybridKVCache",
    "LinearStateSpec",
    "LinkEstimator",
    "LoadLedger",
    "MLASpec",
    "MaxWeightRouter",
    "ModelSpec",
    "Node",
    "NullCache",
    "PagedHybridCache",
    "Plan",
    "PlanningProblem",
    "PoolGeometry",
    "PoolMemory",
    "PrfaasError",
    "Request",
    "Role",
    "RoleBalancer",
    "Router",
    "Scenario",
    "SimulatedLink",
    "SimulatedNode",
    "Simulator",
    "SlidingWindowSpec",
    "ThresholdController",
    "ThresholdRouter",
    "ThroughputBalancer",
    "Transport",
    "Worker",
    "WorkerConfig",
    "__version__",
    "connect",
    "listen",
    "plan_deployment",
    "preset",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'prfaas' has no attribute {name!r}")
