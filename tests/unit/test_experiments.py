"""The experiments of benchmarks/: every row builds and runs, and the numbers are what they say."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import attrs
import pytest

from experiment_parts import cache_gain, findings, fractions, goal_rows, goals, ladder, report
from experiment_parts import workloads as w
from experiment_parts.deployments import EQUAL_COST, HETERO, at_split, nodes, optimum
from experiment_parts.goals import Goal
from experiment_parts.measures import Window, egress_series_bps, first_token_s, row_of
from experiment_parts.policies import POLICIES, build
from experiment_parts.runs import Task, execute
from experiment_parts.scenarios import SCENARIOS, Setup, world_of
from prfaas.core import NodeId, Role
from prfaas.simulator import Ending

NUM = 1000
OPTIONS = {"steady": {"load": 0.9}, "trace": {"path": None, "load": 0.7, "num_requests": NUM}}


def setup_of(scenario: str, name: str) -> Setup:
    return SCENARIOS[scenario](POLICIES[name], **OPTIONS.get(scenario, {}))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_policy_builds_and_runs_in_every_scenario(scenario: str) -> None:
    for name, policy in POLICIES.items():
        outcome = execute(policy, setup_of(scenario, name), until_s=12.0)
        assert outcome.result.num_lost == 0
        assert outcome.result.duration_s > 10
        assert outcome.samples[-1].at_s > 10
        assert outcome.setup.world.timeout_s is not None
        assert outcome.setup.world.max_waiting is not None


def test_the_ladder_has_every_policy_in_every_scenario() -> None:
    found = {(task.scenario, task.policy) for task in ladder.tasks(None)}
    pairs = {(s, p) for s in SCENARIOS for p in POLICIES}
    assert pairs - found == {("link drop", p) for p in POLICIES if p.startswith("homogeneous")}


def test_all_hardware_is_compared_at_equal_count_or_cost() -> None:
    homogeneous, hetero = POLICIES["homogeneous"].hardware, POLICIES["adaptive"].hardware
    assert homogeneous.num_local == hetero.num_local + hetero.num_remote
    assert POLICIES["homogeneous_cost"].hardware.price == hetero.price == 16


def test_each_policy_is_what_its_name_says() -> None:
    def t_of(name: str) -> int:
        setup = setup_of("steady", name)
        parts = build(
            POLICIES[name],
            setup.world,
            setup.planned,
            lengths=setup.lengths,
            output_tokens=setup.output_tokens,
        )
        return parts.controller.threshold_tokens

    assert t_of("naive") == 0
    assert t_of("fixed") == 19_400
    assert t_of("static") == optimum(HETERO).threshold_tokens
    assert t_of("homogeneous") > 131_072
    roles = [node.role for node in setup_of("steady", "homogeneous_cost").world.nodes]
    assert roles.count(Role.PREFILL) == optimum(EQUAL_COST).num_prefill == 12


def test_the_limits_are_those_of_the_capacity_model_in_expectation_form() -> None:
    assert optimum(HETERO).num_prefill == 3
    assert optimum(HETERO).limit_rps == pytest.approx(3.174, abs=0.01)
    assert at_split(HETERO, 0).limit_rps == pytest.approx(2.371, abs=0.01)
    references = goals.link_references()
    assert references["t only, mean"] == pytest.approx(goals.T_ONLY_RPS, abs=0.01)
    assert references["full, mean"] == pytest.approx(goals.FULL_RPS, abs=0.02)
    assert references["full, expectation"] < references["full, mean"]


def test_a_row_counts_what_the_records_say() -> None:
    policy = POLICIES["max_weight"]
    window = Window(from_s=20.0, until_s=80.0)
    setup = Setup(
        world=world_of(HETERO, 5),  # too few decode nodes, so that slots are waited for
        arrivals=w.steady(3.1, 100.0, 3),
        window=window,
        planned=optimum(HETERO),
    )
    result = execute(policy, setup).result
    row = row_of(result, policy.hardware, window, None)
    inside = [r for r in result.records() if 20 <= r.arrived_s < 80 and r.ending is Ending.OK]
    waits = [r.queue_s + r.prefill_s + r.transfer_s + r.decode_wait_s for r in inside]
    good = sum(wait_s <= 10 for wait_s in waits)
    assert 0 < good < len(inside) == row["num_served"]
    assert max(r.decode_wait_s for r in inside) > 1
    assert row["goodput_10s_rps"] == pytest.approx(good / 60)
    assert row["cost_10s"] == pytest.approx(1000 * 16 * (60 / 3600) / good)
    assert row["ttft_mean_s"] == pytest.approx(sum(waits) / len(waits))
    assert row["ttft_p90_s"] == sorted(waits)[int(0.9 * len(waits))]
    ended = [r for r in result.records() if r.ending is Ending.OK and 20 < r.ended_s <= 80]
    assert row["throughput_rps"] == pytest.approx(len(ended) / 60)
    assert all(first_token_s(r) == r.ttft_s + r.decode_wait_s for r in inside)
    whole = Window(from_s=0.0, until_s=result.duration_s)
    bits = sum(egress_series_bps(result, whole)) * 10
    assert bits == pytest.approx(8 * sum(r.crossing_bytes for r in result.records()), rel=1e-9)
    assert bits > 0


def test_even_prompts_have_the_mean_of_the_law() -> None:
    prompts = list(islice(w.even_prompts(1), 256))
    mean = sum(a.num_tokens for a in prompts) / len(prompts)
    law = w.LENGTHS.mean_above(0)
    assert law is not None
    assert mean == pytest.approx(law, rel=0.02)
    assert [a.num_tokens for a in islice(w.even_prompts(1), 9)] == [
        a.num_tokens for a in prompts[:9]
    ]
    gaps = [b.arrived_s - a.arrived_s for a, b in pairwise(w.evenly(2.0, 10.0))]
    assert gaps == pytest.approx([0.5] * 19)


def test_the_day_goes_from_half_to_double() -> None:
    factors = [w.length_factor(at_s, 100.0) for at_s in range(101)]
    assert max(factors) == pytest.approx(2)
    assert min(factors) == pytest.approx(0.5)
    assert factors[0] == pytest.approx(factors[-1])


def test_synthetic_conversations_are_near_the_trace() -> None:
    trace = w.synthetic_trace()
    assert trace.mean_tokens == pytest.approx(12_800, rel=0.15)
    assert trace.mean_output_tokens == pytest.approx(347, rel=0.15)
    assert trace.prefix_hit_share == pytest.approx(0.37, abs=0.05)
    assert "synthetic" in trace.name


def test_the_step_changes_the_outputs_and_nothing_else() -> None:
    changed = list(islice(goals.stepped_prompts(5, 512), 9))
    plain = list(islice(w.even_prompts(2), 9))
    assert [a.num_tokens for a in changed] == [a.num_tokens for a in plain]
    assert [a.output_tokens for a in changed] == [1024] * 5 + [512] * 4
    assert len({a.request_id for a in changed}) == 9


def test_a_shared_node_keeps_its_promise_per_token() -> None:
    assert not fractions.shared_splits(HETERO, 1.0)
    for base_share in (0.0, 0.5):
        for split in fractions.shared_splits(HETERO, base_share):
            step_s = fractions.step_time(base_share)(split.num_slots)
            assert 0.30 + split.rounds * step_s <= split.rounds * fractions.STEP_S + 1e-9
    assert fractions.step_time(0.5)(20) == pytest.approx(fractions.STEP_S)
    assert fractions.step_time(0.5)(10) == pytest.approx(0.75 * fractions.STEP_S)
    shared = nodes(HETERO, 3, shared=(NodeId("local3"), 8))
    assert [(n.node_id, n.num_slots) for n in shared if n.role is Role.MIXED] == [("local3", 8)]


def test_every_job_of_a_goal_names_a_run() -> None:
    jobs = goal_rows.jobs()
    assert {job.kind for job in jobs} == set(goal_rows.KINDS)
    assert len({(job.kind, job.label) for job in jobs}) == len(jobs)
    tiny = Window(from_s=5.0, until_s=10.0)
    outcome = fractions.whole(HETERO, 3, tiny)
    assert goals.conversions_per_200(outcome) == 0
    split = fractions.shared_splits(HETERO, 0.5)[0]
    assert fractions.shared(HETERO, split, tiny, 0.5).result.node_roles[NodeId("local2")] is (
        Role.MIXED
    )


def test_the_best_arm_is_the_one_with_most_goodput() -> None:
    task = Task(scenario="trace", policy="fixed", options={"num_prefill": 4, "rate_rps": 7.0})
    other = attrs.evolve(task, options={"num_prefill": 5, "rate_rps": 7.0})
    paper, aware = cache_gain.PAPER, "max-weight"
    arms = [(paper, task), (paper, other), (aware, task), (aware, other)]
    rows = [{"goodput_10s_rps": value} for value in (4.0, 5.0, 6.0, 3.0)]
    best = cache_gain.best_of(arms, rows)
    assert (best[paper].goodput_rps, best[paper].num_prefill) == (5.0, 5)
    assert cache_gain.gain(best) == pytest.approx(1.2)
    assert cache_gain.gain(cache_gain.best_of(arms, rows, num_prefill=4)) == pytest.approx(1.5)
    grid = cache_gain.tasks(None, cache_gain.QUICK)
    assert {arm for arm, _ in grid} == set(cache_gain.ARMS)
    ts = {task.changes.get("threshold") for arm, task in grid if arm == paper}
    assert len(ts) == len(cache_gain.QUICK.t_shares)


def test_goals_and_cells() -> None:
    assert Goal(name="a", value=0.96, goal=0.95).is_met
    assert not Goal(name="a", value=1.2, goal=1.0, at_most=True).is_met
    text = report.table(("x", "y"), [(1.234, math.nan), (math.inf, None), (123.4, 7)])
    assert text.splitlines()[2:] == ["| 1.23 | - |", "| none | - |", "| 123 | 7 |"]
    empty = findings.Findings(
        trace_name="t", ladder=[{"lost": 1}], noise=[], goal_rows=[], arms=[], cache_rows=[]
    )
    assert empty.num_lost == 1
