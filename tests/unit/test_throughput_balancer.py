"""The role balancer on a fluid model of the case study of arXiv 2604.15039."""

from __future__ import annotations

from random import Random

import attrs
import pytest

from fluid import (
    BAND,
    EAGER,
    LENGTHS,
    LOCAL,
    OUTPUT,
    REMOTE,
    SPEC,
    STEADY,
    Fluid,
    balancer_of,
    make_balancer,
    num_prefill,
    planned_prefill,
    reason,
    sample,
    split_model,
    split_roles,
)
from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError
from prfaas.policy import ThroughputBalancer
from prfaas.policy.planned_roles import PlannedRoles
from prfaas.policy.role_changes import RoleChanges
from prfaas.seams import (
    ChangePhase,
    LinkRate,
    NodeDown,
    NodeUp,
    RoleChanged,
)

DOUBLED = [min(131_072, 2 * n) for n in LENGTHS]
HALVED = [n // 2 for n in LENGTHS]


def until_changing(fluid: Fluid, rps: float) -> NodeId:
    """Runs until a node is asked to change; returns it."""
    for _ in range(600):
        fluid.run(1, rps)
        if fluid.changing:
            return next(iter(fluid.changing))
    raise AssertionError(f"nothing was converted: {fluid.balancer!r}")


def test_the_configured_roles_stand_while_nothing_happens() -> None:
    balancer = make_balancer()
    assert balancer.plan(0.0).roles == {}
    assert balancer.next_deadline() is None
    fluid = Fluid(balancer)
    plan = fluid.plan()
    assert plan.roles == split_roles(3) | dict.fromkeys(REMOTE, Role.PREFILL)
    assert plan.threshold_band == BAND
    for now in range(1, 5000, 7):
        assert balancer.plan(float(now)) is plan
    assert balancer.assessment is None
    assert balancer.num_conversions == 0


def test_next_deadline_is_the_next_control_period() -> None:
    balancer = make_balancer()
    fluid = Fluid(balancer)
    assert balancer.next_deadline() == 10.0
    fluid.run(25, 1.0)
    assert balancer.next_deadline() == 30.0


def test_an_assessment_says_what_the_model_predicts() -> None:
    fluid = Fluid(make_balancer())
    fluid.run(600, 2.0)
    found = balancer_of(fluid).assessment
    assert found is not None
    assert found.arrival_rps == pytest.approx(2.0, rel=0.01)
    assert found.present_rps == pytest.approx(3.17, rel=0.02)
    assert found.best_rps == found.best.sustainable_rps
    assert found.worst_utilisation == pytest.approx(0.63, rel=0.02)
    assert found.utilisations["decode"] == pytest.approx(2.0 / (5 * 20 / 25.6), rel=0.01)
    assert found.binding in ("remote", "prefill")
    assert found.measured["decode"] == pytest.approx(0.512, rel=0.01)
    assert found.reason == "no pressure"
    assert "3P/5D at 0.6" in repr(fluid.balancer)


# H41: no oscillation.


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("num_nodes", "prefills"), [(2, 1), (3, 1), (3, 2)])
def test_H41_constant_load_of_few_nodes_converts_at_most_once(
    num_nodes: int, prefills: int, seed: int | None
) -> None:
    nodes = LOCAL[:num_nodes]
    fluid = Fluid(
        make_balancer(prefills, nodes),
        nodes=nodes,
        num_remote=0,
        rng=None if seed is None else Random(seed),
    )
    fluid.run(2000, 0.7 / fluid.load().worst_s)
    assert balancer_of(fluid).num_conversions <= (num_nodes > 2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("load", [0.8, 0.97])
def test_H41_noise_at_the_border_of_two_splits_converts_at_most_once(
    seed: int, load: float
) -> None:
    fluid = Fluid(make_balancer(3 + seed % 2), rng=Random(seed))
    # 3 and 4 prefill nodes sustain the same rate within half a per cent.
    fluid.output_tokens = 1005
    fluid.run(2000, load * fluid.best().sustainable_rps)
    assert balancer_of(fluid).num_conversions <= 1


def test_H41_what_undoes_the_last_change_needs_a_larger_gain() -> None:
    """From 3 to 2 and back is worth 8 %, which counts once, but not against the last change."""
    for reversal_gain, expected in ((0.12, 2), (0.0, 3)):
        fluid = Fluid(make_balancer(3, reversal_gain=reversal_gain, **STEADY))
        fluid.lengths = HALVED
        fluid.run(400, 0.95 * fluid.best().sustainable_rps)
        assert num_prefill(fluid) == 2
        fluid.lengths = LENGTHS
        fluid.run(400, 0.95 * fluid.best().sustainable_rps)
        assert num_prefill(fluid) == expected


def test_H41_the_guard_against_reversals_fades() -> None:
    fluid = Fluid(make_balancer(3, reversal_s=900.0, **STEADY))
    fluid.lengths = HALVED
    fluid.run(400, 0.95 * fluid.best().sustainable_rps)
    assert num_prefill(fluid) == 2
    fluid.lengths = LENGTHS
    fluid.run(1000, 0.95 * fluid.best().sustainable_rps)
    assert num_prefill(fluid) == 3


def local_only(load: float) -> Fluid:
    """4 of 8 nodes prefill; with 5 the load is lower by 5 %, but decode reaches 0.93 of it."""
    settings = EAGER | {"cooldown_s": 595.0, "window_s": 590.0, "min_gain": 0.01}
    fluid = Fluid(make_balancer(4, **settings), num_remote=0)
    prefill_s, decode_s = fluid.load().prefill_s, fluid.load().decode_s
    fluid.output_tokens = round(OUTPUT * 0.70 * prefill_s / decode_s)
    fluid.run(600, load / prefill_s)
    return fluid


def test_H41_a_stage_gives_up_no_node_that_it_needs() -> None:
    fluid = local_only(0.98)
    assert planned_prefill(fluid) == 4
    assert reason(fluid) == "the stage that gives up a node would be too busy"


def test_under_overload_the_higher_sustainable_rate_decides() -> None:
    fluid = local_only(1.04)
    assert planned_prefill(fluid) == 5


def test_H41_a_stuck_change_is_rolled_back_and_another_node_tried() -> None:
    fluid = Fluid(make_balancer(2, **EAGER), drain_s=lambda role: None)
    rate = 0.95 * fluid.best().sustainable_rps
    stuck = until_changing(fluid, rate)
    balancer = balancer_of(fluid)
    asked = fluid.plan()
    assert asked.roles[stuck] is Role.PREFILL
    assert balancer.next_deadline() is not None
    fluid.run(119, rate)
    assert fluid.plan() is asked
    fluid.run(1, rate)
    assert balancer.num_rolled_back == 1
    other = until_changing(fluid, rate)
    assert other != stuck
    assert fluid.plan().roles[stuck] is Role.DECODE
    # Word that the first change is done after all comes too late.
    fluid.tell(stuck, asked.epoch, Role.PREFILL, ChangePhase.DONE)
    assert fluid.plan().roles[stuck] is Role.DECODE
    balancer_of(fluid)


def test_a_stuck_change_is_a_deadline() -> None:
    fluid = Fluid(make_balancer(2, change_deadline_s=3.0, **EAGER), drain_s=lambda role: None)
    until_changing(fluid, 2.9)
    balancer, started = balancer_of(fluid), fluid.now
    assert balancer.next_deadline() == started + 3.0
    balancer.plan(started + 3.0)
    assert balancer.num_rolled_back == 1


def test_a_node_that_failed_is_tried_again_after_a_while() -> None:
    nodes = LOCAL[:3]
    fluid = Fluid(
        make_balancer(1, nodes, backoff_s=200.0, **EAGER),
        nodes=nodes,
        num_remote=0,
        drain_s=lambda role: None,
    )
    rate = 0.9 * fluid.best().sustainable_rps
    first = until_changing(fluid, rate)
    fluid.run(121, rate)
    second = until_changing(fluid, rate)
    assert {first, second} == set(nodes[1:])
    fluid.run(125, rate)
    seen = set()
    for _ in range(300):
        fluid.run(1, rate)
        seen |= set(fluid.changing)
    assert first in seen


def test_H42_a_failed_change_leaves_the_node_in_its_old_role() -> None:
    fluid = Fluid(make_balancer(2, **EAGER), drain_s=lambda role: None)
    node_id = until_changing(fluid, 2.9)
    epoch = fluid.plan().epoch
    for wrong in (epoch - 1, epoch + 1):
        fluid.tell(node_id, wrong, Role.DECODE, ChangePhase.FAILED)
        assert fluid.plan().epoch == epoch
    fluid.tell(node_id, epoch, Role.DECODE, ChangePhase.FAILED)
    assert fluid.plan().roles[node_id] is Role.DECODE
    assert fluid.plan().epoch == epoch + 1
    assert balancer_of(fluid).num_rolled_back == 1
    fluid.changing.clear()
    assert until_changing(fluid, 2.9) != node_id


def test_H42_done_in_another_role_is_a_failure() -> None:
    fluid = Fluid(make_balancer(2, **EAGER), drain_s=lambda role: None)
    node_id = until_changing(fluid, 2.9)
    fluid.tell(node_id, fluid.plan().epoch, Role.DECODE, ChangePhase.DONE)
    assert fluid.plan().roles[node_id] is Role.DECODE
    assert balancer_of(fluid).num_rolled_back == 1


def test_H42_nothing_else_changes_while_a_change_is_under_way() -> None:
    fluid = Fluid(
        make_balancer(3, change_deadline_s=1000.0, large_gain=1.0, **EAGER),
        drain_s=lambda role: None,
    )
    fluid.lengths = DOUBLED
    rate = 1.2 * fluid.best().sustainable_rps
    until_changing(fluid, rate)
    plan = fluid.plan()
    fluid.run(500, rate)
    assert fluid.plan() is plan
    assert reason(fluid) == "a change is under way"


def test_a_node_lost_in_a_change_comes_back_in_its_old_role() -> None:
    fluid = Fluid(make_balancer(2, num_ignored_samples=0), drain_s=lambda role: None)
    node_id = until_changing(fluid, 2.9)
    epoch = fluid.plan().epoch
    fluid.go_down(node_id)
    assert node_id not in fluid.plan().roles
    assert balancer_of(fluid).changes() == []
    fluid.come_up(node_id, Role.PREFILL)
    assert fluid.plan().roles[node_id] is Role.DECODE
    fluid.tell(node_id, epoch, Role.PREFILL, ChangePhase.DONE)
    assert fluid.plan().roles[node_id] is Role.DECODE
    balancer_of(fluid)


def test_a_restart_ends_a_change_too() -> None:
    fluid = Fluid(make_balancer(2, **EAGER), drain_s=lambda role: None)
    node_id = until_changing(fluid, 2.9)
    fluid.come_up(node_id, Role.PREFILL)
    assert fluid.plan().roles[node_id] is Role.DECODE
    balancer_of(fluid)


# Pressure and patience.


def test_without_pressure_a_better_split_is_not_taken() -> None:
    fluid = Fluid(make_balancer(2, **EAGER))
    fluid.run(400, 0.7 * fluid.load().sustainable_rps)
    assert reason(fluid) == "no pressure"
    assert planned_prefill(fluid) == 2


@pytest.mark.parametrize("queue", ["queued_tokens", "num_waiting"])
def test_a_queue_that_keeps_growing_is_pressure(queue: str) -> None:
    fluid = Fluid(make_balancer(2, num_growing=3, **EAGER))
    fluid.run(300, 2.0, loads_every_s=1e9)
    node_id = LOCAL[0] if queue == "queued_tokens" else LOCAL[7]
    for size in (5, 5, 9, 12, 12):
        fluid.balancer.observe(sample(fluid, node_id, **{queue: size}), fluid.now)
        fluid.run(10, 2.0, loads_every_s=1e9)
    assert planned_prefill(fluid) == 2
    for size in (15, 16, 20):
        assert planned_prefill(fluid) == 2
        fluid.balancer.observe(sample(fluid, node_id, **{queue: size}), fluid.now)
        fluid.run(10, 2.0, loads_every_s=1e9)
    assert planned_prefill(fluid) == 3


def test_measured_utilisation_is_pressure_but_not_that_of_a_cold_node() -> None:
    fluid = Fluid(make_balancer(2, num_ignored_samples=2, **EAGER))
    fluid.run(300, 2.0, loads_every_s=1e9)
    hot = {"prefill_busy": 1.0}
    for _ in range(2):
        for node_id in LOCAL[:2]:
            fluid.balancer.observe(sample(fluid, node_id, **hot), fluid.now)
        fluid.run(10, 2.0, loads_every_s=1e9)
    assert planned_prefill(fluid) == 2
    # A sample of an earlier life is none either.
    late = attrs.evolve(sample(fluid, LOCAL[0], **hot), epoch=0)
    for _ in range(4):
        fluid.balancer.observe(late, fluid.now)
    fluid.run(10, 2.0, loads_every_s=1e9)
    assert planned_prefill(fluid) == 2
    fluid.balancer.observe(sample(fluid, LOCAL[0], **hot), fluid.now)
    fluid.run(10, 2.0, loads_every_s=1e9)
    assert planned_prefill(fluid) == 3


def test_H41_the_first_samples_of_a_converted_node_do_not_count() -> None:
    fluid = Fluid(make_balancer(2, num_ignored_samples=2, **EAGER))
    node_id = until_changing(fluid, 2.9)
    while fluid.num_done == 0:
        fluid.run(1, 2.9)
    balancer = balancer_of(fluid)
    fluid.run(10, 2.9, loads_every_s=1e9)
    assert balancer.assessment is not None
    before = balancer.assessment.measured["prefill"]
    for expected in (True, True, False):
        fluid.balancer.observe(sample(fluid, node_id, prefill_busy=0.1), fluid.now)
        fluid.run(10, 2.9, loads_every_s=1e9)
        assert (balancer.assessment.measured["prefill"] == before) is expected


def test_a_change_waits_for_confirmations_and_rests_afterwards() -> None:
    settings = EAGER | {"num_confirmations": 5, "cooldown_s": 100.0}
    fluid = Fluid(make_balancer(1, large_gain=1.0, **settings))
    rate = 1.1 * fluid.best().sustainable_rps
    until_changing(fluid, rate)
    assert fluid.now >= 100 + 40
    while fluid.num_done == 0:
        fluid.run(1, rate)
    done_s = fluid.now
    until_changing(fluid, rate)
    assert fluid.now - done_s >= 100 + 40
    assert num_prefill(fluid) == 2


def test_too_few_arrivals_decide_nothing() -> None:
    fluid = Fluid(make_balancer(1, min_arrivals=150, **EAGER))
    fluid.run(30, 4.9)
    assert balancer_of(fluid).assessment is None
    fluid.run(10, 4.9)
    assert balancer_of(fluid).assessment is not None


def test_the_least_loaded_node_of_the_donor_converts() -> None:
    fluid = Fluid(make_balancer(2, num_ignored_samples=0, **EAGER))
    for i, node_id in enumerate(LOCAL):
        busy = 0.5 if node_id != LOCAL[5] else 0.4
        fluid.balancer.observe(sample(fluid, node_id, decode_busy=busy, num_waiting=i // 6), 0.0)
    for _ in range(400):
        fluid.run(1, 2.9, loads_every_s=1e9)
        if fluid.changing:
            break
    assert set(fluid.changing) == {LOCAL[5]}


def test_a_large_gain_converts_several_nodes_but_at_most_half_of_their_role() -> None:
    fluid = Fluid(make_balancer(1, **EAGER))
    fluid.output_tokens = OUTPUT // 3
    rate = 0.95 * fluid.best().sustainable_rps
    until_changing(fluid, rate)
    fluid.run(2, rate)
    assert planned_prefill(fluid) == 1 + 7 // 2
    assert len(fluid.changing) == 3
    assert len({epoch for epoch, _ in fluid.changing.values()}) == 1
    assert balancer_of(fluid).num_conversions == 3


def test_no_role_is_emptied_whatever_the_mix() -> None:
    for output_tokens in (1, 40_000):
        nodes = LOCAL[:3]
        fluid = Fluid(make_balancer(1, nodes, **EAGER), nodes=nodes)
        fluid.output_tokens = output_tokens
        fluid.run(600, 1.0)
        assert set(fluid.plan().roles[n] for n in nodes) == {Role.PREFILL, Role.DECODE}


# Steps in the mix.


@pytest.mark.parametrize(
    ("lengths", "output_tokens"),
    [(DOUBLED, OUTPUT), (HALVED, OUTPUT), (LENGTHS, 3 * OUTPUT), (LENGTHS, OUTPUT // 3)],
    ids=["longer", "shorter", "more output", "less output"],
)
@pytest.mark.parametrize("seed", [None, 3])
def test_a_step_in_the_mix_is_answered_within_10_minutes(
    lengths: list[int], output_tokens: int, seed: int | None
) -> None:
    fluid = Fluid(make_balancer(), rng=None if seed is None else Random(seed))
    fluid.run(500, 0.9 * fluid.load().sustainable_rps)
    assert balancer_of(fluid).num_conversions == 0
    fluid.lengths, fluid.output_tokens = lengths, output_tokens
    best_rps = fluid.best().sustainable_rps
    fluid.run(600, 0.95 * best_rps)
    assert fluid.load().sustainable_rps >= 0.95 * best_rps
    assert balancer_of(fluid).num_conversions <= 3


def test_a_slow_link_moves_nodes_to_prefill() -> None:
    fluid = Fluid(make_balancer(**EAGER))
    for junk in (None, 0.0, -1.0, float("nan"), float("inf")):
        fluid.balancer.observe(LinkRate(link_bps=junk), 0.0)
    fluid.run(300, 2.0)
    assert planned_prefill(fluid) == 3
    fluid.balancer.observe(LinkRate(link_bps=2e9), fluid.now)
    fluid.run(300, 1.6)
    slow = attrs.evolve(split_model(), link_bps=2e9)
    found = slow.at(num_prefill(fluid), 8 - num_prefill(fluid))
    assert found.gain_over(slow.at(3, 5)) > 0.2
    assert found.sustainable_rps >= 0.95 * slow.best_whole(8).sustainable_rps


# Silence, loss and return.


def test_silence_brings_the_configured_roles_back_one_by_one() -> None:
    fluid = Fluid(make_balancer())
    fluid.output_tokens = OUTPUT // 3
    fluid.run(900, 0.95 * fluid.best().sustainable_rps)
    assert num_prefill(fluid) == 6
    seen = [6]
    fluid.run(595, 0.0)
    assert num_prefill(fluid) == 6
    for _ in range(400):
        fluid.run(1, 0.0)
        assert len(fluid.changing) <= 1
        if seen[-1] != num_prefill(fluid):
            seen.append(num_prefill(fluid))
    assert seen == [6, 5, 4, 3]
    assert fluid.plan().roles == split_roles(3) | dict.fromkeys(REMOTE, Role.PREFILL)
    assert balancer_of(fluid).assessment is None


def test_a_node_comes_home_only_when_it_can_be_spared() -> None:
    first, second, third = LOCAL[:3]
    changes = RoleChanges(deadline_s=10.0, backoff_s=10.0)
    baseline = {first: Role.DECODE, second: Role.PREFILL, third: Role.DECODE}
    planned = PlannedRoles(baseline, changes)
    for node_id in baseline:
        planned.up(
            NodeUp(
                node_id=node_id,
                cluster_id=ClusterId("pd"),
                kind=ClusterKind.PD,
                role=Role.MIXED,
                epoch=1,
            )
        )
    assert planned.homecoming(baseline, 0.0) == {}
    away = {first: Role.PREFILL, second: Role.DECODE}
    planned.ask(away, plan_epoch=1, is_slice=False, now=0.0)
    for node_id, role in away.items():
        done = RoleChanged(node_id=node_id, plan_epoch=1, role=role, phase=ChangePhase.DONE)
        assert changes.ended(done, 1.0) is not None
    # Prefill would be empty without the first one, until the second one is back.
    assert planned.homecoming(baseline, 1.0) == {second: Role.PREFILL}


def test_a_lost_node_is_made_up_for_and_its_return_too() -> None:
    fluid = Fluid(make_balancer())
    fluid.run(500, 2.6)
    for node_id in LOCAL[:2]:
        fluid.go_down(node_id)
    assert num_prefill(fluid) == 1
    fluid.run(300, 2.4)
    assert num_prefill(fluid) >= 2
    assert fluid.load().sustainable_rps >= 0.95 * fluid.best().sustainable_rps
    for node_id in LOCAL[:2]:
        fluid.come_up(node_id, Role.MIXED)
        assert fluid.plan().roles[node_id] is Role.PREFILL
    fluid.run(600, 2.95)
    assert fluid.load().sustainable_rps >= 0.95 * fluid.best().sustainable_rps


def test_a_lost_role_makes_everything_mixed_until_it_is_back() -> None:
    nodes = LOCAL[:3]
    fluid = Fluid(make_balancer(1, nodes, **EAGER), nodes=nodes)
    fluid.run(100, 1.0)
    fluid.go_down(nodes[0])
    assert {fluid.plan().roles[n] for n in nodes[1:]} == {Role.MIXED}
    fluid.run(300, 1.0)
    assert {fluid.plan().roles[n] for n in nodes[1:]} == {Role.MIXED}
    assert balancer_of(fluid).assessment is None
    fluid.come_up(nodes[0], Role.PREFILL)
    assert {n: fluid.plan().roles[n] for n in nodes} == split_roles(1, nodes)
    balancer_of(fluid)


def test_a_change_is_taken_back_where_that_saves_a_role() -> None:
    nodes = LOCAL[:4]
    fluid = Fluid(make_balancer(2, nodes, **EAGER), nodes=nodes, drain_s=lambda role: None)
    fluid.output_tokens = 4 * OUTPUT
    fluid.run(30, 0.1)
    node_id = until_changing(fluid, 1.0)
    (other,) = set(nodes[:2]) - {node_id}
    fluid.go_down(other)
    assert fluid.plan().roles[node_id] is Role.PREFILL
    assert fluid.plan().roles[nodes[3]] is Role.DECODE
    balancer_of(fluid)


def test_an_unconfigured_node_is_forgotten_when_it_goes() -> None:
    fluid = Fluid(make_balancer())
    guest = NodeId("guest")
    fluid.come_up(guest, Role.DECODE)
    assert fluid.plan().roles[guest] is Role.DECODE
    fluid.go_down(guest)
    fluid.come_up(guest, Role.PREFILL)
    assert fluid.plan().roles[guest] is Role.PREFILL


def test_late_news_of_an_earlier_life_change_nothing() -> None:
    fluid = Fluid(make_balancer())
    fluid.come_up(LOCAL[0], Role.MIXED)
    plan = fluid.plan()
    fluid.balancer.observe(NodeDown(node_id=LOCAL[0], epoch=1), 0.0)
    assert fluid.plan() is plan


def test_prfaas_nodes_are_never_converted() -> None:
    fluid = Fluid(make_balancer(3, **EAGER))
    fluid.output_tokens = 3 * OUTPUT
    fluid.run(400, 1.8)
    assert {fluid.plan().roles[n] for n in REMOTE} == {Role.PREFILL}
    with pytest.raises(ConfigError, match="'r9' is configured as decode"):
        ThroughputBalancer(SPEC, baseline={NodeId("r9"): Role.DECODE}, band=BAND).observe(
            NodeUp(
                node_id=NodeId("r9"),
                cluster_id=ClusterId("prfaas"),
                kind=ClusterKind.PRFAAS,
                role=Role.PREFILL,
                epoch=1,
            ),
            0.0,
        )
