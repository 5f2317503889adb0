"""A whole deployment in one event loop: real engines, real sockets, no processes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import attrs

from prfaas.cache import PagedHybridCache, PoolGeometry
from prfaas.core import ClusterId, ClusterKind, Handoff, NodeId, Role
from prfaas.policy import (
    FixedRoles,
    GlobalPrefixIndex,
    LinkEstimator,
    LoadLedger,
    ThresholdController,
    ThresholdRouter,
)
from prfaas.runtime.gateway import Gateway, GatewayConfig
from prfaas.runtime.node import LandingHook, Node, WorkerConfig
from prfaas.runtime.worker import Worker
from prfaas.seams import Engine, Hello, Transport
from prfaas.store import HostArena, PoolMemory
from prfaas.transport.tcp import TcpTransport

BLOCK = 64
ROLES = {
    "remote": (ClusterKind.PRFAAS, Role.PREFILL),
    "local": (ClusterKind.PD, Role.PREFILL),
    "decode": (ClusterKind.PD, Role.DECODE),
}


@attrs.define
class Deployment:
    """What a test can touch."""

    gateway: Gateway
    workers: dict[str, Worker]
    nodes: dict[str, Node]
    caches: dict[str, PagedHybridCache]
    ledger: LoadLedger

    def check_empty(self) -> None:
        """Nothing is left of any request, apart from prefix entries."""
        for name, cache in self.caches.items():
            cache.check()
            usage = cache.usage()
            assert usage.num_requests == 0, name
            assert usage.num_leases == 0, name
            assert usage.reserved == dict.fromkeys(usage.reserved, 0), name
            assert usage.blocks == usage.indexed, name
        for name, node in self.nodes.items():
            assert getattr(node.engine, "num_open", 0) == 0, name
        for name, worker in self.workers.items():
            assert worker.num_jobs == 0, name
        assert self.ledger.num_in_flight == 0


@asynccontextmanager
async def deployment(
    engine: Callable[[], Engine],
    *,
    threshold: int = 100,
    names: tuple[str, ...] = ("remote", "local", "decode"),
    roles: Mapping[str, Role] | None = None,
    handoff: Handoff = Handoff.AFTER_PROMPT,
    pool_bytes: int = 64 << 20,
    block_size: int = BLOCK,
    landing_hook: LandingHook | None = None,
    transport: Callable[[], Transport] = TcpTransport,
    config: GatewayConfig | None = None,
) -> AsyncIterator[Deployment]:
    """Workers named after `ROLES` (a digit may follow), one gateway, t pinned to ``threshold``."""
    async with AsyncExitStack() as stack:
        workers, nodes, caches = {}, {}, {}
        for name in names:
            kind, role = ROLES[name.rstrip("0123456789")]
            role = (roles or {}).get(name, role)
            model = engine()
            geometry = PoolGeometry.for_spec(
                model.spec, block_size=block_size, pool_bytes=pool_bytes
            )
            arena = HostArena(geometry.pool_bytes)
            cache = PagedHybridCache(geometry)
            worker_config = WorkerConfig(
                node_id=NodeId(name),
                cluster_id=ClusterId(kind.value),
                kind=kind,
                role=role,
                handoff=handoff,
                put_bytes=16 << 10,
                report_s=0.02,
            )
            node = Node(
                worker_config,
                model,
                cache,
                PoolMemory(arena, geometry),
                clock=time.monotonic,
                landing_hook=landing_hook if kind is ClusterKind.PD else None,
            )
            worker = Worker(node, transport())
            await worker.start("tcp://127.0.0.1:0")
            stack.push_async_callback(worker.aclose)
            workers[name], nodes[name], caches[name] = worker, node, cache
        spec = model.spec
        index = GlobalPrefixIndex(spec.groups, granule_tokens=spec.granule_tokens)
        ledger = LoadLedger(index, LinkEstimator())
        band = (threshold, threshold)
        controller = ThresholdController(spec, band=band, prior_tokens=[64, 128, 256])
        gateway = Gateway(
            spec=spec,
            router=ThresholdRouter(spec, controller),
            ledger=ledger,
            balancer=FixedRoles({NodeId(n): nodes[n].role for n in names}, band),
            transport=transport(),
            hello=Hello(
                node_id=NodeId("gateway"),
                epoch=1,
                fingerprint=spec.fingerprint(),
                model=spec.name,
                granule_tokens=spec.granule_tokens,
                handoff=handoff,
            ),
            controller=controller,
            config=config,
            rng=Random(0),
        )
        stack.push_async_callback(gateway.aclose)
        gateway.start()
        for worker in workers.values():
            await gateway.add_worker(worker.address)
        yield Deployment(gateway, workers, nodes, caches, ledger)
