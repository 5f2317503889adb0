"""The paper's three deployments as a running stack: real gateway, workers, sockets and bytes.

Engines sleep for as long as the paper's profile says, on a clock that runs faster (`TIME_SCALE`).
Caches are smaller than the paper's model by `SIZE_SCALE`, and the relay between the clusters is
slower by the same factor, so that a transfer takes as long as it should on that clock. Clients send
their next request when the last one is answered, which saturates the first stage to bind.

    python benchmarks/testbed.py --quick --json
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import attrs

import _common
from _testbed_simulation import simulate
from prfaas.cache import PagedHybridCache, PoolGeometry
from prfaas.core import ClusterId, ClusterKind, DType, NodeId, Request, RequestId, Role
from prfaas.paper import profiles
from prfaas.policy import FixedRoles, LoadLedger, ThresholdController, ThresholdRouter
from prfaas.runtime import Gateway, Node, Worker, WorkerConfig
from prfaas.runtime.attempt import Record
from prfaas.seams import Hello
from prfaas.spec import LinearStateSpec, MLASpec, ModelSpec
from prfaas.store import HostArena, PoolMemory
from prfaas.testing import ProfileEngine, Relay, Route
from prfaas.transport.tcp import TcpConfig, TcpTransport

TIME_SCALE = 1 / 16
"""Real seconds per second of the profile."""
SIZE_SCALE = 960
"""Bytes of the paper's model per byte of `SPEC`."""
STEPS_PER_TOKEN = 128
"""Decode steps of the paper that one token of the stack stands for."""
ANY_PORT = "tcp://127.0.0.1:0"
TRANSPORT = TcpConfig(chunk_bytes=128 << 10)
CASE = profiles.CASE_STUDY
LINK_BPS = CASE.egress_bps / SIZE_SCALE / TIME_SCALE
NUM_CLIENTS = 120

_STATE = LinearStateSpec.delta_rule(
    num_heads=1, key_dim=126, value_dim=125, conv_channels=164, conv_columns=1
)
SPEC = ModelSpec(
    name=f"paper-1t over {SIZE_SCALE}",
    layers=(_STATE, _STATE, _STATE, MLASpec(kv_lora_rank=16, rope_dim=2, dtype=DType.FLOAT8)),
    granule_tokens=512,
)


@attrs.frozen(kw_only=True)
class Setup:
    """One deployment of the case study."""

    name: str
    num_prfaas: int
    num_prefill: int
    num_decode: int
    threshold_tokens: int

    def nodes(self) -> Iterator[tuple[str, ClusterKind, Role]]:
        for number in range(self.num_prfaas):
            yield f"remote{number}", ClusterKind.PRFAAS, Role.PREFILL
        for number in range(self.num_prefill):
            yield f"prefill{number}", ClusterKind.PD, Role.PREFILL
        for number in range(self.num_decode):
            yield f"decode{number}", ClusterKind.PD, Role.DECODE


ALL = 10**6
SETUPS = (
    Setup(
        name="prfaas",
        num_prfaas=4,
        num_prefill=3,
        num_decode=5,
        threshold_tokens=profiles.THRESHOLD_TOKENS,
    ),
    Setup(name="homogeneous", num_prfaas=0, num_prefill=9, num_decode=3, threshold_tokens=ALL),
    Setup(name="naive", num_prfaas=4, num_prefill=0, num_decode=8, threshold_tokens=0),
)


def make_node(name: str, kind: ClusterKind, role: Role) -> Node:
    """A worker's resources: the profile of its cluster's hardware, and a pool of real memory."""
    profile = profiles.H200 if kind is ClusterKind.PRFAAS else profiles.H20
    step_s = CASE.decode_step_s / CASE.batch_size * STEPS_PER_TOKEN
    engine = ProfileEngine(
        SPEC,
        prefill_s=lambda new, cached: TIME_SCALE * profile.prefill_s(new, cached),
        decode_s=TIME_SCALE * step_s,
        segment_tokens=8192,
        absorb_s=0.02,
    )
    geometry = PoolGeometry.for_spec(SPEC, block_size=512, pool_bytes=96 << 20)
    config = WorkerConfig(
        node_id=NodeId(name),
        cluster_id=ClusterId(kind.value),
        kind=kind,
        role=role,
        epoch=time.time_ns(),
        put_bytes=256 << 10,
        decode_slots=int(CASE.batch_size),
    )
    pool = PoolMemory(HostArena(geometry.pool_bytes), geometry)
    return Node(config, engine, PagedHybridCache(geometry), pool, clock=time.monotonic)


def cluster_process(pipe: Connection, names: tuple[tuple[str, ClusterKind, Role], ...]) -> None:
    """The workers of one cluster; sends their addresses, and at the end their counts."""

    async def serve() -> None:
        workers = [Worker(make_node(*place), TcpTransport(TRANSPORT)) for place in names]
        for worker in workers:
            await worker.start(ANY_PORT)
        pipe.send([worker.address for worker in workers])
        await asyncio.to_thread(pipe.recv)
        for worker in workers:
            await worker.aclose()

    asyncio.run(serve())


class Cluster:
    """The processes of one deployment's clusters."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self.addresses: dict[str, tuple[ClusterKind, str]] = {}
        self._children = []
        for kind in ClusterKind:
            places = tuple(place for place in setup.nodes() if place[1] is kind)
            if places:
                ours, theirs = context.Pipe()
                child = context.Process(target=cluster_process, args=(theirs, places), daemon=True)
                child.start()
                self._children.append((child, ours, places))

    async def addresses_of_all(self) -> dict[str, tuple[ClusterKind, str]]:
        found = {}
        for _, pipe, places in self._children:
            addresses = await asyncio.to_thread(pipe.recv)
            for (name, kind, _), address in zip(places, addresses, strict=True):
                found[name] = kind, address
        return found

    def close(self) -> None:
        for child, pipe, _ in self._children:
            pipe.send("stop")
            child.join(10)
            if child.is_alive():
                child.kill()


def lengths(rng_seed: int) -> Iterator[int]:
    """Prompt lengths of the case study, by a low-discrepancy sequence: the same for every
    deployment, and with little noise in their sum."""
    shift = Random(rng_seed).random()
    golden = (5**0.5 - 1) / 2
    for number in range(1, 10**9):
        yield round(profiles.LENGTHS.quantile((shift + number * golden) % 1))


@attrs.define
class Run:
    """What one deployment did, in seconds of the profile."""

    started_s: float
    records: list[Record] = attrs.field(factory=list)
    num_failed: int = 0

    def add(self, record: Record) -> None:
        record["finished_s"] = (time.monotonic() - self.started_s) / TIME_SCALE
        self.records.append(record)

    def rate_rps(self, from_s: float, until_s: float) -> float:
        """Requests finished per second in a window."""
        num = sum(from_s <= record["finished_s"] < until_s for record in self.records)  # type: ignore[operator]
        return num / (until_s - from_s)


async def connect(setup: Setup, stack: AsyncExitStack) -> Gateway:
    """Starts the processes of a deployment, the relay, and a gateway in this process."""
    cluster = Cluster(setup)
    stack.callback(cluster.close)
    addresses = await cluster.addresses_of_all()
    local = [name for name, (kind, _) in addresses.items() if kind is ClusterKind.PD]
    routes = [
        Route(target_host="127.0.0.1", target_port=int(addresses[name][1].rpartition(":")[2]))
        for name in local
    ]
    relay = Relay(routes, LINK_BPS)
    await stack.enter_async_context(relay)
    far = {name: f"tcp://127.0.0.1:{port}" for name, port in zip(local, relay.ports, strict=True)}
    band = (setup.threshold_tokens, setup.threshold_tokens)
    controller = ThresholdController(SPEC, band=band)
    hello = Hello(
        node_id=NodeId("gateway"),
        epoch=time.time_ns(),
        fingerprint=SPEC.fingerprint(),
        model=SPEC.name,
        granule_tokens=SPEC.granule_tokens,
    )
    gateway = Gateway(
        spec=SPEC,
        router=ThresholdRouter(SPEC, controller),
        ledger=LoadLedger.for_spec(SPEC),
        balancer=FixedRoles({NodeId(name): role for name, _, role in setup.nodes()}, band),
        controller=controller,
        transport=TcpTransport(TRANSPORT),
        hello=hello,
        rng=Random(0),
    )
    stack.push_async_callback(gateway.aclose)
    gateway.start()
    remote_id = ClusterId(ClusterKind.PRFAAS.value)
    for name, (_, address) in addresses.items():
        peers = {remote_id: far[name]} if name in far else {}
        await gateway.add_worker(address, peer_addresses=peers)
    return gateway


def a_request(number: int, num_tokens: int) -> Request:
    """A prompt that shares nothing with any other."""
    return Request(
        request_id=RequestId(f"r{number}"),
        tokens=(number, *(7,) * (num_tokens - 1)),
        max_new_tokens=int(CASE.output_tokens) // STEPS_PER_TOKEN,
        deadline_s=600.0,
    )


async def saturate(setup: Setup, warm_s: float, window_s: float) -> Run:
    """Runs a deployment with always `NUM_CLIENTS` requests in it; times are the profile's."""
    async with AsyncExitStack() as stack:
        gateway = await connect(setup, stack)
        run = Run(time.monotonic())
        numbered = enumerate(lengths(1))
        end_s = run.started_s + (warm_s + window_s) * TIME_SCALE

        async def client() -> None:
            while time.monotonic() < end_s:
                number, num_tokens = next(numbered)
                generation = await gateway.generate(a_request(number, num_tokens))
                run.add(generation.record)

        clients = [asyncio.create_task(client()) for _ in range(NUM_CLIENTS)]
        await asyncio.sleep(end_s - time.monotonic())
        for task in clients:
            task.cancel()
        done = await asyncio.gather(*clients, return_exceptions=True)
        run.num_failed = sum(isinstance(e, Exception) for e in done)
        return run


PHASES = ("queue_s", "prefill_s", "transfer_s", "decode_wait_s")


def row(setup: Setup, run: Run, warm_s: float, window_s: float) -> dict[str, object]:
    """One line of the report, in seconds and bytes of the profile."""
    seen = [r for r in run.records if r["finished_s"] >= warm_s]  # type: ignore[operator]
    shipped = [r for r in seen if r["offloaded"]]
    landed_bytes = SIZE_SCALE * sum(int(r["received_bytes"] or 0) for r in shipped)

    def mean_s(key: str) -> float:
        # Only what crosses the link has a transfer in the simulator.
        among = shipped if key == "transfer_s" and shipped else seen
        return statistics.fmean(float(r[key] or 0.0) for r in among) / TIME_SCALE

    return {
        "deployment": setup.name,
        "requests_per_s": run.rate_rps(warm_s, warm_s + window_s),
        "num_requests": len(seen),
        "num_failed": run.num_failed,
        "offloaded": len(shipped) / len(seen),
        **{name: mean_s(name) for name in PHASES},
        "egress_gbps": 8 * landed_bytes / window_s / 1e9,
    }


def simulated(
    setup: Setup, measured: Mapping[str, Any], times: tuple[float, float], setup_s: float
) -> dict[str, object]:
    """The same deployment in the simulator, beside what the stack did."""
    warm_s, window_s = times
    found = simulate(
        setup.nodes(),
        setup.threshold_tokens,
        lengths(1),
        num_clients=NUM_CLIENTS,
        warm_s=warm_s,
        window_s=window_s,
        setup_s=setup_s,
    )
    stack_ttft_s = sum(measured[name] for name in PHASES[:3])
    return {
        "deployment": f"{setup.name}, simulated",
        **found,
        "rate_pct": 100 * abs(found["requests_per_s"] / measured["requests_per_s"] - 1),
        # Against the whole, where a phase is a small part of it.
        "phase_pct": max(
            100 * abs(found[name] - measured[name]) / max(measured[name], 0.1 * stack_ttft_s)
            for name in PHASES
        ),
    }


def main() -> None:
    args = _common.parser(__doc__ or "").parse_args()
    times = (70.0, 110.0) if args.quick else (100.0, 600.0)
    rows = [row(setup, asyncio.run(saturate(setup, *times)), *times) for setup in SETUPS]
    stack: dict[str, Any] = {str(r["deployment"]): r for r in rows}
    # Without a link a transfer is what the machinery costs; the clock makes it look long.
    setup_s = stack["homogeneous"]["transfer_s"]
    rows += [simulated(setup, stack[setup.name], times, setup_s) for setup in SETUPS]
    rates = {name: r["requests_per_s"] for name, r in stack.items()}
    ratios = {
        "stack_vs_homogeneous": rates["prfaas"] / rates["homogeneous"],
        "stack_vs_naive": rates["prfaas"] / rates["naive"],
        "sim_vs_stack_pct": max(float(r["rate_pct"]) for r in rows[len(SETUPS) :]),  # type: ignore[arg-type]
        "sim_vs_stack_phase_pct": max(float(r["phase_pct"]) for r in rows[len(SETUPS) :]),  # type: ignore[arg-type]
    }
    _common.emit(args, rows, ratios)


if __name__ == "__main__":
    main()
