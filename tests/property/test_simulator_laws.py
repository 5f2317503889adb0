"""Laws of every simulation: nothing is lost, nothing is counted twice, everything is given back."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core import BlockHash, Role
from prfaas.simulator import Ending, Failure, SimulatedLink
from prfaas.workload import Arrival
from simulations import Script, T, at_rest, node, scenario, simulator, stepped

NODES = ("remote0", "remote1", "prefill0", "prefill1", "decode0", "decode1", "mixed0")
LOCAL = NODES[2:]
ROLE = {"remote": Role.PREFILL, "prefill": Role.PREFILL, "decode": Role.DECODE, "mixed": Role.MIXED}


def crashes():
    return st.lists(
        st.builds(
            Failure,
            at_s=st.floats(0, 40),
            node_id=st.sampled_from(NODES),
            for_s=st.one_of(st.none(), st.floats(0.5, 20)),
        ),
        max_size=3,
    )


def plans():
    one = st.tuples(
        st.floats(0.5, 40), st.dictionaries(st.sampled_from(LOCAL), st.sampled_from(Role))
    )
    return st.lists(one, max_size=3).map(lambda found: sorted(found, key=lambda plan: plan[0]))


def links():
    return st.builds(
        SimulatedLink,
        schedule=st.sampled_from(
            [((0.0, 100e9),), ((0.0, 2e9),), ((0.0, 20e9), (10.0, 0.0), (25.0, 5e9))]
        ),
        rtt_s=st.sampled_from([0.0, 0.1]),
        pipelined=st.booleans(),
    )


def prompts(num: int, seed: int, is_known: bool) -> list[Arrival]:
    """Some share a prefix, if their content is known."""
    rng, now, found = Random(seed), 0.0, []
    for i in range(num):
        now += rng.expovariate(1.5)
        num_tokens = rng.choice((100, 5_000, 18_000, 30_000))
        family = rng.randrange(3)
        hashes = [b"%016d" % (family * 10_000 + j) for j in range(num_tokens // 64)]
        found.append(
            Arrival(
                request_id=f"r{i}",
                arrived_s=now,
                num_tokens=num_tokens,
                output_tokens=rng.choice((1, 50, 400)),
                granule_hashes=tuple(map(BlockHash, hashes)) if is_known else (),
            )
        )
    return found


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    failures=crashes(),
    script=plans(),
    link=links(),
    timeout_s=st.sampled_from([None, 8.0, 30.0]),
    max_active=st.sampled_from([None, 3]),
    num_slots=st.sampled_from([1, 4, None]),
    has_cache=st.booleans(),
)
def test_every_request_is_in_one_place_and_ends_once(
    seed, failures, script, link, timeout_s, max_active, num_slots, has_cache
):
    pool = {"pool_bytes": 8 << 30, "block_size": 512} if has_cache else {}
    nodes = [
        node(
            name,
            ROLE[name.rstrip("01")],
            max_active=max_active,
            num_slots=num_slots,
            decode_step_s=lambda batch: 0.01 + 0.001 * batch,
            **pool,
        )
        for name in NODES
    ]
    world = scenario(
        nodes,
        link=link,
        failures=failures,
        timeout_s=timeout_s,
        max_waiting=6,
        event_delay_s=0.2 if has_cache else 0.0,
    )
    machine = simulator(world, balancer=Script(*script))
    simulation = machine.begin(prompts(25, seed, has_cache))
    result = stepped(simulation)

    records = list(result.records())
    endings = Counter(record.ending for record in records)
    assert len({record.request_id for record in records}) == len(records)
    assert len(records) + result.num_lost == 25
    assert result.num_unfinished == 0
    assert result.num_accepted == 25 - endings[Ending.REJECTED]
    if timeout_s is not None:
        assert result.num_lost == 0
    if not result.num_lost:
        assert at_rest(machine._ledger)
    for record in records:
        lived_s = record.ended_s - record.arrived_s
        if record.ending is Ending.OK:
            phases = (record.ttft_s, record.decode_wait_s, record.decode_s)
            assert min(phases) >= 0
            assert math.fsum(phases) == pytest.approx(lived_s)
            assert 0 <= record.cached_tokens < record.num_tokens
        if timeout_s is not None:
            assert lived_s <= timeout_s + 1e-6
    crossed = sum(r.crossing_bytes for r in records if r.ending is Ending.OK)
    assert result.egress_bytes >= crossed * (1 - 1e-6)
    shares = [*result.prefill_utilisation.values(), *result.decode_utilisation.values()]
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)
    for used in simulation.gateway.fleet.nodes.values():
        if used.cache is not None and not result.num_lost:
            assert used.cache.cache.usage().num_requests == 0
            used.cache.cache.check()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), num_clients=st.integers(1, 30))
def test_a_closed_loop_never_has_more_requests_than_clients(seed, num_clients):
    nodes = [node(name, ROLE[name.rstrip("01")]) for name in NODES]
    machine = simulator(scenario(nodes), T, seed=seed)
    simulation = machine.begin(prompts(40, seed, False), num_clients=num_clients)
    while simulation.step():
        assert len(simulation.gateway.flights) <= num_clients
    result = simulation.result()
    assert result.num_ended(Ending.OK) == 40
    assert at_rest(machine._ledger)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_a_faster_link_never_makes_a_lone_request_slower(seed):
    nodes = [node(name, ROLE[name.rstrip("01")]) for name in NODES]
    num_tokens = Random(seed).randint(20_000, 120_000)

    def ttft_s(bps, pipelined):
        link = SimulatedLink(schedule=((0.0, bps),), pipelined=pipelined)
        arrival = Arrival(request_id="r", arrived_s=0.0, num_tokens=num_tokens, output_tokens=1)
        (record,) = simulator(scenario(nodes, link=link)).run([arrival]).records()
        return record.ttft_s

    for pipelined in (False, True):
        times = [ttft_s(bps, pipelined) for bps in (1e9, 10e9, 100e9)]
        assert times == sorted(times, reverse=True)
    assert ttft_s(10e9, True) <= ttft_s(10e9, False)
