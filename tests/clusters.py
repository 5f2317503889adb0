"""A whole deployment in one event loop: real engines and channels, no processes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

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
from prfaas.seams import Engine, Hello, RoleBalancer, Transport
from prfaas.store import HostArena, PoolMemory
from prfaas.testing.relay import Relay, Route
from prfaas.transport.tcp import TcpTransport

BLOCK = 64
ANY_PORT = "tcp://127.0.0.1:0"
SETTLE_S = 5.0
ROLES = {
    "remote": (ClusterKind.PRFAAS, Role.PREFILL),
    "local": (ClusterKind.PD, Role.PREFILL),
    "decode": (ClusterKind.PD, Role.DECODE),
}


@attrs.define
class Deployment:
    """What a test can touch.

    Attributes:
        reports: what the event loop's exception handler and the error log were told; a test that
            provokes it on purpose empties the list.
        relays: the links between the clusters, one for each worker, if they have a rate.
    """

    gateway: Gateway
    ledger: LoadLedger
    start_node: Callable[..., Node]
    transport: Callable[[], Transport]
    address: Callable[[str], str]
    hello: Hello
    link: Callable[[str], Any]
    on_role: Callable[[Role], None] | None = None
    workers: dict[str, Worker] = attrs.field(factory=dict)
    nodes: dict[str, Node] = attrs.field(factory=dict)
    reports: list[object] = attrs.field(factory=list)
    relays: list[Relay] = attrs.field(factory=list)

    @property
    def caches(self) -> dict[str, Any]:
        return {name: node.cache for name, node in self.nodes.items()}

    async def start(self, name: str, *, address: str | None = None, **options: Any) -> Worker:
        """Starts a worker; `add` makes the gateway know it."""
        node = self.nodes[name] = self.start_node(name, **options)
        worker = self.workers[name] = Worker(node, self.transport(), on_role=self.on_role)
        await worker.start(address or self.address(name))
        return worker

    async def add(self, name: str) -> None:
        address = self.workers[name].address
        far = {ClusterId(ClusterKind.PRFAAS.value): await self.link(address)}
        await self.gateway.add_worker(address, peer_addresses=far)

    async def kill(self, name: str) -> None:
        """As a machine that loses power: nobody is told anything."""
        worker = self.workers[name]
        for line in (*worker._lines, *worker._peers._lines.values()):
            line.abort()
        await worker.aclose()
        self.check_node(name)
        del self.workers[name], self.nodes[name]

    async def settle(self) -> None:
        """Messages that end a request at its workers may still be under way."""
        async with asyncio.timeout(SETTLE_S):
            while any(worker.num_jobs for worker in self.workers.values()):
                await asyncio.sleep(0.002)

    def check_empty(self) -> None:
        """Nothing is left of any request, apart from prefix entries."""
        for name, worker in self.workers.items():
            self.check_node(name)
            assert worker.num_jobs == 0, name
        assert self.gateway.num_active == 0
        assert self.ledger.num_in_flight == 0
        self.ledger.check()
        assert not self.reports

    def check_node(self, name: str) -> None:
        node = self.nodes[name]
        node.cache.check()
        usage = node.cache.usage()
        assert usage.num_requests == 0, name
        assert usage.num_leases == 0, name
        assert usage.reserved == dict.fromkeys(usage.reserved, 0), name
        assert usage.blocks == usage.indexed, name
        assert getattr(node.engine, "num_open", 0) == 0, name
        if name in self.workers:
            for channel in self.channels(name):
                assert not channel._windows._windows, (name, channel)

    def channels(self, name: str) -> list[Any]:
        """Those of a worker that are open."""
        worker = self.workers[name]
        return [line.channel for line in (*worker._lines, *worker._peers._lines.values())]


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
    address: Callable[[str], str] = lambda name: ANY_PORT,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    link_bps: float | None = None,
    config: GatewayConfig | None = None,
    balancer: RoleBalancer | None = None,
    on_role: Callable[[Role], None] | None = None,
) -> AsyncIterator[Deployment]:
    """Workers named after `ROLES` (a digit may follow), one gateway, t pinned to ``threshold``.

    Args:
        options: by worker name, arguments for its `WorkerConfig`, or a ``pool_bytes`` or
            ``block_size`` of its own.
        link_bps: rate of a relay between the clusters; None for none.
        balancer: in place of `FixedRoles`.
        on_role: of every worker.
    """

    def start_node(name: str, **more: Any) -> Node:
        kind, role = ROLES[name.rstrip("0123456789")]
        mine = {
            "role": (roles or {}).get(name, role),
            "put_bytes": 16 << 10,
            "report_s": 0.02,
            **(options or {}).get(name, {}),
            **more,
        }
        model = spare.pop() if spare else engine()
        geometry = PoolGeometry.for_spec(
            model.spec,
            block_size=mine.pop("block_size", block_size),
            pool_bytes=mine.pop("pool_bytes", pool_bytes),
        )
        worker_config = WorkerConfig(
            node_id=NodeId(name),
            cluster_id=ClusterId(kind.value),
            kind=kind,
            handoff=handoff,
            **mine,
        )
        return Node(
            worker_config,
            model,
            PagedHybridCache(geometry),
            PoolMemory(HostArena(geometry.pool_bytes), geometry),
            clock=time.monotonic,
            landing_hook=landing_hook if kind is ClusterKind.PD else None,
        )

    async def link(target: str) -> str:
        if link_bps is None:
            return target
        port = int(target.rpartition(":")[2])
        relay = Relay([Route(target_host="127.0.0.1", target_port=port)], link_bps)
        await stack.enter_async_context(relay)
        d.relays.append(relay)
        return f"tcp://127.0.0.1:{relay.ports[0]}"

    async with AsyncExitStack() as stack:
        spare = [engine()]
        spec = spare[0].spec
        index = GlobalPrefixIndex(spec.groups, granule_tokens=spec.granule_tokens)
        ledger = LoadLedger(index, LinkEstimator())
        band = (threshold, threshold)
        controller = ThresholdController(spec, band=band, prior_tokens=[64, 128, 256])
        configured = {n: (roles or {}).get(n, ROLES[n.rstrip("0123456789")][1]) for n in names}
        hello = Hello(
            node_id=NodeId("gateway"),
            epoch=1,
            fingerprint=spec.fingerprint(),
            model=spec.name,
            granule_tokens=spec.granule_tokens,
            handoff=handoff,
        )
        gateway = Gateway(
            spec=spec,
            router=ThresholdRouter(spec, controller),
            ledger=ledger,
            balancer=balancer
            or FixedRoles({NodeId(n): role for n, role in configured.items()}, band),
            transport=transport(),
            hello=hello,
            controller=controller,
            config=config,
            rng=Random(0),
        )
        d = Deployment(gateway, ledger, start_node, transport, address, hello, link, on_role)
        _collect_reports(d, stack)
        gateway.start()
        stack.push_async_callback(_close, d)
        for name in names:
            await d.start(name)
            await d.add(name)
        await gateway.statuses()  # roles that the plan asked for meanwhile are in force now
        yield d


async def _close(d: Deployment) -> None:
    await d.gateway.aclose()
    for worker in d.workers.values():
        await worker.aclose()


def _collect_reports(d: Deployment, stack: AsyncExitStack) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: d.reports.append(context))
    handler = logging.Handler(logging.ERROR)
    handler.emit = d.reports.append  # type: ignore[method-assign]
    logging.getLogger("prfaas").addHandler(handler)
    stack.callback(logging.getLogger("prfaas").removeHandler, handler)
