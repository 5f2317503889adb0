"""Roles, crashes and caches in the simulator: what a change may cost, and what it may not."""

from __future__ import annotations

import attrs
import pytest

from prfaas.core import BlockHash, Role
from prfaas.errors import ConfigError
from prfaas.policy import MaxWeightRouter, MaxWeightSettings
from prfaas.policy.throughput_balancer import ThroughputBalancer
from prfaas.seams import ChangePhase, RoutedRequest
from prfaas.simulator import Ending, Failure, SimulatedLink
from prfaas.workload import Arrival
from simulations import (
    SPEC,
    LeastWork,
    Script,
    T,
    arrivals,
    at_rest,
    clusters,
    node,
    one,
    scenario,
    simulator,
    stepped,
)


def phases(balancer: Script) -> list[tuple[str, str, int]]:
    return [(event.node_id, event.phase.value, event.plan_epoch) for _, event in balancer.changes]


def slow(new: int, cached: int) -> float:
    return 1.5


def test_h42_a_node_that_leaves_decode_loses_nothing():
    """20 requests decode on the node and 20 wait for a slot there when it is converted."""
    nodes = (
        *(node(f"prefill{i}", Role.PREFILL, prefill=lambda new, cached: 0.01) for i in range(2)),
        *clusters(0, 0, 2),
    )
    balancer = Script((5.0, {"decode1": Role.PREFILL}))
    machine = simulator(scenario(nodes, link=None), balancer=balancer)
    simulation = machine.begin(one(10, name=f"r{i}", output_tokens=1000) for i in range(80))
    while simulation.agenda.now < 5.0:
        simulation.step()
    before = simulation.gateway.fleet.nodes["decode1"].places()
    assert {place.value: len(flights) for place, flights in before.items() if flights} == {
        "decoding": 20,
        "decode_wait": 20,
    }
    result = stepped(simulation)
    assert result.num_ended(Ending.OK) == 80
    assert result.num_lost == 0
    assert all(record.num_attempts == 1 for record in result.records())
    assert at_rest(machine._ledger)
    assert phases(balancer) == [("decode1", "started", 1), ("decode1", "done", 1)]
    (conversion,) = result.conversions
    assert conversion.role is Role.PREFILL
    assert conversion.at_s == pytest.approx(5.0)
    assert conversion.done_s == pytest.approx(0.4 + 2 * 25.0, abs=0.5)
    assert result.node_roles["decode1"] is Role.PREFILL


def test_h42_a_node_that_drains_can_be_asked_for_everything_instead():
    nodes = clusters(0, 2, 2)
    balancer = Script((5.0, {"decode1": Role.PREFILL}), (6.0, {"decode1": Role.MIXED}))
    machine = simulator(scenario(nodes, link=None), balancer=balancer)
    result = machine.run(one(10, name=f"r{i}", output_tokens=1000) for i in range(80))
    assert result.num_ended(Ending.OK) == 80
    assert phases(balancer) == [
        ("decode1", "started", 1),
        ("decode1", "started", 2),
        ("decode1", "done", 2),
    ]
    assert result.node_roles["decode1"] is Role.MIXED
    assert at_rest(machine._ledger)


def test_h42_queued_prompts_of_a_node_that_leaves_prefill_go_elsewhere():
    """20 prompts queue on the node; the running one ends there, the others are given back."""
    nodes = (
        node("prefill0", Role.PREFILL, prefill=slow),
        node("prefill1", Role.PREFILL, prefill=slow),
        node("decode0", Role.DECODE, num_slots=None),
    )
    balancer = Script((1.0, {"prefill1": Role.DECODE}))
    machine = simulator(scenario(nodes, link=None), balancer=balancer)
    simulation = machine.begin(one(10, name=f"r{i}", output_tokens=2000) for i in range(42))
    while simulation.agenda.next_s < 1.0:
        simulation.step()
    node1 = simulation.gateway.fleet.nodes["prefill1"]
    num_queued = len(node1.jobs) - 1
    assert num_queued == 20
    result = stepped(simulation)
    assert result.num_ended(Ending.OK) == 42
    assert result.counters["given_back"] == num_queued
    assert at_rest(machine._ledger)
    moved = [record for record in result.records() if record.num_attempts > 1]
    assert len(moved) == num_queued
    assert all(record.prefill_node == "prefill0" for record in moved)
    assert phases(balancer) == [("prefill1", "started", 1), ("prefill1", "done", 1)]
    (conversion,) = result.conversions
    assert conversion.done_s == pytest.approx(1.5)


def test_a_draining_node_gets_nothing_new_and_then_works_in_its_new_role():
    nodes = (*clusters(0, 2, 2),)
    balancer = Script((5.0, {"decode1": Role.PREFILL}))
    machine = simulator(scenario(nodes, link=None), balancer=balancer)
    prompts = [one(5_000, at_s=0.5 * i, name=f"r{i}", output_tokens=400) for i in range(120)]
    simulation = machine.begin(prompts)
    result = stepped(simulation)
    (conversion,) = result.conversions
    assert conversion.done_s > 5.0
    for record in result.records():
        admitted_s = record.arrived_s
        if admitted_s > 5.0:
            assert record.decode_node == "decode0"
        if record.prefill_node == "decode1":
            assert admitted_s >= conversion.done_s
    assert any(record.prefill_node == "decode1" for record in result.records())


def test_the_way_back_is_open_while_a_node_drains():
    nodes = (*clusters(0, 1, 2),)
    balancer = Script((5.0, {"decode1": Role.PREFILL}), (6.0, {"decode1": Role.DECODE}))
    machine = simulator(scenario(nodes, link=None), balancer=balancer)
    prompts = [one(500, at_s=0.2 * i, name=f"r{i}", output_tokens=800) for i in range(60)]
    result = stepped(machine.begin(prompts))
    assert result.num_ended(Ending.OK) == 60
    assert result.node_roles["decode1"] is Role.DECODE
    assert phases(balancer) == [
        ("decode1", "started", 1),
        ("decode1", "started", 2),
        ("decode1", "done", 2),
    ]
    assert [c.done_s is not None for c in result.conversions] == [True, True]
    assert at_rest(machine._ledger)


def test_a_node_that_only_widens_its_role_drains_nothing():
    nodes = (*clusters(0, 1, 2),)
    balancer = Script((5.0, {"decode1": Role.MIXED}))
    machine = simulator(scenario(nodes, link=None), balancer=balancer)
    prompts = [one(8_000, at_s=0.7 * i, name=f"r{i}", output_tokens=800) for i in range(60)]
    result = stepped(machine.begin(prompts))
    (conversion,) = result.conversions
    assert conversion.done_s == conversion.at_s
    both = [r for r in result.records() if r.prefill_node == r.decode_node == "decode1"]
    assert both
    assert all(record.transfer_s == 0 for record in both)
    assert at_rest(machine._ledger)


def test_a_smaller_prefill_budget_slows_prompts_and_speeds_up_decoding():
    def times(budget):
        nodes = (node("mixed0", Role.MIXED, segment_tokens=1024),)
        budgets = {"mixed0": budget} if budget else {}
        balancer = Script((0.5, {"mixed0": Role.MIXED}, budgets))
        machine = simulator(scenario(nodes, link=None), balancer=balancer)
        prompts = [one(500, name="first", output_tokens=200)]
        prompts += [one(30_000, at_s=2.0, name="second", output_tokens=10)]
        records = {r.request_id: r for r in machine.run(prompts).records()}
        return records["first"].decode_s, records["second"].prefill_s

    (even_decode_s, even_prefill_s), (decode_s, prefill_s) = times(None), times(64)
    assert prefill_s > 1.5 * even_prefill_s
    assert decode_s < even_decode_s


def hashes(*names: str) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(name.encode().ljust(16, b".")) for name in names)


def conversation(num_granules: int) -> tuple[BlockHash, ...]:
    return hashes(*(f"g{i}" for i in range(num_granules)))


def turn(name: str, at_s: float, num_granules: int) -> Arrival:
    return Arrival(
        request_id=name,
        arrived_s=at_s,
        num_tokens=64 * num_granules + 10,
        output_tokens=4,
        granule_hashes=conversation(num_granules),
    )


CACHED = {"pool_bytes": 40 << 30, "block_size": 512}


def test_the_next_turn_of_a_conversation_hits_the_real_cache():
    machine = simulator(scenario(clusters(0, 1, 1, **CACHED), link=None))
    simulation = machine.begin([turn("a", 0.0, 160), turn("b", 30.0, 200)])
    result = stepped(simulation)
    first, second = result.records()
    assert first.cached_tokens == first.held_tokens == 0
    # The last complete block before the end of the first turn has a checkpoint.
    assert second.cached_tokens == 160 * 64
    assert second.held_tokens == 160 * 64
    assert second.prefill_s < 0.5 * first.prefill_s
    assert result.counters["cache_events"] > 0
    for used in simulation.gateway.fleet.nodes.values():
        assert used.cache.cache.usage().num_requests == 0
        used.cache.cache.check()


def test_rows_that_the_decode_node_holds_do_not_cross():
    machine = simulator(scenario(clusters(1, 1, 1, **CACHED)), 1_000)
    first, second = machine.run([turn("a", 0.0, 160), turn("b", 30.0, 200)]).records()
    assert first.crossing_bytes == SPEC.kv_bytes(160 * 64 + 10)
    assert second.crossing_bytes == SPEC.kv_bytes_delta(200 * 64 + 10, 160 * 64)


def test_cache_events_reach_the_ledger_late():
    world = scenario(clusters(0, 1, 1, **CACHED), link=None, event_delay_s=5.0)
    machine = simulator(world)
    simulation = machine.begin([turn("a", 0.0, 160), turn("b", 60.0, 200)])
    routed = RoutedRequest(request_id="x", num_tokens=200 * 64, granule_hashes=conversation(200))
    known = {}
    while simulation.step():
        hit = machine._ledger.hit("prefill0", routed)
        if hit.num_cached_tokens and "a" not in known:
            known["a"] = simulation.agenda.now
    first = next(simulation.result().records())
    assert known["a"] == pytest.approx(first.prefill_s + 5.0)


def test_h38_a_crash_empties_the_cache_and_its_events_are_forgotten():
    nodes = (
        *(node(f"prefill{i}", Role.PREFILL, **CACHED) for i in range(2)),
        *clusters(0, 0, 1, **CACHED),
    )

    def run(failures):
        world = scenario(nodes, link=None, failures=failures, keep_decisions=True)
        machine = simulator(world)
        result = stepped(machine.begin([turn("a", 0.0, 160), turn("b", 60.0, 160)]))
        return list(result.records()), result.decisions

    (first, second), _ = run(())
    warm = first.prefill_node
    assert second.prefill_node == warm
    assert second.cached_tokens > 0
    (_, gone), decisions = run([Failure(at_s=30.0, node_id=warm)])
    assert gone.prefill_node != warm
    assert gone.cached_tokens == decisions[-1].cached_tokens == 0
    (_, again), decisions = run([Failure(at_s=30.0, node_id=warm, for_s=10.0)])
    assert again.cached_tokens == decisions[-1].cached_tokens == 0


def test_a_pool_without_room_makes_prompts_wait_and_one_that_is_too_small_fails_them():
    tight = {"pool_bytes": 3 * SPEC.kv_bytes(12_000), "block_size": 512}
    link = SimulatedLink(schedule=((0.0, 1e9),))
    nodes = (node("remote0", Role.PREFILL, **tight), *clusters(0, 0, 1, pool_bytes=200 << 30))
    machine = simulator(scenario(nodes, link=link), 0)
    prompts = [one(10_000, name=f"r{i}") for i in range(5)]
    result = stepped(machine.begin(prompts))
    assert result.num_ended(Ending.OK) == 5
    starts = sorted(r.arrived_s + r.queue_s for r in result.records())
    # The entries of the first ones fill the pool until they are across.
    assert starts[-1] > 5 * 0.9 + 2.0

    tiny = {"pool_bytes": 600 << 20, "block_size": 512}
    nodes = (node("remote0", Role.PREFILL, **tiny), *clusters(0, 0, 1, pool_bytes=200 << 30))
    machine = simulator(scenario(nodes, link=link), 0)
    result = stepped(machine.begin([one(100_000)]))
    assert result.num_ended(Ending.FAILED) == 1
    assert result.counters["pool_too_small"] == 4
    assert at_rest(machine._ledger)


@pytest.mark.parametrize("max_attempts", [1, 2])
def test_a_crash_that_moves_a_second_request_ends_it_once(max_attempts):
    """Both decode on the node that crashes. The first one's rows then leave the prefill node, which
    finds that the second one never fits there."""
    pool_bytes = int(3.2 * SPEC.kv_bytes(30_000))
    nodes = (
        node("remote", Role.PREFILL, prefill=slow, pool_bytes=pool_bytes),
        node("decode", Role.DECODE),
    )
    world = scenario(
        nodes,
        link=SimulatedLink(schedule=((0.0, 1e8),)),
        failures=[Failure(at_s=5.0, node_id="decode", for_s=3.0)],
        max_attempts=max_attempts,
    )
    simulation = simulator(world, 0).begin([one(25_000, name="a"), one(120_000, name="b")])
    result = stepped(simulation)
    attempts = {r.request_id: (r.ending, r.num_attempts) for r in result.records()}
    first = Ending.OK if max_attempts > 1 else Ending.FAILED
    assert attempts == {"a": (first, max_attempts), "b": (Ending.FAILED, max_attempts)}
    assert result.counters["pool_too_small"] == max_attempts


def test_done_is_told_with_the_epoch_of_the_plan_that_asked():
    balancer = Script((2.0, {}), (3.0, {"decode1": Role.PREFILL}), (4.0, {"decode1": Role.PREFILL}))
    machine = simulator(scenario(clusters(0, 1, 2), link=None), balancer=balancer)
    prompts = [one(500, at_s=0.2 * i, name=f"r{i}", output_tokens=400) for i in range(40)]
    machine.run(prompts)
    assert phases(balancer) == [("decode1", "started", 2), ("decode1", "done", 2)]
    assert balancer.changes[-1][1].phase is ChangePhase.DONE


class Fetching(LeastWork):
    """Sends the prefix of the first turn to the PRFAAS node, which prefills the second one."""

    def route(self, request, view, now, rng):
        self.t = 10**6 if request.request_id == "a" else 0
        decision = LeastWork.route(self, request, view, now, rng)
        if request.request_id == "a":
            return decision
        return attrs.evolve(
            decision, prefix_node="prefill0", prefix_tokens=160 * 64, prefix_bytes=10**9
        )


def fetched(**settings: object):
    nodes = clusters(1, 1, 1, **CACHED)
    link = SimulatedLink(schedule=((0.0, 1e9),), rtt_s=0.5)
    world = scenario(nodes, link=link, **settings)
    machine = simulator(world, router=Fetching(nodes, T))
    result = stepped(machine.begin([turn("a", 0.0, 160), turn("b", 30.0, 200)]))
    assert at_rest(machine._ledger)
    return result, list(result.records())[1]


def test_a_prefix_takes_its_own_direction_of_the_link_before_the_prompt_is_queued():
    result, second = fetched()
    assert second.prefill_node == "remote0"
    assert second.queue_s == pytest.approx(8.0 + 0.5)
    assert second.cached_tokens == 160 * 64
    assert result.ingress_bytes == pytest.approx(1e9)
    assert result.egress_bytes == pytest.approx(second.crossing_bytes)
    assert result.counters["prefixes_sent"] == 1


def test_a_prompt_goes_on_without_a_prefix_whose_source_is_lost():
    result, second = fetched(failures=[Failure(at_s=32.0, node_id="prefill0")])
    assert second.ending is Ending.OK
    assert second.queue_s == pytest.approx(2.0)
    assert second.cached_tokens == 0
    assert result.ingress_bytes == pytest.approx(0.25e9)


class FetchingNear(LeastWork):
    """Prefills the second turn at one node with a prefix that another one of its cluster has."""

    def route(self, request, view, now, rng):
        decision = LeastWork.route(self, request, view, now, rng)
        if request.request_id == "a":
            return attrs.evolve(decision, prefill_node="prefill0")
        return attrs.evolve(
            decision,
            prefill_node="prefill1",
            prefix_node="prefill0",
            prefix_tokens=160 * 64,
            prefix_bytes=10**9,
        )


def fetched_near(**settings: object):
    nodes = clusters(1, 2, 1, **CACHED)
    world = scenario(nodes, link=SimulatedLink(schedule=((0.0, 1e9),), rtt_s=0.5), **settings)
    machine = simulator(world, router=FetchingNear(nodes, 10**6))
    result = stepped(machine.begin([turn("a", 0.0, 160), turn("b", 30.0, 200)]))
    assert at_rest(machine._ledger)
    assert result.ingress_bytes == result.egress_bytes == 0
    assert result.counters["prefixes_sent"] == 1
    return list(result.records())[1]


def test_a_prefix_inside_a_cluster_takes_its_setup_and_nothing_of_the_link():
    for setup_s in (0.0, 0.2):
        second = fetched_near(fabric_setup_s=setup_s)
        assert second.prefill_node == "prefill1"
        assert second.queue_s == pytest.approx(setup_s)
        assert second.cached_tokens == 160 * 64
    assert fetched_near() == fetched_near(fabric_setup_s=0.05)
    with pytest.raises(ConfigError, match="fabric_setup_s"):
        scenario(clusters(0, 1, 1), link=None, fabric_setup_s=-0.1)


def test_a_prompt_does_not_wait_for_a_node_of_its_cluster_that_is_lost():
    second = fetched_near(fabric_setup_s=5.0, failures=[Failure(at_s=32.0, node_id="prefill0")])
    assert second.ending is Ending.OK
    assert second.queue_s == pytest.approx(2.0)
    assert second.cached_tokens == 0


def test_max_weight_moves_prefixes_and_loses_nothing():
    nodes = clusters(2, 2, 2, **CACHED)
    settings = MaxWeightSettings(prefix_transfers=True)

    def run():
        world = scenario(nodes, event_delay_s=0.1, keep_decisions=True)
        machine = simulator(world, router=MaxWeightRouter(SPEC, settings=settings))
        turns = [turn(f"r{i}", 0.5 * i, 100 + 4 * i) for i in range(30)]
        result = stepped(machine.begin(turns))
        assert at_rest(machine._ledger)
        return result

    result = run()
    assert result.num_ended(Ending.OK) == 30
    assert result.counters["prefixes_sent"] > 0
    assert result.decisions == run().decisions


def test_the_balancer_heals_a_bad_split_and_loses_nothing():
    nodes = clusters(4, 6, 2)
    roles = {n.node_id: n.role for n in nodes if n.node_id[:6] != "remote"}
    balancer = ThroughputBalancer(SPEC, baseline=roles, band=(1_000, 100_000), num_slots=20)
    world = scenario(nodes, control_period_s=5.0)
    machine = simulator(world, balancer=balancer)
    result = machine.run(arrivals(800, 2.6))
    assert result.num_lost == 0
    assert result.num_ended(Ending.OK) == 800
    assert at_rest(machine._ledger)
    assert result.conversions[0].role is Role.DECODE
    waits_s = result.log.times["decode_wait_s"]
    assert sum(waits_s[-200:]) < 0.2 * max(waits_s) * 200


def test_another_router_runs_here_as_it_does_in_a_gateway():
    world = scenario(clusters(4, 3, 5), control_period_s=5.0)
    machine = simulator(world, router=MaxWeightRouter(SPEC))
    result = machine.run(arrivals(300, 2.4))
    assert result.num_ended(Ending.OK) == 300
    assert at_rest(machine._ledger)
    assert result.egress_bytes > 0
