"""The planner on the case study of arXiv 2604.15039 and on what goes beyond it."""

from __future__ import annotations

import itertools
import math

import attrs
import pytest

from prfaas.capacity import (
    Deployment,
    EmpiricalLengths,
    Objective,
    PlanningCluster,
    PlanningProblem,
    PrefillProfile,
    RateForm,
    Stage,
    System,
    best_split,
    plan_deployment,
)
from prfaas.capacity.fleet import Fleet, LoadTable
from prfaas.core import ClusterKind
from prfaas.errors import ConfigError
from prfaas.paper.profiles import H20, H200, LENGTHS
from prfaas.spec import preset

FAST = System(name="H200", prefill=H200, num_gpus=8, price_per_hour=2.0)
PLAIN = System(
    name="H20", prefill=H20, num_gpus=8, price_per_hour=1.0, decode_step_s=0.025, batch_size=20
)


def prfaas(cluster_id, num_nodes, system="fast", **fields):
    return PlanningCluster(
        cluster_id=cluster_id,
        kind=ClusterKind.PRFAAS,
        system=system,
        num_nodes=num_nodes,
        **fields,
    )


def pd(cluster_id, num_nodes, system="plain"):
    return PlanningCluster(
        cluster_id=cluster_id, kind=ClusterKind.PD, system=system, num_nodes=num_nodes
    )


PAPER = PlanningProblem(
    model=preset("paper-1t"),
    lengths=LENGTHS,
    output_tokens=1024,
    systems={"fast": FAST, "plain": PLAIN},
    clusters=[prfaas("far", 4), pd("near", 8)],
    egress_bps=100e9,
)
PAPER_PLAN = plan_deployment(PAPER)


def percent(expected, tolerance=1.0):
    return pytest.approx(expected, rel=tolerance / 100)


def plan(**change):
    return plan_deployment(attrs.evolve(PAPER, **change))


def fleet(**change):
    problem = attrs.evolve(PAPER, **change)
    table = LoadTable(problem.model, problem.lengths)
    return Fleet(problem=problem, form=RateForm.MEAN, table=table)


def max_rate(**change):
    """The optimum in the mean form without the rest of a plan."""
    return fleet(**change).best_rate()


def baselines(form_plan):
    return {baseline.name: baseline for baseline in form_plan.baselines}


@pytest.mark.parametrize("form", RateForm)
def test_the_case_study_agrees_with_the_single_cluster_model(form):
    deployment = Deployment(
        model=PAPER.model,
        remote_profile=H200,
        local_profile=H20,
        num_prfaas=4,
        num_prefill=4,
        num_decode=4,
        egress_bps=100e9,
        batch_size=20,
        decode_step_s=0.025,
        output_tokens=1024,
    )
    split, point = best_split(deployment, LENGTHS, form)
    answer = PAPER_PLAN.of(form)
    best = answer.best
    assert answer.form is form
    assert (best.num_prfaas, best.num_prefill, best.num_decode) == (4, 3, 5)
    assert split.num_prefill == best.num_prefill
    assert best.threshold_tokens == percent(point.threshold_tokens, 0.001)
    assert best.requests_per_s == percent(point.max_rate.requests_per_s, 0.001)
    assert best.prfaas_rps == percent(point.rates.prfaas_rps, 0.001)
    assert best.prefill_rps == percent(point.rates.prefill_rps, 0.001)
    assert best.decode_rps == percent(point.rates.decode_rps, 0.001)
    assert best.egress_bps == percent(point.max_rate.egress_bps, 0.001)
    assert best.offload_fraction == percent(point.rates.offload_fraction, 0.001)


def test_table_6_by_the_planner():
    answer = PAPER_PLAN.mean
    assert answer.best.requests_per_s == percent(3.226, 0.02)
    assert answer.fractional.requests_per_s == percent(3.386, 0.02)
    assert 3.65 <= answer.fractional.num_prefill <= 3.7
    others = baselines(answer)
    assert others["homogeneous, equal GPUs"].plan.requests_per_s == percent(2.110, 0.02)
    assert others["homogeneous, equal GPUs"].ratio == percent(1.54)
    assert others["naive heterogeneous"].plan.requests_per_s == percent(2.452, 0.02)
    assert others["naive heterogeneous"].ratio == percent(1.32)
    assert others["naive heterogeneous"].plan.binding is Stage.PRFAAS_COMPUTE
    assert others["homogeneous, equal cost"].ratio == percent(1.15)
    truth = PAPER_PLAN.expectation
    assert truth.best.requests_per_s == percent(3.1743, 0.02)
    assert truth.fractional.requests_per_s == percent(3.340, 0.3)
    assert baselines(truth)["homogeneous, equal GPUs"].plan.requests_per_s == percent(2.026, 0.05)
    assert baselines(truth)["naive heterogeneous"].plan.requests_per_s == percent(2.371, 0.05)


def test_the_service_times_of_table_6():
    others = baselines(PAPER_PLAN.mean)
    for operating, mean_s, p90_s in (
        (PAPER_PLAN.mean.best, 2.22, 3.51),
        (others["homogeneous, equal GPUs"].plan, 4.44, 9.73),
        (others["naive heterogeneous"].plan, 1.74, 3.51),
    ):
        assert operating.mean_ttft_s == percent(mean_s)
        assert operating.p90_ttft_s == percent(p90_s, 0.5)


def test_a_round_trip_counts_once_for_remote_requests_only():
    far = plan(rtt_s=0.5)
    best = far.mean.best
    assert best.requests_per_s == PAPER_PLAN.mean.best.requests_per_s
    p = best.offload_fraction
    assert best.mean_ttft_s == pytest.approx(PAPER_PLAN.mean.best.mean_ttft_s + 0.5 * p)
    assert best.p90_ttft_s == pytest.approx(PAPER_PLAN.mean.best.p90_ttft_s + 0.5)
    homogeneous = baselines(far.mean)["homogeneous, equal GPUs"].plan
    assert homogeneous.mean_ttft_s == pytest.approx(4.4415, abs=1e-3)


def test_what_the_homogeneous_baselines_are():
    others = baselines(PAPER_PLAN.mean)
    equal = others["homogeneous, equal GPUs"].plan
    assert (equal.num_prfaas, equal.num_prefill, equal.num_decode) == (0, 9, 3)
    assert equal.threshold_tokens is None
    assert (equal.offload_fraction, equal.egress_bps, equal.prfaas_rps) == (0, 0, None)
    assert equal.binding is Stage.PREFILL
    paid = others["homogeneous, equal cost"].plan
    assert (paid.num_prefill, paid.num_decode) == (12, 4)
    assert paid.cost_per_hour == PAPER_PLAN.mean.best.cost_per_hour == 16
    odd = attrs.evolve(FAST, price_per_hour=2.1)
    paid = baselines(plan(systems={"fast": odd, "plain": PLAIN}).mean)["homogeneous, equal cost"]
    assert paid.plan.num_prefill + paid.plan.num_decode == pytest.approx(16.4)
    assert paid.plan.num_prefill == 12


def test_gpus_that_make_no_whole_instance_are_left_over():
    small = attrs.evolve(FAST, num_gpus=7)  # 28 + 64 GPUs are 11.5 instances of 8
    equal = baselines(plan(systems={"fast": small, "plain": PLAIN}).mean)[
        "homogeneous, equal GPUs"
    ].plan
    assert equal.num_prefill + equal.num_decode == 11


def test_without_prices_there_is_no_cost():
    free = attrs.evolve(FAST, price_per_hour=None)
    answer = plan(systems={"fast": free, "plain": PLAIN}).mean
    assert answer.best.cost_per_hour is None
    assert answer.best.requests_per_price is None
    assert set(baselines(answer)) == {"homogeneous, equal GPUs", "naive heterogeneous"}


def test_cost_and_rate_per_price():
    best = PAPER_PLAN.mean.best
    assert best.cost_per_hour == 4 * 2 + 8
    assert best.requests_per_price == pytest.approx(best.requests_per_s * 3600 / 16)


def test_how_full_every_stage_is():
    best = PAPER_PLAN.mean.best
    used = {(use.cluster_id, use.stage): use for use in best.stages}
    assert used["far", Stage.PRFAAS_COMPUTE].utilisation == pytest.approx(1, abs=1e-6)
    assert used["near", Stage.PREFILL].utilisation == pytest.approx(1, abs=1e-6)
    assert used["near", Stage.DECODE].utilisation == percent(3.226 / 3.906, 0.02)
    egress = used["far", Stage.EGRESS]
    assert egress.utilisation == pytest.approx(best.egress_bps / 100e9)
    assert egress.capacity_rps == pytest.approx(
        100e9 * best.requests_per_s * best.offload_fraction / best.egress_bps
    )
    assert used["near", Stage.PREFILL].capacity_rps == pytest.approx(best.prefill_rps)
    naive = baselines(PAPER_PLAN.mean)["naive heterogeneous"].plan
    idle = next(use for use in naive.stages if use.stage is Stage.PREFILL)
    assert (idle.capacity_rps, idle.utilisation) == (None, 0)


@pytest.mark.parametrize(
    ("gbps", "best", "num_prefill", "binding"),
    [(2, 1.62, 5, Stage.EGRESS), (10, 3.04, 4, Stage.EGRESS)],
)
def test_a_thin_link_binds(gbps, best, num_prefill, binding):
    whole = plan(egress_bps=gbps * 1e9).mean
    assert baselines(whole)["naive heterogeneous"].plan.binding is binding
    answer = whole.best
    assert answer.requests_per_s == pytest.approx(best, abs=0.005)
    assert answer.num_prefill == num_prefill
    full = {use.stage for use in answer.stages if use.utilisation > 1 - 1e-4}
    assert full == {binding, Stage.PREFILL}
    shared = plan(egress_bps=2 * gbps * 1e9, egress_share_of_others=0.5).mean.best
    assert shared.requests_per_s == answer.requests_per_s
    assert shared.mean_ttft_s == answer.mean_ttft_s
    own = plan(clusters=[prfaas("far", 4, egress_bps=gbps * 1e9), pd("near", 8)]).mean.best
    assert own.requests_per_s == answer.requests_per_s


def test_decode_can_bind():
    slow = attrs.evolve(PLAIN, decode_step_s=0.5)
    best = plan(systems={"fast": FAST, "plain": slow}).mean.best
    assert best.binding is Stage.DECODE
    full = {use.stage for use in best.stages if use.utilisation > 1 - 1e-6}
    assert full == {Stage.DECODE}
    assert best.offload_fraction == 1  # all eight decode


def test_where_decode_binds_the_threshold_leaves_most_headroom():
    slow = fleet(systems={"fast": FAST, "plain": attrs.evolve(PLAIN, decode_step_s=0.5)})
    threshold = slow.best_threshold((3,))
    ((prefill_rps, decode_rps),) = slow.local_limits(threshold, (3,))
    assert slow.rate(threshold, (3,)) == decode_rps
    assert slow.remote_rps(threshold) == percent(prefill_rps, 0.002)
    assert threshold == percent(PAPER_PLAN.mean.best.threshold_tokens, 0.001)


def test_the_threshold_with_most_headroom_yields_to_the_fastest():
    """Two clusters at a given split: one bound by decode, the other by prefill."""
    both = fleet(clusters=[prfaas("far", 4), pd("one", 2), pd("two", 4)])
    split = (1, 1)
    scanned = max(both.rate(float(t), split) for t in range(5_000, 60_000, 50))
    assert both.rate(both.best_threshold(split), split) >= scanned
    roomiest = max(
        range(5_000, 60_000, 50),
        key=lambda t: min(both.remote_rps(t), sum(p for p, _ in both.local_limits(t, split))),
    )
    assert both.rate(float(roomiest), split) < 0.99 * scanned


def test_two_prfaas_clusters_of_one_system_are_one_larger_cluster():
    halves = plan(clusters=[prfaas("east", 1), prfaas("west", 3), pd("near", 8)])
    best, whole = halves.expectation.best, PAPER_PLAN.expectation.best
    assert best.requests_per_s == percent(whole.requests_per_s, 1e-6)
    assert best.threshold_tokens == percent(whole.threshold_tokens, 1e-5)
    assert best.mean_ttft_s == percent(whole.mean_ttft_s, 1e-5)
    assert best.p90_ttft_s == percent(whole.p90_ttft_s, 1e-5)
    east, west, near = best.clusters
    assert west.requests_per_s == pytest.approx(3 * east.requests_per_s)
    remote = best.requests_per_s * best.offload_fraction
    assert east.requests_per_s + west.requests_per_s == pytest.approx(remote)
    assert near.requests_per_s == best.requests_per_s


def test_rates_of_different_prfaas_systems_add_up():
    twice = System(
        name="twice",
        prefill=PrefillProfile(tuple((n, s / 2) for n, s in H200.knots)),
        num_gpus=8,
        price_per_hour=4,
    )
    mixed = plan(
        systems={"fast": FAST, "plain": PLAIN, "twice": twice},
        clusters=[prfaas("far", 2), prfaas("new", 1, "twice"), pd("near", 8)],
    )
    assert mixed.mean.best.requests_per_s == percent(PAPER_PLAN.mean.best.requests_per_s, 1e-6)


def test_each_prfaas_cluster_is_bound_by_its_own_egress():
    best = plan(
        clusters=[prfaas("thin", 4, egress_bps=1e9), prfaas("wide", 4), pd("near", 8)]
    ).mean.best
    used = {(use.cluster_id, use.stage): use.utilisation for use in best.stages}
    assert used["thin", Stage.EGRESS] > 0.999 > used["thin", Stage.PRFAAS_COMPUTE]
    assert used["wide", Stage.PRFAAS_COMPUTE] > 0.999 > used["wide", Stage.EGRESS]


@pytest.mark.parametrize("own_gbps", [None, 2])
def test_prfaas_clusters_share_one_egress(own_gbps):
    """Two halves of a cluster carry what the whole one does, over the same link."""
    own_bps = own_gbps and own_gbps * 1e9
    halves = [prfaas("far", 2, egress_bps=own_bps), prfaas("off", 2, egress_bps=own_bps)]
    for gbps in (3, 100):
        whole = plan(
            egress_bps=gbps * 1e9,
            clusters=[
                prfaas("far", 4, egress_bps=own_bps and min(2 * own_bps, gbps * 1e9)),
                pd("near", 8),
            ],
        ).mean.best
        split = plan(egress_bps=gbps * 1e9, clusters=[*halves, pd("near", 8)]).mean.best
        assert split.requests_per_s == percent(whole.requests_per_s, 1e-4)
        assert split.egress_bps <= gbps * 1e9 * (1 + 1e-6)
        assert split.binding is whole.binding
    if own_gbps is None:
        thin = plan(egress_bps=3e9, clusters=[*halves, pd("near", 8)]).mean.best
        used = [use.utilisation for use in thin.stages if use.stage is Stage.EGRESS]
        assert used == [percent(1, 0.01), percent(1, 0.01)]


def test_two_pd_clusters_are_split_each_on_its_own():
    """Against every split of both clusters, each with a scan over the threshold."""
    slower = System(
        name="slower",
        prefill=PrefillProfile(tuple((n, 1.5 * s) for n, s in H20.knots)),
        num_gpus=8,
        decode_step_s=0.020,
        batch_size=20,
    )
    lengths = EmpiricalLengths(tuple(round(LENGTHS.quantile((i + 0.5) / 60)) for i in range(60)))
    problem = attrs.evolve(
        PAPER,
        lengths=lengths,
        systems={"fast": FAST, "plain": PLAIN, "slower": slower},
        clusters=[prfaas("far", 4), pd("one", 5), pd("two", 4, "slower")],
    )
    best = plan_deployment(problem).expectation.best

    def local_rps(threshold, system, num_prefill, num_nodes):
        seconds = lengths.cumulative(system.prefill.prefill_s)(threshold)
        prefill = num_prefill / seconds if seconds else math.inf
        return min(prefill, (num_nodes - num_prefill) * system.decode_rps(1024))

    remote_s = lengths.cumulative(H200.prefill_s)
    slow = 0.0
    for threshold in (0, *lengths.lengths):
        left_s = remote_s(math.inf) - remote_s(threshold)
        remote = 4 / left_s if left_s > 1e-9 else math.inf
        for one, two in itertools.product(range(6), range(5)):
            local = local_rps(threshold, PLAIN, one, 5) + local_rps(threshold, slower, two, 4)
            slow = max(slow, min(remote, local))
    assert best.requests_per_s == percent(slow, 1e-6)
    assert [cluster.system for cluster in best.clusters] == ["fast", "plain", "slower"]
    assert sum(cluster.requests_per_s for cluster in best.clusters[1:]) == pytest.approx(slow)


def test_a_request_stays_in_its_pd_cluster():
    """A lone instance cannot lend its decode to the prefill of another cluster."""
    together = plan(clusters=[prfaas("far", 0), pd("all", 2)]).mean.best
    apart = plan(clusters=[pd("one", 1), pd("two", 1)]).mean.best
    assert together.requests_per_s > 0.2
    assert apart.requests_per_s == 0
    alone = baselines(plan(clusters=[prfaas("far", 0), pd("one", 1)]).mean)
    assert set(alone) == {"homogeneous, equal GPUs", "homogeneous, equal cost"}
    assert {baseline.ratio for baseline in alone.values()} == {None}


def test_the_size_of_the_prfaas_cluster_is_chosen():
    most = plan(max_prfaas_nodes=6).mean.best
    assert (most.num_prfaas, most.num_prefill) == (6, 2)
    assert most.requests_per_s == percent(4.23, 0.2)
    fixed = plan(clusters=[prfaas("far", 6), pd("near", 8)]).mean.best
    assert most == fixed
    rates = {num: plan(clusters=[prfaas("far", num), pd("near", 8)]).mean.best for num in range(7)}
    per_price = plan(max_prfaas_nodes=6, objective=Objective.THROUGHPUT_PER_PRICE).mean.best
    assert per_price == max(rates.values(), key=lambda best: best.requests_per_price)
    few_slots = attrs.evolve(PLAIN, decode_step_s=0.2)
    enough = plan(systems={"fast": FAST, "plain": few_slots}, max_prfaas_nodes=9).mean.best
    assert enough.num_prfaas == 2  # they free all 8 others to decode; more would idle


def test_sizes_of_several_prfaas_clusters_are_improved_in_turn():
    best = plan(
        clusters=[prfaas("east", 0), prfaas("west", 5), pd("near", 8)], max_prfaas_nodes=3
    ).mean.best
    assert [cluster.num_prefill for cluster in best.clusters[:2]] == [3, 3]


def test_a_size_chosen_first_is_chosen_again_in_the_light_of_the_others():
    bargain = attrs.evolve(FAST, price_per_hour=0.5)
    best = plan(
        systems={"fast": FAST, "cheap": bargain, "plain": PLAIN},
        clusters=[prfaas("dear", 0), prfaas("cheap", 0, "cheap"), pd("near", 8)],
        max_prfaas_nodes=4,
        objective=Objective.THROUGHPUT_PER_PRICE,
    ).mean.best
    worth = {
        (dear, cheap): max_rate(clusters=[prfaas("far", dear + cheap), pd("near", 8)])
        / (8 + 2 * dear + 0.5 * cheap)
        for dear in range(5)
        for cheap in range(5)
    }
    alone = max(range(5), key=lambda dear: worth[dear, 0])
    chosen = tuple(cluster.num_prefill for cluster in best.clusters[:2])
    assert chosen == max(worth, key=worth.get)
    assert chosen[0] < alone


def test_sensitivity_is_measured_where_the_case_study_stands():
    table = {row.parameter: row for row in PAPER_PLAN.mean.sensitivity}
    assert list(table) == [
        "egress_bps",
        "num_prfaas",
        "remote_prefill_speed",
        "local_prefill_speed",
        "decode_step_s",
        "mean_length",
    ]
    assert table["egress_bps"].elasticity == 0
    more = max_rate(clusters=[prfaas("far", 4.4), pd("near", 8)])
    less = max_rate(clusters=[prfaas("far", 3.6), pd("near", 8)])
    row = table["num_prfaas"]
    assert (row.low_rps, row.high_rps) == (pytest.approx(less), pytest.approx(more))
    assert row.elasticity == pytest.approx(math.log(more / less) / math.log(1.1 / 0.9))
    assert table["remote_prefill_speed"].high_rps == pytest.approx(more)
    faster = attrs.evolve(PLAIN, prefill=PrefillProfile(tuple((n, s / 1.1) for n, s in H20.knots)))
    local = max_rate(systems={"fast": FAST, "plain": faster})
    assert table["local_prefill_speed"].high_rps == pytest.approx(local)
    quick = attrs.evolve(PLAIN, decode_step_s=0.025 * 0.9)
    quick_rate = max_rate(systems={"fast": FAST, "plain": quick})
    assert table["decode_step_s"].low_rps == pytest.approx(quick_rate)
    assert table["decode_step_s"].elasticity < 0
    longer = attrs.evolve(
        LENGTHS, mu=9.90 + math.log(1.1), min_tokens=128 * 1.1, max_tokens=131_072 * 1.1
    )
    assert table["mean_length"].high_rps == percent(max_rate(lengths=longer), 1e-4)
    assert table["mean_length"].elasticity < 0
    thin = {row.parameter: row for row in plan(egress_bps=2e9).mean.sensitivity}
    assert thin["egress_bps"].elasticity > 0.1
    nothing = plan(clusters=[pd("one", 1)]).mean.sensitivity
    assert {row.elasticity for row in nothing} == {None}


def test_the_curve_over_the_threshold_peaks_at_the_optimum():
    best, curve = PAPER_PLAN.mean.best, PAPER_PLAN.mean.by_threshold
    top = max(curve, key=lambda point: point.requests_per_s)
    assert top.threshold_tokens == best.threshold_tokens
    assert top.requests_per_s == best.requests_per_s
    assert [p.threshold_tokens for p in curve] == sorted(p.threshold_tokens for p in curve)
    assert curve[0].threshold_tokens == 0
    assert curve[0].prefill_rps is None
    assert curve[0].prfaas_rps == percent(2.452, 0.02)
    assert curve[-1].threshold_tokens == pytest.approx(LENGTHS.quantile(0.95))
    for point in curve:
        bounds = (point.prfaas_rps, point.prefill_rps, point.decode_rps)
        known = [bound for bound in bounds if bound is not None]
        assert point.requests_per_s == pytest.approx(min(known))
        assert point.decode_rps == pytest.approx(3.90625)
    homogeneous = plan(clusters=[pd("near", 12)]).mean.by_threshold
    assert homogeneous[-1].prfaas_rps is None
    assert homogeneous[-1].requests_per_s == percent(2.110, 0.02)


def test_the_curve_over_the_split_is_figure_5a_at_the_best_threshold():
    curve = PAPER_PLAN.mean.by_split
    assert [point.num_prefill for point in curve] == list(range(9))
    rates = [point.requests_per_s for point in curve]
    expected = [2.452, 2.74, 2.98, 3.226, 3.125, 2.34, 1.56, 0.78, 0]
    assert rates == [pytest.approx(rate, abs=0.005) for rate in expected]
    assert curve[3].threshold_tokens == PAPER_PLAN.mean.best.threshold_tokens
    large = plan(clusters=[prfaas("far", 50), pd("near", 100)]).mean
    counts = [point.num_prefill for point in large.by_split]
    assert len(counts) < 40
    assert large.best.num_prefill in counts


def test_the_answer_is_the_same_every_time():
    assert plan_deployment(PAPER) == PAPER_PLAN
    assert PAPER_PLAN.of(RateForm.MEAN) is PAPER_PLAN.mean
    assert PAPER_PLAN.of(RateForm.EXPECTATION) is PAPER_PLAN.expectation


def test_the_problem_keeps_its_own_copy_of_the_systems():
    systems = {"fast": FAST, "plain": PLAIN}
    problem = attrs.evolve(PAPER, systems=systems)
    systems.clear()
    assert problem == PAPER


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clusters": [prfaas("far", 4), pd("far", 8)]}, "given twice"),
        ({"clusters": [prfaas("far", 4, "slow"), pd("near", 8)]}, "known are"),
        ({"clusters": [pd("near", 8, "fast")]}, "no decode_step_s"),
        ({"clusters": [prfaas("far", 4)]}, "no PD cluster"),
        ({"clusters": [prfaas("far", 4), pd("near", 0)]}, "no PD cluster"),
        ({"egress_bps": 0}, "egress_bps"),
        ({"egress_share_of_others": 1}, "below 1"),
        ({"egress_share_of_others": -0.1}, "below 1"),
        ({"rtt_s": -1}, "rtt_s"),
        ({"output_tokens": math.nan}, "output_tokens"),
        ({"max_prfaas_nodes": 0}, "max_prfaas_nodes"),
        (
            {
                "systems": {"fast": attrs.evolve(FAST, price_per_hour=None), "plain": PLAIN},
                "objective": Objective.THROUGHPUT_PER_PRICE,
            },
            "price_per_hour",
        ),
    ],
)
def test_a_problem_is_checked_at_the_door(change, words):
    with pytest.raises(ConfigError, match=words):
        attrs.evolve(PAPER, **change)


@pytest.mark.parametrize(
    "change", [{"num_gpus": 0}, {"price_per_hour": -1}, {"decode_step_s": 0}, {"batch_size": 0}]
)
def test_a_system_is_checked_at_the_door(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        attrs.evolve(PLAIN, **change)


@pytest.mark.parametrize("change", [{"num_nodes": -1}, {"num_nodes": math.inf}, {"egress_bps": 0}])
def test_a_cluster_is_checked_at_the_door(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        attrs.evolve(prfaas("far", 4), **change)
