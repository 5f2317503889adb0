"""The simulator against the throughput model, the paper's latencies, and its own book-keeping."""

from __future__ import annotations

import math
from collections import Counter

import attrs
import pytest

from prfaas.core import Role
from prfaas.errors import CapacityError, ConfigError
from prfaas.seams import Arrived, LinkRate, NodeLoad, NodeUp, Served
from prfaas.simulator import Ending, Failure, SimulatedLink
from prfaas.simulator.flight import Place
from simulations import (
    H20,
    H200,
    HOMOGENEOUS,
    NAIVE,
    PRFAAS_PD,
    SPEC,
    LeastWork,
    Script,
    arrivals,
    at_rest,
    clusters,
    node,
    one,
    scenario,
    simulator,
    stepped,
)


@pytest.mark.parametrize(
    ("deployment", "limit_rps"), [(HOMOGENEOUS, 2.026), (NAIVE, 2.371), (PRFAAS_PD, 3.153)]
)
def test_saturation_is_the_expectation_form_of_the_throughput_model(deployment, limit_rps):
    nodes, threshold_tokens = deployment
    world = scenario(nodes, control_period_s=60.0)
    result = simulator(world, threshold_tokens).run_closed(arrivals(2500), 250)
    ended = result.log.times["ended_s"]
    from_s, until_s = ended[250], ended[2100]
    assert result.throughput_rps(from_s, until_s) == pytest.approx(limit_rps, rel=0.02)
    assert result.num_lost == result.num_unfinished == 0
    assert result.num_ended(Ending.OK) == result.num_accepted == 2500


@pytest.mark.parametrize(
    ("deployment", "limit_rps", "mean_s", "p90_s"),
    [(HOMOGENEOUS, 2.026, 4.43, 9.7), (NAIVE, 2.371, 1.73, 3.5), (PRFAAS_PD, 3.153, 2.23, 3.5)],
)
def test_at_low_load_ttft_is_the_service_time(deployment, limit_rps, mean_s, p90_s):
    nodes, threshold_tokens = deployment
    world = scenario(nodes, control_period_s=600.0)
    result = simulator(world, threshold_tokens).run(arrivals(1500, limit_rps / 100))
    assert result.mean_ttft_s() == pytest.approx(mean_s, rel=0.02)
    assert result.ttft_s(0.9) == pytest.approx(p90_s, rel=0.02)


# Mean TTFT of the queueing table for loads of 0.5, 0.7 and 0.8 of the mean form's limit.
TABLE = [
    (HOMOGENEOUS, 2.110, (4.50, 4.91, 5.79)),
    (NAIVE, 2.452, (1.88, 2.32, 2.96)),
    (PRFAAS_PD, 3.223, (2.40, 2.87, 3.50)),
]


@pytest.mark.parametrize(("load", "column"), [(0.5, 0), (0.7, 1), (0.8, 2)])
@pytest.mark.parametrize(("deployment", "limit_rps", "means_s"), TABLE)
def test_queueing_with_one_queue_per_stage(deployment, limit_rps, means_s, load, column):
    nodes, threshold_tokens = deployment
    world = scenario(nodes, control_period_s=600.0)
    router = LeastWork(nodes, threshold_tokens)
    stream = arrivals(3000, load * limit_rps, output_tokens=16)
    result = simulator(world, threshold_tokens, router=router).run(stream)
    # So few requests show the mean of a queue only roughly, the more so the longer it is.
    noise = (0.03, 0.06, 0.10)[column]
    assert result.mean_ttft_s() == pytest.approx(means_s[column], rel=noise)


def test_phases_of_one_remote_and_one_local_request():
    world = scenario(PRFAAS_PD[0], link=SimulatedLink(schedule=((0.0, 10e9),), rtt_s=0.1))
    result = simulator(world).run([one(40_000, name="long"), one(9_000, at_s=50.0, name="short")])
    long, short = result.records()
    assert long.request_id == "long"
    assert long.prefill_node.startswith("remote")
    assert long.prefill_s == pytest.approx(H200.prefill_s(40_000))
    num_bytes = SPEC.kv_bytes(40_000)
    assert long.transfer_s == pytest.approx(8 * num_bytes / 10e9 + 0.1)
    assert long.ttft_s == pytest.approx(long.prefill_s + long.transfer_s)
    assert long.queue_s == long.decode_wait_s == 0
    assert long.decode_s == pytest.approx(100 * 0.025)
    assert long.crossing_bytes == num_bytes == round(result.egress_bytes)
    assert result.egress_bps == pytest.approx(8 * num_bytes / result.duration_s)
    assert result.link_busy == pytest.approx(8 * num_bytes / 10e9 / result.duration_s)
    assert result.link_utilisation == pytest.approx(result.link_busy)
    assert short.prefill_node.startswith("prefill")
    assert short.ttft_s == pytest.approx(H20.prefill_s(9_000))
    assert short.transfer_s == short.crossing_bytes == 0
    busy_s = {"remote": H200.prefill_s(40_000), "prefill": H20.prefill_s(9_000)}
    for name, expected_s in busy_s.items():
        shares = [s for node_id, s in result.prefill_utilisation.items() if name in node_id]
        assert sum(shares) * result.duration_s == pytest.approx(expected_s)
    slots = sum(result.decode_utilisation.values()) * 20 * result.duration_s
    assert slots == pytest.approx(2 * 100 * 0.025)


def test_bytes_are_backlog_until_they_have_landed():
    world = scenario(PRFAAS_PD[0], link=SimulatedLink(schedule=((0.0, 10e9),), rtt_s=0.1))
    machine = simulator(world)
    simulation = machine.begin([one(40_000)])
    backlog = {}
    while simulation.step():
        for flight in simulation.gateway.flights.values():
            backlog.setdefault(flight.place, set()).add(machine._ledger.link_backlog_bytes())
    num_bytes = SPEC.kv_bytes(40_000)
    assert backlog == {
        Place.PREFILLING: {num_bytes},
        Place.TRANSFER: {num_bytes},
        Place.DECODING: {0},
    }


@pytest.mark.parametrize("bps", [100e9, 1e9])
def test_pipelined_rows_overlap_the_prefill(bps):
    link = SimulatedLink(schedule=((0.0, bps),), rtt_s=0.03, setup_s=0.01, pipelined=True)
    world = scenario(PRFAAS_PD[0], link=link)
    (record,) = simulator(world).run([one(40_000)]).records()
    prefill_s, num_bytes = H200.prefill_s(40_000), SPEC.kv_bytes(40_000)
    states = SPEC.kv_bytes_delta(40_000, 40_000)
    tail = states + (num_bytes - states) / 15
    expected = max(prefill_s, 8 * (num_bytes - tail) / bps) + 8 * tail / bps + 0.04
    assert record.ttft_s == pytest.approx(expected)
    assert record.prefill_s == pytest.approx(prefill_s)


def test_equal_seeds_repeat_a_run_exactly():
    world = scenario(
        PRFAAS_PD[0], keep_decisions=True, failures=[Failure(at_s=30.0, node_id="remote0")]
    )

    def run(seed):
        result = simulator(world, seed=seed).run(arrivals(300, 2.5, output_tokens=64))
        return list(map(attrs.astuple, result.records())), result.decisions, result.counters

    assert run(1) == run(1)
    assert run(1)[1] != run(2)[1]
    assert len(run(1)[1]) >= 300


def test_decisions_are_kept_only_on_request():
    assert simulator(scenario(PRFAAS_PD[0])).run([one(40_000)]).decisions == ()


def test_h36_success_failure_and_timeout_leave_no_count_behind():
    crash = Failure(at_s=20.0, node_id="prefill0", for_s=15.0)
    world = scenario(clusters(1, 1, 1), timeout_s=40.0, failures=[crash], max_attempts=1)
    machine = simulator(world)
    ledger = machine._ledger
    result = stepped(machine.begin(arrivals(150, 1.2)))
    endings = Counter(record.ending for record in result.records())
    assert min(endings[e] for e in (Ending.OK, Ending.FAILED, Ending.TIMED_OUT)) > 0
    assert sum(endings.values()) == result.num_accepted == 150
    assert result.num_lost == 0
    assert at_rest(ledger)
    timed_out = [r for r in result.records() if r.ending is Ending.TIMED_OUT]
    assert all(r.ended_s - r.arrived_s == pytest.approx(40.0) for r in timed_out)


def test_h36_retries_after_a_crash_save_every_request():
    crashes = [
        Failure(at_s=20.0, node_id="decode0", for_s=10.0),
        Failure(at_s=25.0, node_id="remote0", for_s=10.0),
        Failure(at_s=30.0, node_id="prefill0", for_s=10.0),
    ]
    machine = simulator(scenario(clusters(2, 2, 2), failures=crashes))
    result = stepped(machine.begin(arrivals(120, 1.0, output_tokens=200)))
    assert result.num_ended(Ending.OK) == 120
    assert result.counters["retries"] > 0
    assert result.counters["nodes_lost"] == 3
    assert at_rest(machine._ledger)
    assert max(record.num_attempts for record in result.records()) == 2


def test_h37_idle_equal_nodes_are_used_evenly():
    nodes = [*(node(f"prefill{i}", Role.PREFILL) for i in range(4)), node("decode", Role.DECODE)]
    world = scenario(nodes, link=None, control_period_s=600.0)
    result = simulator(world).run(
        one(500, at_s=10.0 * i, name=f"r{i}", output_tokens=1) for i in range(400)
    )
    counts = Counter(record.prefill_node for record in result.records())
    assert len(counts) == 4
    assert all(60 <= count <= 140 for count in counts.values())


def test_h37_one_long_prompt_counts_more_than_ten_short_ones():
    nodes = [node("prefill0", Role.PREFILL), node("prefill1", Role.PREFILL), *clusters(0, 0, 1)]
    prompts = [one(100_000, name="long"), *(one(100, name=f"r{i}") for i in range(10))]
    result = simulator(scenario(nodes, link=None)).run(prompts)
    at = {record.request_id: record.prefill_node for record in result.records()}
    assert {at[f"r{i}"] for i in range(10)} == {"prefill0", "prefill1"} - {at["long"]}


def test_a_client_that_gives_up_frees_whatever_place_it_is_in():
    """One request in each place, and nothing of it left behind."""
    nodes = (
        node("prefill0", Role.PREFILL, prefill=lambda new, cached: 10.0),
        node("remote0", Role.PREFILL, prefill=lambda new, cached: 1.0),
        node("decode0", Role.DECODE, num_slots=1),
    )
    link = SimulatedLink(schedule=((0.0, 100e9), (5.0, 0.0)))
    machine = simulator(scenario(nodes, link=link, timeout_s=11.0))
    prompts = [
        one(30_000, name="decoding", output_tokens=10_000),
        one(30_000, name="decode_wait", at_s=1.5, output_tokens=10),
        one(30_000, name="transfer", at_s=6.0),
        one(100, name="prefilling", at_s=6.1),
        one(100, name="queued", at_s=6.2),
    ]
    simulation = machine.begin(prompts)
    while simulation.agenda.now < 10.0:
        simulation.step()
        simulation.check()
    places = {f.arrival.request_id: f.place.value for f in simulation.gateway.flights.values()}
    assert places == {name: name for name in places}
    assert len(places) == 5
    # The decoding one leaves first, and its slot goes to the one that waits.
    result = stepped(simulation)
    endings = {record.request_id: record.ending for record in result.records()}
    assert endings.pop("decode_wait") is Ending.OK
    assert set(endings.values()) == {Ending.TIMED_OUT}
    assert at_rest(machine._ledger)


def test_a_mixed_node_keeps_its_counts_when_clients_give_up():
    """Its prefill side of a request is over once that decodes, or waits for a slot."""
    both = node("both", Role.MIXED, prefill=lambda new, cached: 1.0, num_slots=1)
    prompts = [
        one(10, name="decoding", output_tokens=10_000),
        one(10, name="decode_wait", at_s=0.5, output_tokens=10_000),
        one(10, name="after", at_s=6.0, output_tokens=10),
    ]
    machine = simulator(scenario((both,), link=None, timeout_s=5.0))
    result = stepped(machine.begin(prompts))
    endings = {record.request_id: record.ending for record in result.records()}
    assert endings.pop("after") is Ending.OK
    assert set(endings.values()) == {Ending.TIMED_OUT}
    assert at_rest(machine._ledger)


def test_a_full_node_refuses_and_the_pause_doubles():
    class Stubborn(LeastWork):
        """Sends everything to the same node, full or not, whatever the request asks for."""

        def route(self, request, view, now, rng):
            excluded.append((request.request_id, sorted(request.excluded)))
            return LeastWork.route(self, request, view, now, rng)

    excluded: list[tuple[str, list[str]]] = []
    nodes = (
        node("prefill0", Role.PREFILL, prefill=lambda new, cached: 2.0, max_active=1),
        *clusters(0, 0, 1),
    )
    world = scenario(nodes, link=None, retry_s=0.1, max_retry_s=0.4)
    balancer = Script()
    machine = simulator(world, router=Stubborn(nodes, 10**6), balancer=balancer)
    result = stepped(machine.begin([one(10, name="a"), one(10, name="b")]))
    a, b = sorted(result.records(), key=lambda record: record.request_id)
    assert a.num_attempts == 1
    # Refused at 0, 0.2, 0.6, 1.0, 1.4 and 1.8; the node is free at 2.0.
    assert b.num_attempts == 7
    assert b.queue_s == pytest.approx(2.2)
    assert result.counters["refused"] == 6
    assert balancer.events[Arrived] == 2, "a retry is no arrival"
    assert excluded[:3] == [("a", []), ("b", []), ("b", ["prefill0"])]
    assert at_rest(machine._ledger)


def test_requests_wait_at_the_gateway_until_a_node_comes_back_and_the_rest_is_rejected():
    nodes = (*clusters(0, 1, 1),)
    crash = Failure(at_s=0.5, node_id="decode0", for_s=10.0)
    world = scenario(nodes, link=None, failures=[crash], max_waiting=2)
    balancer = Script()
    machine = simulator(world, balancer=balancer)
    result = stepped(machine.begin(one(10, at_s=1.0 + i, name=f"r{i}") for i in range(4)))
    endings = {record.request_id: record.ending for record in result.records()}
    assert endings == {
        "r0": Ending.OK,
        "r1": Ending.OK,
        "r2": Ending.REJECTED,
        "r3": Ending.REJECTED,
    }
    assert result.num_rejected == 2
    assert result.num_accepted == 2
    served = {r.request_id: r for r in result.records() if r.ending is Ending.OK}
    assert served["r0"].queue_s == pytest.approx(10.5 - 1.0)
    rejected = [r for r in result.records() if r.ending is Ending.REJECTED]
    assert all(math.isnan(r.prefill_s) and r.prefill_node is None for r in rejected)


def test_what_can_never_end_is_reported_as_lost():
    link = SimulatedLink(schedule=((0.0, 0.0),))
    result = simulator(scenario(clusters(1, 0, 1), link=link), 0).run([one(40_000)])
    assert (result.num_accepted, result.num_lost, result.num_unfinished) == (1, 1, 0)


def test_a_run_that_is_cut_off_says_how_many_are_under_way():
    simulation = simulator(scenario(PRFAAS_PD[0])).begin(arrivals(100, 2.0))
    simulation.run(until_s=20.5)
    result = simulation.result()
    assert result.duration_s == 20.5
    assert result.num_unfinished == result.num_accepted - len(result.log) > 0
    assert result.num_lost == 0
    # It can go on as if nothing had been, and time does not go back.
    simulation.run(until_s=10.0)
    assert simulation.agenda.now == 20.5
    simulation.run()
    whole = simulator(scenario(PRFAAS_PD[0])).run(arrivals(100, 2.0))
    assert simulation.result().ttfts_s() == pytest.approx(whole.ttfts_s())
    assert simulation.result().duration_s == pytest.approx(whole.duration_s)


def test_the_balancer_hears_what_a_gateway_tells_it():
    balancer = Script()
    nodes = PRFAAS_PD[0]
    seen = []
    machine = simulator(scenario(nodes), balancer=balancer)
    result = machine.run(arrivals(40, 2.0), on_progress=lambda *a: seen.append(a))
    ticks = len(seen)
    assert [at_s for at_s, _ in seen] == pytest.approx(list(range(1, ticks + 1)))
    assert seen[-1][1] <= 40
    assert balancer.events[NodeUp] == len(nodes)
    assert balancer.events[Arrived] == balancer.events[Served] == 40
    assert balancer.events[LinkRate] == ticks
    assert balancer.events[NodeLoad] == ticks * len(nodes)
    assert machine._ledger.link_bps() == pytest.approx(100e9)
    views = {view.node_id: view for view in machine._ledger.nodes()}
    assert all(views[n].decode_step_s == pytest.approx(0.025) for n in views if "decode" in n)
    assert 5_000 < views["remote0"].prefill_tokens_per_s < 20_000
    assert result.num_ended(Ending.OK) == 40


def test_goodput_counts_what_is_in_time():
    result = simulator(scenario(PRFAAS_PD[0])).run(arrivals(100, 2.0))
    ttfts = sorted(record.ttft_s for record in result.records())
    slo_s = ttfts[49]
    assert result.ttfts_s() == pytest.approx(ttfts)
    assert result.goodput_rps(slo_s) == pytest.approx(50 / result.duration_s)
    assert result.throughput_rps() == pytest.approx(100 / result.duration_s)
    # In a window both count the same endings, so neither warming up nor emptying tells them apart.
    window = (10.0, result.log.times["arrived_s"][-1])
    ended = [record for record in result.records() if window[0] < record.ended_s <= window[1]]
    assert 0 < len(ended) < 90
    length_s = window[1] - window[0]
    assert result.throughput_rps(*window) == pytest.approx(len(ended) / length_s)
    assert result.goodput_rps(ttfts[-1], *window) == result.throughput_rps(*window)
    good = sum(record.ttft_s <= slo_s for record in ended)
    assert result.goodput_rps(slo_s, *window) == pytest.approx(good / length_s)
    assert result.ttft_s(0.0) == pytest.approx(ttfts[0])
    late = result.log.times["arrived_s"][90]
    assert len(result.ttfts_s(from_s=late)) < 100


def test_arrivals_out_of_order_and_doubled_ids_are_refused():
    with pytest.raises(ConfigError, match="sort the arrivals"):
        simulator(scenario(PRFAAS_PD[0])).run([one(10, at_s=5.0), one(10, at_s=4.0, name="s")])
    with pytest.raises(ConfigError, match="ids are unique"):
        simulator(scenario(PRFAAS_PD[0])).run([one(10), one(10)])
    with pytest.raises(ConfigError, match="num_clients"):
        simulator(scenario(PRFAAS_PD[0])).run_closed([one(10)], 0)


def test_an_error_of_a_policy_is_not_hidden():
    class Broken(LeastWork):
        def route(self, request, view, now, rng):
            raise CapacityError("never") if now else ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        simulator(scenario(PRFAAS_PD[0]), router=Broken(PRFAAS_PD[0], 0)).run([one(10)])


def test_a_closed_loop_keeps_its_number_of_requests():
    machine = simulator(scenario(PRFAAS_PD[0]))
    simulation = machine.begin(arrivals(60), num_clients=7)
    under_way = set()
    while simulation.step():
        simulation.check()
        under_way.add(len(simulation.gateway.flights))
    assert max(under_way) == 7
    assert simulation.result().num_ended(Ending.OK) == 60
