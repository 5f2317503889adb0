"""Settings of worker and gateway, checked before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.cache import PagedHybridCache, PoolGeometry
from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError
from prfaas.runtime.gateway import GatewayConfig
from prfaas.runtime.node import Node, WorkerConfig
from prfaas.seams import Hello
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
        ({"lease_s": float("nan")}, "lease_s is nan"),
        ({"report_s": 0.0}, r"report_s 0\.0; they must be above 0"),
        ({"node_id": ""}, "node_id is ''; it must be a non-empty string"),
        ({"node_id": None}, "node_id is None"),
        ({"cluster_id": ""}, "cluster_id is ''; it must be a non-empty string"),
        ({"kind": "pd"}, r"kind is 'pd'; use ClusterKind\.PRFAAS or ClusterKind\.PD"),
        ({"role": "mixed"}, r"role is 'mixed'; use Role\.PREFILL"),
        ({"epoch": -1}, "epoch is -1; it must be a whole number that fits 63 bits"),
        ({"epoch": 2**63}, "epoch is 9223372036854775808"),
        ({"epoch": 1.0}, r"epoch is 1\.0"),
        ({"handoff": "after_prompt"}, r"handoff is 'after_prompt'; use Handoff\.AFTER_PROMPT"),
        ({"kind": ClusterKind.PRFAAS}, "has role mixed; such clusters only prefill"),
    ],
)
def test_wrong_settings_of_a_worker(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        a_worker(**options)


def test_the_limits_themselves_are_allowed() -> None:
    a_worker(epoch=0, lease_s=3600.0, put_bytes=1, max_requests=1)
    a_worker(epoch=2**63 - 1, put_bytes=64 << 20)
    GatewayConfig(max_attempts=1, retry_s=0.0, max_retry_s=0.0)
    a_hello(node_id="n" * 1024, fingerprint=bytes(64), granule_tokens=1)


def a_hello(**options: Any) -> Hello:
    return Hello(**({"node_id": NodeId("n"), "epoch": 1, "fingerprint": b"f"} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_id": ""}, "node_id is ''; it must be a string of 1 to 1024 characters"),
        ({"node_id": "n" * 1025}, "node_id is 'n{64}'; it must be"),
        ({"node_id": None}, "node_id is 'None'"),
        ({"fingerprint": bytes(65)}, "fingerprint has 65 bytes, at most 64"),
        ({"granule_tokens": 0}, "granule_tokens is 0; it must be a whole number from 1"),
        ({"granule_tokens": 2**31 + 1}, "granule_tokens is 2147483649"),
        ({"granule_tokens": 16.0}, r"granule_tokens is 16\.0"),
        ({"handoff": "before_last"}, r"handoff is 'before_last'; use Handoff\.AFTER_PROMPT"),
    ],
)
def test_a_hello_that_no_greeting_can_carry(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        a_hello(**options)


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
