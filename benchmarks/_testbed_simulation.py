"""What the simulator says of a deployment of the testbed, from the same lengths."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from itertools import islice

from prfaas.core import ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.paper import profiles
from prfaas.policy import FixedRoles, LoadLedger, ThresholdController, ThresholdRouter
from prfaas.simulator import RequestRecord, Scenario, SimulatedLink, SimulatedNode, Simulator
from prfaas.workload import Arrival

CASE = profiles.CASE_STUDY
Places = Iterable[tuple[str, ClusterKind, Role]]


def _node(name: str, kind: ClusterKind, role: Role) -> SimulatedNode:
    profile = profiles.H200 if kind is ClusterKind.PRFAAS else profiles.H20
    turn_s = CASE.decode_step_s / CASE.batch_size
    return SimulatedNode(
        node_id=NodeId(name),
        cluster_id=ClusterId(kind.value),
        kind=kind,
        role=role,
        prefill=profile.prefill_s,
        decode_step_s=lambda batch: batch * turn_s,  # requests take turns, as in the worker
        num_slots=int(CASE.batch_size),
    )


def _arrivals(lengths: Iterator[int]) -> Iterator[Arrival]:
    for number, num_tokens in enumerate(lengths):
        yield Arrival(
            request_id=RequestId(f"r{number}"),
            arrived_s=0.0,
            num_tokens=num_tokens,
            output_tokens=int(CASE.output_tokens),
        )


def simulate(
    places: Places,
    threshold_tokens: int,
    lengths: Iterator[int],
    *,
    num_clients: int,
    warm_s: float,
    window_s: float,
    setup_s: float,
) -> dict[str, float]:
    """Rate and mean phases of the same run, in the simulator.

    Args:
        setup_s: what a transfer costs besides its bytes.
    """
    nodes = [_node(*place) for place in places]
    band = (threshold_tokens, threshold_tokens)
    controller = ThresholdController(CASE.model, band=band)
    link = SimulatedLink(schedule=((0.0, CASE.egress_bps),), setup_s=setup_s, pipelined=True)
    simulator = Simulator(
        Scenario(spec=CASE.model, nodes=nodes, link=link),
        router=ThresholdRouter(CASE.model, controller),
        ledger=LoadLedger.for_spec(CASE.model),
        balancer=FixedRoles({node.node_id: node.role for node in nodes}, band),
        controller=controller,
    )
    end_s = warm_s + window_s
    result = simulator.run_closed(
        islice(_arrivals(lengths), int(end_s * 10)), num_clients, until_s=end_s
    )
    seen = [r for r in result.records() if r.ended_s >= warm_s]
    return {
        "requests_per_s": len(seen) / window_s,
        **{name: mean(seen, name) for name in ("queue_s", "prefill_s", "decode_wait_s")},
        "transfer_s": mean([r for r in seen if r.crossing_bytes], "transfer_s"),
    }


def mean(records: list[RequestRecord], name: str) -> float:
    """Of one field; 0 if there are none."""
    return statistics.fmean(getattr(r, name) for r in records) if records else 0.0
