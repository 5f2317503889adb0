"""Conformance functions for third-party implementations; no test framework needed.

Each is loaded on first use, so that checking a cache loads no transport.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prfaas.testing.balancer import check_balancer
    from prfaas.testing.cache import check_cache
    from prfaas.testing.engine import FakeEngine
    from prfaas.testing.engine_check import check_engine
    from prfaas.testing.profile_engine import ProfileEngine
    from prfaas.testing.relay import Relay, RelayConfig, Route, relay_process
    from prfaas.testing.router import check_router
    from prfaas.testing.transport import check_transport

_LAZY = {
    "FakeEngine": "prfaas.testing.engine",
    "ProfileEngine": "prfaas.testing.profile_engine",
    "Relay": "prfaas.testing.relay",
    "RelayConfig": "prfaas.testing.relay",
    "Route": "prfaas.testing.relay",
    "relay_process": "prfaas.testing.relay",
    "check_balancer": "prfaas.testing.balancer",
    "check_cache": "prfaas.testing.cache",
    "check_engine": "prfaas.testing.engine_check",
    "check_router": "prfaas.testing.router",
    "check_transport": "prfaas.testing.transport",
}

__all__ = [
    "FakeEngine",
    "ProfileEngine",
    "Relay",
    "RelayConfig",
    "Route",
    "check_balancer",
    "check_cache",
    "check_engine",
    "check_router",
    "check_transport",
    "relay_process",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'prfaas.testing' has no attribute {name!r}")
