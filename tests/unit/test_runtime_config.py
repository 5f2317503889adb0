"""Settings of worker and gateway, checked before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.cache import PagedHybridCache, PoolGeometry
from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError
from prfaas.runtime.gateway import GatewayConfig
from prfaas.runtime.node import Node, WorkerConfig
from prfaas.store import HostArena, PoolMemory
from prfaas.testing.engine import FakeEngine, toy_spec


def a_worker(**options: Any) -> WorkerConfig:
    return WorkerConfig(
        **(
            {
                "node_id": NodeId("n"),
                "cluster_id": ClusterId("c"),
                "kind": ClusterKind.PD,
                "role": Role.MIXED,
            }
            | options
        )
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lease_s": 0.0}, "lease_s is 0.0"),
        ({"lease_s": 3601.0}, "at most 3600"),
        ({"report_s": -1.0}, "report_s -1.0"),
        ({"put_bytes": 0}, "put_bytes is 0"),
        ({"put_bytes": (64 << 20) + 1}, "put_bytes at most 67108864"),
        ({"max_requests": 0}, "max_requests 0"),
        ({"kind": ClusterKind.PRFAAS}, "has role mixed; such clusters only prefill"),
    ],
)
def test_wrong_settings_of_a_worker(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        a_worker(**options)


def test_only_pd_nodes_change_their_role() -> None:
    far = a_worker(kind=ClusterKind.PRFAAS, role=Role.PREFILL)
    assert [role for role in Role if far.allows(role)] == [Role.PREFILL]
    assert all(a_worker().allows(role) for role in Role)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"retry_s": 2.0}, "retry_s 2.0, max_retry_s 1.0"),
        ({"retry_s": -1.0}, "retry_s -1.0"),
        ({"register_s": 0.0}, "register_s is 0.0"),
        ({"silence_s": 0.0}, "silence_s is 0.0"),
        ({"tick_s": float("nan")}, "tick_s is nan"),
    ],
)
def test_wrong_settings_of_a_gateway(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GatewayConfig(**options)


def test_the_pool_must_be_cut_for_the_model_of_the_engine() -> None:
    spec = toy_spec(revision="another")
    geometry = PoolGeometry.for_spec(spec, block_size=16, pool_bytes=1 << 16)
    pool = PoolMemory(HostArena(geometry.pool_bytes), geometry)
    with pytest.raises(ConfigError, match=r"make the geometry from engine\.spec"):
        Node(a_worker(), FakeEngine(), PagedHybridCache(geometry), pool, clock=lambda: 0.0)
