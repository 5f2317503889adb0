"""Speed of the simulator: simulated requests per second of processor time, on one core.

The case study of arXiv 2604.15039, scaled: a third of the nodes are PRFAAS nodes, prompts have its
lengths, and the load is 0.8 of what the nodes sustain. Router, ledger and controller are the
servers' own, so most of the time is theirs; --profile says how much.

t and the roles stay as planned, and the control loop runs every 10 s, but for two cases: one with
loads every second, and one where controller and balancer are live as well. Their work is per
second, not per request, so it weighs most where a second has few requests.
"""

from __future__ import annotations

import cProfile
import math
import pstats
import resource
import time
from collections.abc import Callable, Iterator
from random import Random

from _common import emit, parser
from prfaas.core import BlockHash, ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.paper.profiles import H20, H200, LENGTHS
from prfaas.policy import (
    LoadLedger,
    ThresholdController,
    ThresholdRouter,
    ThresholdSettings,
    ThroughputBalancer,
)
from prfaas.seams import BalancerEvent, Plan, RoleBalancer
from prfaas.simulator import Scenario, SimulatedLink, SimulatedNode, SimulationResult, Simulator
from prfaas.spec import preset
from prfaas.workload import Arrival

SPEC = preset("paper-1t")
T = 19_400
RPS_PER_NODE = 0.8 * 3.153 / 12
BLOCK_SIZE = 512
ROOMS = ("policy", "simulator", "cache", "simpy", "spec")
Run = Callable[[], SimulationResult]


class Settled(RoleBalancer):
    """One plan for ever, so that no balancer is measured."""

    _plan = Plan(epoch=1, roles={}, threshold_band=(T, T))

    def observe(self, event: BalancerEvent, now: float) -> None:
        """Nothing to learn."""

    def plan(self, now: float) -> Plan:
        return self._plan


def nodes(num_nodes: int, pool_bytes: int | None) -> tuple[SimulatedNode, ...]:
    """4 : 3 : 5 PRFAAS, prefill and decode nodes."""
    num_remote, num_prefill = num_nodes * 4 // 12, num_nodes * 3 // 12

    def node(i: int) -> SimulatedNode:
        is_remote = i < num_remote
        return SimulatedNode(
            node_id=NodeId(f"node{i}"),
            cluster_id=ClusterId("prfaas" if is_remote else "pd"),
            kind=ClusterKind.PRFAAS if is_remote else ClusterKind.PD,
            role=Role.PREFILL if i < num_remote + num_prefill else Role.DECODE,
            prefill=(H200 if is_remote else H20).prefill_s,
            pool_bytes=pool_bytes,
            block_size=BLOCK_SIZE,
        )

    return tuple(node(i) for i in range(num_nodes))


def prompts(num_requests: int, rate_rps: float) -> Iterator[Arrival]:
    """Poisson arrivals of prompts that share nothing."""
    rng, now = Random(1), 0.0
    for i in range(num_requests):
        now += rng.expovariate(rate_rps)
        yield Arrival(
            request_id=RequestId(f"r{i}"),
            arrived_s=now,
            num_tokens=round(LENGTHS.quantile(rng.random())),
            output_tokens=1024,
        )


def conversations(num_requests: int, rate_rps: float) -> Iterator[Arrival]:
    """The same lengths, as turns of conversations: most extend an earlier prompt."""
    rng, now = Random(1), 0.0
    open_ones: list[list[BlockHash]] = []
    for i in range(num_requests):
        now += rng.expovariate(rate_rps)
        granules = max(1, round(LENGTHS.quantile(rng.random())) // SPEC.granule_tokens)
        if open_ones and rng.random() < 0.7:
            hashes = rng.choice(open_ones)
        else:
            hashes = []
            open_ones = [*open_ones[-63:], hashes]
        hashes += [BlockHash(rng.randbytes(16)) for _ in range(granules - len(hashes))]
        yield Arrival(
            request_id=RequestId(f"r{i}"),
            arrived_s=now,
            num_tokens=granules * SPEC.granule_tokens,
            output_tokens=1024,
            granule_hashes=tuple(hashes[:granules]),
        )


def still_policy() -> tuple[ThresholdController, RoleBalancer]:
    """t stays where it is, so that no search for it is measured."""
    settings = ThresholdSettings(period_s=1e6, down_after_s=1e6)
    return ThresholdController(SPEC, band=(T, T), settings=settings), Settled()


def live_policy(world: Scenario, link_bps: float) -> tuple[ThresholdController, RoleBalancer]:
    """t is searched every second, and the roles are reconsidered every 10 s."""
    band = (1024, 131_072)
    controller = ThresholdController(
        SPEC,
        band=band,
        link_bps=link_bps,
        remote_prefill_s=H200.prefill_s,
        local_prefill_s=H20.prefill_s,
    )
    balancer = ThroughputBalancer(
        SPEC,
        baseline={n.node_id: n.role for n in world.nodes if n.kind is ClusterKind.PD},
        band=band,
        link_bps=link_bps,
        remote_prefill_s=H200.prefill_s,
        local_prefill_s=H20.prefill_s,
        num_slots=20,
        decode_step_s=0.025,
        output_tokens=1024.0,
    )
    return controller, balancer


def simulation(
    num_nodes: int,
    num_requests: int,
    *,
    control_period_s: float = 10.0,
    pool_bytes: int | None = None,
    is_live: bool = False,
) -> Run:
    """A run that is ready to start; what builds it is not measured."""
    bps = 100e9 * num_nodes / 12
    world = Scenario(
        spec=SPEC,
        nodes=nodes(num_nodes, pool_bytes),
        link=SimulatedLink(schedule=((0.0, bps),)),
        control_period_s=control_period_s,
    )
    controller, balancer = live_policy(world, bps) if is_live else still_policy()
    simulator = Simulator(
        world,
        router=ThresholdRouter(SPEC, controller),
        ledger=LoadLedger.for_spec(SPEC),
        balancer=balancer,
        controller=controller,
    )
    rate_rps = RPS_PER_NODE * num_nodes
    if pool_bytes is None and num_requests > 100_000:
        stream: Iterator[Arrival] = prompts(num_requests, rate_rps)
    else:
        make = prompts if pool_bytes is None else conversations
        stream = iter(list(make(num_requests, rate_rps)))
    return lambda: simulator.run(stream)


def measured(case: str, run: Run) -> dict[str, object]:
    """One run; processor time, so that others on the machine disturb little."""
    start, wall = time.process_time(), time.perf_counter()
    result = run()
    seconds, wall_s = time.process_time() - start, time.perf_counter() - wall
    num = len(result.log)
    assert result.num_lost == 0
    cached = math.fsum(result.log.counts["cached_tokens"])
    return {
        "case": case,
        "num_requests": num,
        "cpu_s": seconds,
        "wall_s": wall_s,
        "requests_per_s": num / seconds,
        "events_per_request": result.counters["events"] / num,
        "cached_share": cached / math.fsum(result.log.counts["num_tokens"]),
        "mean_ttft_s": result.mean_ttft_s(),
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def profiled(case: str, run: Run) -> dict[str, object]:
    """Where the time goes: shares of what cProfile sees, builtins by who calls them."""
    profile = cProfile.Profile()
    profile.runcall(run)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    shares = dict.fromkeys((*ROOMS, "other"), 0.0)

    def room(path: str) -> str:
        return next((name for name in ROOMS if f"/{name}/" in path), "other")

    for (path, _, _), (_, _, own_s, _, callers) in stats.items():
        if path == "~":
            for (caller, _, _), (_, _, spent_s, _) in callers.items():
                shares[room(caller)] += spent_s
        else:
            shares[room(path)] += own_s
    total_s = sum(shares.values())
    return {"case": case, **{name: share / total_s for name, share in shares.items()}}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--full", action="store_true", help="adds 10,000 nodes")
    arguments.add_argument("--profile", action="store_true", help="only: where the time goes")
    arguments.add_argument("--num-requests", type=int, default=1_000_000, help="of --full")
    args = arguments.parse_args()
    num = 10_000 if args.quick else 40_000
    cached = {"pool_bytes": 400 << 30}
    if args.profile:
        rows = [
            profiled("16 nodes", simulation(16, num)),
            profiled("16 nodes, caches", simulation(16, num // 4, **cached)),
        ]
        emit(args, rows, {})
        return
    repeats = 2 if args.quick else 5
    cases = {
        "16 nodes": lambda: simulation(16, num),
        "16 nodes, loads every second": lambda: simulation(16, num, control_period_s=1.0),
        "16 nodes, live policy every second": lambda: simulation(
            16, num // 4, control_period_s=1.0, is_live=True
        ),
        "16 nodes, caches": lambda: simulation(16, num // 4, **cached),
    }
    best: dict[str, dict[str, object]] = {}
    for case, make in cases.items():
        tries = [measured(case, make()) for _ in range(repeats)]
        best[case] = min(tries, key=lambda row: float(str(row["cpu_s"])))
    plain, trace_like = best["16 nodes"], best["16 nodes, caches"]
    ratios = {
        "requests_per_s": float(str(plain["requests_per_s"])),
        "requests_per_s_trace_like": float(str(trace_like["requests_per_s"])),
        "events_per_request": float(str(plain["events_per_request"])),
    }
    if args.full:
        row = measured("10,000 nodes", simulation(10_000, args.num_requests))
        best["10,000 nodes"] = row
        ratios["rss_mib_10k_nodes"] = float(str(row["rss_mib"]))
        ratios["wall_s_10k_nodes"] = float(str(row["wall_s"]))
    emit(args, list(best.values()), ratios)


if __name__ == "__main__":
    main()
