"""The processes of the demo: workers and the gateway. Each ends when its pipe says so or closes."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import attrs

from prfaas.cache import PagedHybridCache, PoolGeometry
from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.policy import (
    FixedRoles,
    LoadLedger,
    ThresholdController,
    ThresholdRouter,
    lognormal_quantiles,
)
from prfaas.runtime.door import Door
from prfaas.runtime.gateway import Gateway
from prfaas.runtime.node import Node, WorkerConfig
from prfaas.runtime.worker import Worker
from prfaas.seams import Hello
from prfaas.spec import ModelSpec
from prfaas.store import HostArena, PoolMemory
from prfaas.transport.tcp import TcpConfig, TcpTransport

ANY_PORT = "tcp://127.0.0.1:0"
STOP_S = 10.0
LINK = TcpConfig(chunk_bytes=128 << 10)
"""Small chunks: on links of tens of Mbit/s every one is a measurement of the rate."""


@attrs.frozen(kw_only=True)
class WorkerSetup:
    """What one worker process is told."""

    name: str
    kind: ClusterKind
    role: Role
    model: str
    block_size: int
    pool_bytes: int
    sabotage: str | None = None


@attrs.frozen(kw_only=True)
class WorkerPlace:
    """Where the gateway reaches a worker, and where PRFAAS nodes do."""

    name: str
    role: Role
    address: str
    address_for_prfaas: str


@attrs.frozen(kw_only=True)
class GatewaySetup:
    """What the gateway process is told."""

    spec: ModelSpec
    workers: tuple[WorkerPlace, ...]
    max_tokens: int
    seed: int


class Child:
    """A spawned process and the pipe to it. The child must end when the pipe closes."""

    def __init__(self, name: str, target: Callable[..., None], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), name=name, daemon=True)
        # Inherited from its first instruction on: Ctrl-C is the parent's to handle.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        theirs.close()

    async def receive(self, timeout_s: float = 60.0) -> Any:
        """Next object that the child sends."""
        deadline = time.monotonic() + timeout_s
        while not self.pipe.poll():
            if not self.process.is_alive() or time.monotonic() > deadline:
                raise SystemExit(
                    f"process {self.name} did not answer (exit code {self.process.exitcode})"
                )
            await asyncio.sleep(0.01)
        try:
            return self.pipe.recv()
        except EOFError:
            raise SystemExit(f"process {self.name} ended early") from None

    def kill(self) -> None:
        """As a machine that loses power: no goodbye."""
        self.process.kill()

    def join(self) -> None:
        """Waits for the end, and forces it if it does not come."""
        self.pipe.close()
        self.process.join(STOP_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


async def _until_told(pipe: Connection) -> None:
    """Returns when the parent says something, or is gone."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), told.set)
    await told.wait()
    loop.remove_reader(pipe.fileno())


def worker_process(pipe: Connection, setup: WorkerSetup) -> None:
    """One worker: sends its address, and at the end its final counts."""
    from cluster.models import load_model, make_engine
    from cluster.sabotage import sabotage

    sys.setswitchinterval(0.0005)  # the engine's thread must not keep the others from the GIL
    engine = make_engine(load_model(setup.model), setup.model)
    geometry = PoolGeometry.for_spec(
        engine.spec, block_size=setup.block_size, pool_bytes=setup.pool_bytes
    )
    arena = HostArena(geometry.pool_bytes)
    cache = PagedHybridCache(geometry)
    node = Node(
        WorkerConfig(
            node_id=NodeId(setup.name),
            cluster_id=ClusterId(setup.kind.value),
            kind=setup.kind,
            role=setup.role,
            epoch=time.time_ns(),
            put_bytes=2 << 20,
            engine_niceness=5,  # three engines share two cores with the bytes that they send
        ),
        engine,
        cache,
        PoolMemory(arena, geometry),
        clock=time.monotonic,
        landing_hook=sabotage(setup.sabotage) if setup.sabotage else None,
    )

    async def serve() -> None:
        worker = Worker(node, TcpTransport(LINK))
        await worker.start(ANY_PORT)
        pipe.send(worker.address)
        await _until_told(pipe)
        await worker.aclose()
        cache.check()
        pipe.send({**node.counts(), "open_in_engine": engine.num_open})

    asyncio.run(serve())


def gateway_process(pipe: Connection, setup: GatewaySetup) -> None:
    """The gateway: sends its address once every worker is connected. Loads no torch."""
    spec = setup.spec
    # The plan: documents always go to PRFAAS, whatever the first measurements say.
    band = (2 * spec.granule_tokens, min(3000, 4 * setup.max_tokens // 5))
    prior = lognormal_quantiles(mu=6.9, sigma=1.0, low=64, high=setup.max_tokens)
    controller = ThresholdController(spec, band=band, prior_tokens=prior)
    hello = Hello(
        node_id=NodeId("gateway"),
        epoch=time.time_ns(),
        fingerprint=spec.fingerprint(),
        model=spec.name,
        granule_tokens=spec.granule_tokens,
    )
    baseline = {NodeId(place.name): place.role for place in setup.workers}

    async def serve() -> None:
        gateway = Gateway(
            spec=spec,
            router=ThresholdRouter(spec, controller),
            ledger=LoadLedger.for_spec(spec),
            balancer=FixedRoles(baseline, band),
            controller=controller,
            transport=TcpTransport(),
            hello=hello,
            rng=Random(setup.seed),
        )
        gateway.start()
        for place in setup.workers:
            await gateway.add_worker(
                place.address,
                peer_addresses={ClusterId(ClusterKind.PRFAAS.value): place.address_for_prfaas},
            )
        door = Door(gateway, TcpTransport(), hello)
        pipe.send(await door.start(ANY_PORT))
        await _until_told(pipe)
        await door.aclose()
        await gateway.aclose()

    asyncio.run(serve())
