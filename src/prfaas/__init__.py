"""Prefill-as-a-Service for hybrid-attention models, as a library.

Names of floors 0 to 3 are imported at once; what touches the world is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from prfaas.cache import NullCache, PagedHybridCache, PoolGeometry
from prfaas.core import ClusterKind, DType, Handoff, Request, Role
from prfaas.errors import PrfaasError
from prfaas.policy import (
    FixedRoles,
    GlobalPrefixIndex,
    LinkEstimator,
    LoadLedger,
    ThresholdController,
    ThresholdRouter,
)
from prfaas.seams import Engine, HybridKVCache, RoleBalancer, Router, Transport
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
    "ModelSpec",
    "Node",
    "NullCache",
    "PagedHybridCache",
    "PoolGeometry",
    "PoolMemory",
    "PrfaasError",
    "Request",
    "Role",
    "RoleBalancer",
    "Router",
    "SlidingWindowSpec",
    "ThresholdController",
    "ThresholdRouter",
    "Transport",
    "Worker",
    "WorkerConfig",
    "__version__",
    "connect",
    "listen",
    "preset",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'prfaas' has no attribute {name!r}")
