"""What the balancer measures: arrivals, lengths, endings, node loads."""

from __future__ import annotations

import math

import pytest

from prfaas.core import ClusterKind, NodeId, Role
from prfaas.policy.demand import Demand, MeasuredDemand
from prfaas.policy.node_loads import NodeLoads
from prfaas.seams import NodeLoad, Served

A, B = NodeId("a"), NodeId("b")


def make_demand(**changes: object) -> Demand:
    arguments: dict[str, object] = {
        "window_s": 30.0,
        "max_window_s": 90.0,
        "window_arrivals": 10,
        "output_tokens": 100.0,
        "decode_step_s": None,
    }
    return Demand(**(arguments | changes))  # type: ignore[arg-type]


def fill(demand: Demand, num_periods: int, per_period: int, tokens: int = 1000) -> float:
    now = 0.0
    for i in range(num_periods):
        demand.start_period(10.0 * i)
        for k in range(per_period):
            now = 10.0 * i + 10 * k / per_period
            demand.arrived(tokens, now)
    return 10.0 * num_periods


def test_the_rate_is_that_of_the_newest_window() -> None:
    demand = make_demand()
    now = fill(demand, 4, 5)
    for i in range(3):
        demand.start_period(now + 10 * i)
        for _ in range(20):
            demand.arrived(500, now + 10 * i)
    found = demand.measure(now + 30)
    assert (found.num_arrivals, found.arrival_rps) == (60, 2.0)
    assert found.weights == {500: 1.0}
    assert "80 arrivals" in repr(demand)


def test_a_thin_window_grows_up_to_its_limit() -> None:
    demand = make_demand()
    now = fill(demand, 6, 2)
    assert demand.measure(now).num_arrivals == 10
    demand = make_demand(window_arrivals=1000)
    now = fill(demand, 20, 2)
    assert demand.measure(now).num_arrivals == 20
    assert demand.measure(now).arrival_rps == pytest.approx(0.2)


def test_nothing_arrived_is_a_rate_of_0() -> None:
    demand = make_demand()
    assert demand.measure(0.0).arrival_rps == 0
    demand.start_period(0.0)
    found = demand.measure(10.0)
    assert (found.num_arrivals, found.arrival_rps, dict(found.weights)) == (0, 0.0, {})
    assert found.mean_tokens == 0
    assert demand.last_arrival_s is None


def test_similar_lengths_count_as_their_mean() -> None:
    demand = make_demand()
    for tokens in (10_000, 10_010, 40_000, 0):
        demand.arrived(tokens, 1.0)
    found = demand.measure(10.0)
    assert found.weights == {10_005: 0.5, 40_000: 0.25, 1: 0.25}
    assert found.mean_tokens == pytest.approx(15_002.75)
    assert demand.last_arrival_s == 1.0


def test_every_length_is_kept_within_the_width_of_a_bucket() -> None:
    for tokens in range(1, 140_000, 997):
        demand = make_demand()
        demand.arrived(tokens, 0.0)
        assert demand.measure(1.0).weights == {tokens: 1.0}
        demand.arrived(round(tokens * 1.05) + 1, 0.0)
        assert len(demand.measure(1.0).weights) == 2


def test_outputs_start_at_the_prior_and_forget_it() -> None:
    demand = make_demand()
    assert demand.measure(0.0).output_tokens == 100
    for _ in range(4):
        demand.served(Served(output_tokens=500, step_s=0.02), 0.0)
    assert demand.measure(1.0).output_tokens == 300
    for _ in range(4):
        demand.served(Served(output_tokens=500, step_s=0.02), 0.0)
    assert demand.measure(1.0).output_tokens == 500


def test_steps_are_weighted_by_tokens_and_never_below_the_full_batch() -> None:
    demand = make_demand()
    assert demand.measure(0.0).step_s is None
    demand.served(Served(output_tokens=300, step_s=0.02), 0.0)
    demand.served(Served(output_tokens=100, step_s=0.04), 0.0)
    assert demand.measure(1.0).step_s == pytest.approx(0.025)
    demand = make_demand(decode_step_s=0.03)
    assert demand.measure(0.0).step_s == 0.03
    demand.served(Served(output_tokens=10, step_s=0.02), 0.0)
    assert demand.measure(1.0).step_s == 0.03
    demand.served(Served(output_tokens=1000, step_s=0.05), 0.0)
    assert demand.measure(1.0).step_s == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf])
def test_endings_without_a_measured_step_do_not_count(step_s: float) -> None:
    demand = make_demand()
    demand.served(Served(output_tokens=900, step_s=step_s), 0.0)
    demand.served(Served(output_tokens=0, step_s=0.1), 0.0)
    assert demand.measure(1.0).output_tokens == 100


def remote_s(num_tokens: int) -> float:
    return num_tokens / 10_000


def local_s(num_tokens: int) -> float:
    return num_tokens / 4_000


def measured(remote_busy_s: float, local_busy_s: float) -> MeasuredDemand:
    """60 requests of 2,000 and 40 of 20,000 tokens: 120,000 and 800,000 tokens."""
    return MeasuredDemand(
        num_arrivals=100,
        arrival_rps=1.0,
        weights={2_000: 0.6, 20_000: 0.4},
        output_tokens=100,
        step_s=0.02,
        prefill_busy_s={ClusterKind.PRFAAS: remote_busy_s, ClusterKind.PD: local_busy_s},
    )


def test_given_profiles_are_taken_as_they_are() -> None:
    assert measured(1.0, 1.0).prefill_s(remote_s, local_s) == (remote_s, local_s)


def test_a_missing_profile_is_the_busy_time_per_token_of_what_the_known_side_left() -> None:
    # The long ones took 80 s of remote time, so the short ones took 30 s of local time.
    prices = measured(80.0, 30.0).prefill_s(remote_s, None)
    assert prices is not None
    assert prices[1](4_000) == pytest.approx(1.0)
    prices = measured(80.0, 30.0).prefill_s(None, local_s)
    assert prices is not None
    assert prices[0](10_000) == pytest.approx(1.0)
    # Half of the long ones went remote.
    prices = measured(40.0, 130.0).prefill_s(remote_s, None)
    assert prices is not None
    assert prices[1](4_000) == pytest.approx(1.0)


def test_without_any_profile_nodes_are_equally_fast() -> None:
    prices = measured(80.0, 12.0).prefill_s(None, None)
    assert prices is not None
    assert prices[0](10_000) == pytest.approx(1.0)
    assert prices[1](10_000) == pytest.approx(1.0)
    assert measured(0.0, 0.0).prefill_s(None, None) is None


def test_what_still_waits_was_not_computed() -> None:
    demand = make_demand()
    demand.start_period(0.0, queued_tokens=500)
    for _ in range(10):
        demand.arrived(1_000, 0.0)
    demand.busy(ClusterKind.PD, 4.0, 1.0)
    demand.busy(ClusterKind.PRFAAS, 2.0, 1.0)
    found = demand.measure(10.0, queued_tokens=4_500)
    assert found.backlog_tokens == 4_000
    prices = found.prefill_s(None, None)
    assert prices is not None
    assert prices[0](1_000) == pytest.approx(1.0)


def test_a_side_that_did_nothing_is_as_fast_as_the_known_one() -> None:
    assert measured(80.0, 0.0).prefill_s(remote_s, None) == (remote_s, remote_s)
    assert measured(0.0, 30.0).prefill_s(None, local_s) == (local_s, local_s)


def sample(node_id: NodeId, busy: float, *, queued: int = 0, waiting: int = 0) -> NodeLoad:
    return NodeLoad(
        node_id=node_id,
        epoch=1,
        prefill_busy=busy,
        decode_busy=busy / 2,
        queued_tokens=queued,
        num_waiting=waiting,
    )


def test_H41_cold_samples_do_not_count() -> None:
    loads = NodeLoads(2)
    loads.begin(A, 0.0)
    assert loads.observe(sample(A, 1.0, queued=9), 10.0) is None
    assert loads.observe(sample(A, 1.0, queued=9), 20.0) is None
    assert loads.prefill_busy([A]) is None
    assert loads.queued_tokens([A]) == 0
    assert loads.observe(sample(A, 0.4), 30.0) == pytest.approx(4.0)
    assert loads.prefill_busy([A]) == 0.4
    assert loads.decode_busy([A]) == 0.2
    loads.begin(A, 35.0)
    assert loads.observe(sample(A, 1.0), 40.0) is None


def test_loads_are_smoothed_and_averaged_over_what_was_measured() -> None:
    loads = NodeLoads(0)
    loads.begin(A, 0.0)
    loads.begin(B, 0.0)
    loads.observe(sample(A, 1.0, queued=5, waiting=2), 10.0)
    assert loads.prefill_busy([A, B, NodeId("stranger")]) == 1.0
    loads.observe(sample(A, 0.0, queued=3, waiting=1), 20.0)
    assert loads.prefill_busy([A]) == pytest.approx(0.7)
    assert (loads.queued_tokens([A, B]), loads.num_waiting([A, B])) == (3, 1)
    assert "2 nodes" in repr(loads)
    loads.forget(A)
    assert loads.prefill_busy([A]) is None


def test_strangers_and_junk_do_not_count() -> None:
    loads = NodeLoads(0)
    assert loads.observe(sample(A, 0.5), 1.0) is None
    loads.begin(A, 0.0)
    assert loads.observe(sample(A, math.nan), 1.0) is None
    assert loads.prefill_busy([A]) is None
    assert loads.observe(sample(A, 7.0), 3.0) == pytest.approx(2.0)
    assert loads.prefill_busy([A]) == 1.0


def test_the_least_loaded_has_the_shortest_queue_then_the_idlest_then_the_first_name() -> None:
    loads = NodeLoads(0)
    names = [NodeId(n) for n in "edcba"]
    for node_id in names:
        loads.begin(node_id, 0.0)
    loads.observe(sample(NodeId("a"), 0.1, queued=10, waiting=0), 1.0)
    loads.observe(sample(NodeId("b"), 0.9, queued=0, waiting=3), 1.0)
    loads.observe(sample(NodeId("c"), 0.2, queued=0, waiting=3), 1.0)
    assert loads.least_loaded(names, Role.PREFILL) == ["d", "e", "c", "b", "a"]
    assert loads.least_loaded(names, Role.DECODE) == ["d", "e", "a", "c", "b"]
