"""Faults of existing routers and balancers, on whole simulated clusters: H39, H40 and H41."""

from __future__ import annotations

from random import Random

import attrs
import pytest

from prfaas.capacity import EmpiricalLengths
from prfaas.core import NodeId
from prfaas.policy import ThroughputBalancer
from prfaas.seams import RouteReason
from prfaas.simulator import Failure
from prfaas.workload import Arrival, poisson
from simulations import SPEC, at_rest, clusters, one, scenario, simulator

GRANULE = SPEC.granule_tokens
PREFILL_S = 1.794
"""Of 10,000 tokens on an H20 node."""


def talk(number: int, num_granules: int, at_s: float, name: str) -> Arrival:
    """A turn of conversation ``number``, whose prompts are prefixes of each other."""
    hashes = tuple(f"{number}-{i}".encode() for i in range(num_granules))
    plain = one(num_granules * GRANULE + 10, at_s=at_s, name=name)
    return attrs.evolve(plain, granule_hashes=hashes)


def test_h39_a_hit_that_is_predicted_is_there_also_when_states_were_evicted() -> None:
    """Requests come one at a time and events at once, so a wrong prediction has no excuse."""
    rng, turns, num_granules = Random(3), [], [100] * 12
    for i in range(60):
        number = rng.randrange(12)
        turns.append(talk(number, num_granules[number], 60.0 * i, f"r{i}"))
        num_granules[number] += rng.randrange(20, 200)
    small = clusters(0, 1, 1, pool_bytes=6 << 30, block_size=GRANULE)
    result = simulator(scenario(small, link=None, keep_decisions=True)).run(turns)
    predicted = {d.request_id: d.cached_tokens for d in result.decisions}
    served = {r.request_id: r.cached_tokens for r in result.records()}
    assert predicted == served
    assert len(served) == 60
    large = clusters(0, 1, 1, pool_bytes=100 << 30, block_size=GRANULE)
    kept = simulator(scenario(large, link=None)).run(turns)
    assert 0 < sum(served.values()) < sum(r.cached_tokens for r in kept.records())


def test_h40_a_long_follow_up_stays_where_its_prefix_is() -> None:
    nodes = clusters(1, 1, 1, pool_bytes=100 << 30, block_size=GRANULE)
    world = scenario(
        nodes,
        failures=[Failure(at_s=0.0, node_id=NodeId("remote0"), for_s=50.0)],
        keep_decisions=True,
    )
    turns = [
        talk(1, 1563, 1.0, "first"),  # while nothing is remote
        talk(1, 1578, 200.0, "follow-up"),
        talk(2, 1578, 300.0, "stranger"),
    ]
    result = simulator(world, 19_000).run(turns)
    first, follow_up, stranger = result.decisions
    assert first.reason is RouteReason.REMOTE_DOWN
    assert (follow_up.reason, follow_up.prefill_node) == (RouteReason.SHORT, "prefill0")
    assert follow_up.cached_tokens >= 100_000
    assert follow_up.routed_tokens < 1_100
    assert (stranger.reason, stranger.prefill_node) == (RouteReason.LONG, "remote0")


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "work"), [(1, 1, 0.7), (2, 2, 1.4), (3, 3, 2.1), (3, 4, 2.55)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_h41_constant_load_converts_at_most_once_in_200_periods(
    num_prefill: int, num_decode: int, work: float, seed: int
) -> None:
    """Random arrivals keep ``work`` nodes busy in each role: 0.7 of them, or so many that 3 and 4
    nodes and 4 and 3 are equally good."""
    nodes = clusters(0, num_prefill, num_decode)
    output_tokens = round(20 * PREFILL_S / 0.025)
    balancer = ThroughputBalancer(
        SPEC,
        baseline={n.node_id: n.role for n in nodes},
        band=(1_000, 100_000),
        num_slots=20,
        decode_step_s=0.025,
    )
    world = scenario(nodes, link=None, control_period_s=10.0)
    machine = simulator(world, balancer=balancer)
    lengths = EmpiricalLengths((10_000,))
    requests = poisson(work / PREFILL_S, lengths, output_tokens, Random(seed), duration_s=2_000.0)
    result = machine.run(requests)
    assert len(result.conversions) <= 1
    assert result.num_lost == 0
    assert at_rest(machine._ledger)
    assert sum(result.prefill_utilisation.values()) == pytest.approx(work, rel=0.15)
    assert sum(result.decode_utilisation.values()) == pytest.approx(work, rel=0.15)
