"""The scenarios: what happens to the clusters, and what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import attrs

from experiment_parts import workloads
from experiment_parts.deployments import (
    FAST_BPS,
    LENGTHS,
    OUTPUT_TOKENS,
    SLOW_BPS,
    SPEC,
    Hardware,
    Optimum,
    at_split,
    granular,
    nodes,
    optimum,
)
from experiment_parts.measures import Window
from experiment_parts.policies import Policy, num_prefill_of
from prfaas.capacity import LengthDistribution
from prfaas.core import NodeId
from prfaas.simulator import Failure, Scenario, SimulatedLink
from prfaas.workload import Arrival

TIMEOUT_S = 180.0
MAX_WAITING = 100
NUM_CLIENTS = 160
POOL_BYTES = 100 << 30
RTT_S = 0.03
LOADS = (0.7, 0.9, 1.0, 1.1)
DROP_S, DROP_FOR_S, AFTER_S = 600.0, 1800.0, 900.0


@attrs.frozen(kw_only=True)
class Setup:
    """A run that is ready but for the policy.

    Attributes:
        world: the clusters.
        arrivals: what they are asked; ``num_clients`` ignores the times and closes the loop.
        window: what counts.
        planned: what the capacity model finds for the mean conditions.
        lengths: the uncached lengths of those.
        output_tokens: mean.
        offered_rps: None in a closed loop.
    """

    world: Scenario
    arrivals: Iterable[Arrival]
    window: Window
    planned: Optimum
    lengths: LengthDistribution = LENGTHS
    output_tokens: float = OUTPUT_TOKENS
    offered_rps: float | None = None
    num_clients: int | None = None


def world_of(
    hardware: Hardware,
    num_prefill: int,
    *,
    schedule: tuple[tuple[float, float], ...] = ((0.0, FAST_BPS),),
    failures: tuple[Failure, ...] = (),
    **of_nodes: object,
) -> Scenario:
    """Clusters with finite queues and clients that give up."""
    return Scenario(
        spec=SPEC,
        nodes=nodes(hardware, num_prefill, **of_nodes),  # type: ignore[arg-type]
        link=SimulatedLink(schedule=schedule),
        failures=failures,
        timeout_s=TIMEOUT_S,
        max_waiting=MAX_WAITING,
    )


def own_limit(policy: Policy) -> Optimum:
    """The optimum of the case study for the policy's hardware; for t = 0 that of t = 0."""
    if policy.threshold == 0:
        return at_split(policy.hardware, 0)
    return optimum(policy.hardware)


def _open(
    policy: Policy,
    rate_rps: float,
    arrivals: Iterable[Arrival],
    window: Window,
    **of_world: object,
) -> Setup:
    planned = own_limit(policy)
    world = world_of(policy.hardware, num_prefill_of(policy, planned), **of_world)  # type: ignore[arg-type]
    return Setup(
        world=world, arrivals=arrivals, window=window, planned=planned, offered_rps=rate_rps
    )


def steady(policy: Policy, load: float, seed: int = 0, duration_s: float = 1500.0) -> Setup:
    """Poisson arrivals at a share of the deployment's own limit."""
    rate_rps = load * own_limit(policy).limit_rps
    arrivals = workloads.steady(rate_rps, duration_s, seed)
    return _open(policy, rate_rps, arrivals, Window(from_s=300.0, until_s=duration_s))


def saturated(policy: Policy, seed: int = 0, duration_s: float = 1200.0) -> Setup:
    """A closed loop with more clients than there is room for."""
    planned = own_limit(policy)
    return Setup(
        world=world_of(policy.hardware, num_prefill_of(policy, planned)),
        arrivals=workloads.even_prompts(seed),
        window=Window(from_s=300.0, until_s=duration_s),
        planned=planned,
        num_clients=NUM_CLIENTS,
    )


def bursts(policy: Policy, seed: int = 0, duration_s: float = 2400.0) -> Setup:
    """Three times the mean rate for 20 s, then 40 s of silence; the mean is 0.7 of the limit."""
    rate_rps = 0.7 * own_limit(policy).limit_rps
    arrivals = workloads.bursts(rate_rps, duration_s, seed)
    return _open(policy, rate_rps, arrivals, Window(from_s=0.0, until_s=duration_s))


def drop_schedule(
    at_s: float = DROP_S, for_s: float = DROP_FOR_S
) -> tuple[tuple[float, float], ...]:
    """100 Gbps, then 5, then 100 again."""
    return (0.0, FAST_BPS), (at_s, SLOW_BPS), (at_s + for_s, FAST_BPS)


def link_drop(policy: Policy, seed: int = 0) -> Setup:
    """Poisson arrivals at half of the limit; for half an hour the link has 5 of its 100 Gbps."""
    rate_rps = 0.5 * own_limit(policy).limit_rps
    end_s = DROP_S + DROP_FOR_S + AFTER_S
    arrivals = workloads.steady(rate_rps, end_s, seed)
    window = Window(from_s=DROP_S, until_s=DROP_S + DROP_FOR_S)
    return _open(policy, rate_rps, arrivals, window, schedule=drop_schedule())


def diurnal(policy: Policy, seed: int = 0, duration_s: float = 5400.0) -> Setup:
    """The mean length goes from 1 up to 2, down to 0.5, and back, at a constant rate."""
    planned = optimum(policy.hardware, workloads.shifting_lengths())
    if policy.threshold == 0:
        planned = at_split(policy.hardware, 0, workloads.shifting_lengths())
    rate_rps = 0.6 * planned.limit_rps
    return Setup(
        world=world_of(policy.hardware, num_prefill_of(policy, planned)),
        arrivals=workloads.shifting(rate_rps, duration_s, seed),
        window=Window(from_s=0.0, until_s=duration_s),
        planned=planned,
        lengths=workloads.shifting_lengths(),
        offered_rps=rate_rps,
    )


def failure(policy: Policy, seed: int = 0, duration_s: float = 2400.0) -> Setup:
    """At 0.6 of the limit two nodes crash for ten minutes: half of the PRFAAS cluster, or two
    prefill nodes of a homogeneous one."""
    rate_rps = 0.6 * own_limit(policy).limit_rps
    name = "remote" if policy.hardware.num_remote else "local"
    crashes = tuple(Failure(at_s=600.0, node_id=NodeId(f"{name}{i}"), for_s=600.0) for i in (0, 1))
    arrivals = workloads.steady(rate_rps, duration_s, seed)
    window = Window(from_s=600.0, until_s=1800.0)
    return _open(policy, rate_rps, arrivals, window, failures=crashes)


def trace_optimum(
    hardware: Hardware, path: str | None, num_prefill: int | None = None, num_requests: int = 6000
) -> Optimum:
    """What the capacity model makes of the lengths that an unlimited cache would leave."""
    trace = workloads.trace_of(path, num_requests)
    lengths = workloads.uncached_lengths(trace)
    out = trace.mean_output_tokens
    if num_prefill is None:
        return optimum(hardware, lengths, output_tokens=out)
    return at_split(hardware, num_prefill, lengths, output_tokens=out)


def trace(
    policy: Policy,
    path: str | None,
    *,
    load: float | None = None,
    rate_rps: float | None = None,
    num_prefill: int | None = None,
    num_requests: int = 6000,
) -> Setup:
    """The conversation trace in less time, at a share of the own limit or at a rate; nodes have
    caches, and the gateway hears late of what is in them."""
    replayed = workloads.trace_of(path, num_requests)
    planned = trace_optimum(policy.hardware, path, num_prefill, num_requests)
    if policy.threshold == 0:
        planned = trace_optimum(policy.hardware, path, 0, num_requests)
    roles = num_prefill_of(policy, planned) if num_prefill is None else num_prefill
    if rate_rps is None:
        assert load is not None, "a trace needs a load or a rate"
        rate_rps = load * planned.limit_rps
    granule_tokens = replayed.granule_tokens
    assert granule_tokens is not None
    arrivals = workloads.replayed(replayed, rate_rps)
    return Setup(
        world=Scenario(
            spec=granular(SPEC, granule_tokens),
            nodes=nodes(policy.hardware, roles, pool_bytes=POOL_BYTES),
            link=SimulatedLink(schedule=((0.0, FAST_BPS),), rtt_s=RTT_S, pipelined=True),
            timeout_s=TIMEOUT_S,
            max_waiting=MAX_WAITING,
            event_delay_s=0.1,
        ),
        arrivals=arrivals,
        # The caches fill meanwhile.
        window=Window(from_s=0.2 * arrivals[-1].arrived_s, until_s=arrivals[-1].arrived_s),
        planned=planned,
        lengths=workloads.uncached_lengths(replayed),
        output_tokens=replayed.mean_output_tokens,
        offered_rps=rate_rps,
    )


SCENARIOS: Mapping[str, Callable[..., Setup]] = {
    "steady": steady,
    "saturated": saturated,
    "bursts": bursts,
    "link drop": link_drop,
    "diurnal": diurnal,
    "failure": failure,
    "trace": trace,
}
