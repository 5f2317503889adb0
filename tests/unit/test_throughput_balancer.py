"""The role balancer on a fluid model of the case study of arXiv 2604.15039."""

from __future__ import annotations

from collections import Counter
from random import Random

import attrs
import pytest

from fluid import (
    BAND,
    LENGTHS,
    LOCAL,
    OUTPUT,
    REMOTE,
    SPEC,
    STEP_S,
    Fluid,
    make_balancer,
    split_model,
    split_roles,
)
from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError
from prfaas.policy import BalancerSettings, ThroughputBalancer
from prfaas.seams import (
    Arrived,
    ChangePhase,
    LinkRate,
    NodeDown,
    NodeLoad,
    NodeUp,
    RoleChanged,
)
from prfaas.testing import check_balancer

DOUBLED = [min(131_072, 2 * n) for n in LENGTHS]
HALVED = [n // 2 for n in LENGTHS]
# Reacts at once, for tests that are not about patience.
EAGER: dict[str, object] = {"cooldown_s": 0.0, "num_confirmations": 1, "window_s": 60.0}
STEADY = EAGER | {"window_s": 300.0}


def num_prefill(fluid: Fluid) -> int:
    return Counter(fluid.roles.values())[Role.PREFILL]


def planned_prefill(fluid: Fluid) -> int:
    roles = fluid.plan().roles
    return sum(roles[node_id] is Role.PREFILL for node_id in fluid.roles)


def balancer_of(fluid: Fluid) -> ThroughputBalancer:
    assert isinstance(fluid.balancer, ThroughputBalancer)
    fluid.balancer.check()
    return fluid.balancer


def reason(fluid: Fluid) -> str:
    found = balancer_of(fluid).assessment
    assert found is not None
    return found.reason


def until_changing(fluid: Fluid, rps: float) -> NodeId:
    """Runs until a node is asked to change; returns it."""
    for _ in range(600):
        fluid.run(1, rps)
        if fluid.changing:
            return next(iter(fluid.changing))
    raise AssertionError(f"nothing was converted: {fluid.balancer!r}")


def test_it_conforms() -> None:
    check_balancer(
        lambda baseline: ThroughputBalancer(
            SPEC,
            baseline=baseline,
            band=BAND,
            settings=BalancerSettings(period_s=5.0, min_arrivals=1, **EAGER),  # type: ignore[arg-type]
            decode_step_s=STEP_S,
            remote_prefill_s=lambda n: n / 10_000,
            local_prefill_s=lambda n: n / 5_000,
        )
    )


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
    """4 of 8 nodes prefill; as many would be better by 6 % as leave decode at 0.93 of the load."""
    fluid = Fluid(make_balancer(4, min_gain=0.01, **STEADY), num_remote=0)
    prefill_s, decode_s = fluid.load().prefill_s, fluid.load().decode_s
    fluid.output_tokens = round(OUTPUT * 0.70 * prefill_s / decode_s)
    fluid.run(480, load / prefill_s)
    return fluid


def test_H41_a_stage_gives_up_no_node_that_it_needs() -> None:
    fluid = local_only(0.985)
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


def sample(fluid: Fluid, node_id: NodeId, **changes: object) -> NodeLoad:
    load = NodeLoad(
        node_id=node_id,
        epoch=fluid.epochs[node_id],
        prefill_busy=0.0,
        decode_busy=0.0,
        queued_tokens=0,
        num_waiting=0,
    )
    return attrs.evolve(load, **changes)  # type: ignore[arg-type]


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


def test_a_lost_node_is_made_up_for_and_its_return_too() -> None:
    fluid = Fluid(make_balancer())
    rate = 2.6
    fluid.run(500, rate)
    for node_id in LOCAL[:2]:
        fluid.go_down(node_id)
    fluid.run(400, rate)
    assert (num_prefill(fluid), len(fluid.roles)) == (3, 6) or fluid.load().gain_over(
        fluid.best()
    ) > -0.05
    assert num_prefill(fluid) >= 2
    for node_id in LOCAL[:2]:
        fluid.come_up(node_id, Role.PREFILL)
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


# Fractional splits.


def swinging(mode: str, start: int = 3, **settings: object) -> Fluid:
    fluid = Fluid(make_balancer(start, fractional=mode, **settings))
    fluid.run(700, 2.9)
    return fluid


@pytest.mark.parametrize(("start", "conversions"), [(3, 0), (4, 1), (5, 2)])
def test_slices_keep_the_fraction_on_average(start: int, conversions: int) -> None:
    fluid = swinging("slices", start)
    fluid.served_s.clear()
    shares, num_before = [], balancer_of(fluid).num_slices
    for _ in range(300):
        fluid.run(10, 2.9)
        found = balancer_of(fluid).assessment
        assert found is not None
        assert found.fractional is not None
        shares.append(found.fractional.share)
    (swing,) = [n for n in LOCAL if fluid.served_s[n, Role.PREFILL] not in (0, 3000)]
    target = sum(shares) / len(shares)
    assert fluid.served_s[swing, Role.PREFILL] / 3000 == pytest.approx(target, abs=0.02)
    assert target == pytest.approx(0.68, abs=0.03)
    balancer = balancer_of(fluid)
    # One drain of 25.6 s costs 12.8 s, 5 % of a period of 256 s.
    # Drains come on top of the period.
    assert 2 * 3000 / 400 <= balancer.num_slices - num_before <= 2 * 3000 / 256
    assert balancer.num_conversions <= conversions
    fluid.run(40, 2.9)
    assert f"{swing} prefills 0." in reason(fluid)


def test_a_flip_is_a_deadline_that_plan_keeps() -> None:
    fluid = swinging("slices")
    balancer = balancer_of(fluid)
    while fluid.changing or balancer.next_deadline() % 10 == 0:  # type: ignore[operator]
        fluid.run(1, 2.9)
    due_s, num = balancer.next_deadline(), balancer.num_slices
    assert due_s is not None
    assert balancer.plan(due_s).epoch == fluid.plan().epoch
    assert balancer.num_slices == num + 1


def test_the_swing_node_flips_early_for_a_waiting_stage() -> None:
    fluid = swinging("slices", slice_period_s=400.0)
    balancer = balancer_of(fluid)
    while not fluid.changing:
        fluid.run(1, 2.9)
    while fluid.changing:
        fluid.run(1, 2.9)
    (swing,) = [n for n in LOCAL if fluid.plan().roles[n] is not split_roles(3)[n]] or [LOCAL[3]]
    assert fluid.roles[swing] in (Role.PREFILL, Role.DECODE)
    num, is_prefill = balancer.num_slices, fluid.roles[swing] is Role.PREFILL
    waiting = {"num_waiting": 3} if is_prefill else {"queued_tokens": 10**7}
    other = LOCAL[7] if is_prefill else LOCAL[0]
    fluid.run(210 if is_prefill else 80, 2.9, loads_every_s=1e9)
    assert balancer.num_slices == num
    fluid.balancer.observe(sample(fluid, other, **waiting), fluid.now)
    fluid.plan()
    assert balancer.num_slices == num + 1


def test_slices_end_when_the_load_is_gone() -> None:
    fluid = swinging("slices")
    fluid.run(900, 1.5)
    balancer = balancer_of(fluid)
    assert reason(fluid) == "no pressure"
    num, plan = balancer.num_slices, fluid.plan()
    fluid.run(600, 1.5)
    assert (balancer.num_slices, fluid.plan()) == (num, plan)


def test_a_mixed_node_has_a_budget_for_its_fraction() -> None:
    fluid = swinging("mixed")
    balancer, plan = balancer_of(fluid), fluid.plan()
    ((swing, budget),) = plan.prefill_budgets.items()
    assert plan.roles[swing] is Role.MIXED
    found = balancer.assessment
    assert found is not None
    assert found.fractional is not None
    rate = split_model().tokens_per_prefill_s(found.present.threshold_tokens)
    assert budget == pytest.approx(found.fractional.share * STEP_S * rate, rel=0.1)
    assert (balancer.num_conversions, balancer.num_slices) == (1, 0)
    fluid.run(300, 2.9)
    assert fluid.plan() is plan
    fluid.run(900, 1.5)
    assert fluid.plan().prefill_budgets == {}
    assert planned_prefill(fluid) == 3


def test_a_mixed_node_that_restarts_decodes() -> None:
    fluid = swinging("mixed")
    ((swing, _),) = fluid.plan().prefill_budgets.items()
    fluid.go_down(swing)
    assert fluid.plan().prefill_budgets == {}
    fluid.come_up(swing, Role.MIXED)
    assert fluid.plan().roles[swing] is Role.DECODE
    balancer_of(fluid)


def test_auto_takes_what_nets_more() -> None:
    assert balancer_of(swinging("auto")).num_slices > 0
    cheap_mixing = swinging("auto", decode_base_share=0.0)
    assert cheap_mixing.plan().prefill_budgets
    assert balancer_of(cheap_mixing).num_slices == 0


def test_a_failed_flip_ends_the_slices_of_that_node() -> None:
    fluid = swinging("slices", cooldown_s=0.0)
    balancer = balancer_of(fluid)
    fluid.drain_s = lambda role: None
    while not fluid.changing:
        fluid.run(1, 2.9)
    (swing,) = fluid.changing
    old = fluid.roles[swing]
    fluid.tell(swing, fluid.plan().epoch, old, ChangePhase.FAILED)
    fluid.run(100, 2.9)
    assert fluid.plan().roles[swing] is old
    assert balancer.num_rolled_back == 1


# Names, clusters, prices.


@pytest.mark.parametrize("mode", ["off", "slices"])
def test_other_names_permute_the_plan_and_nothing_else(mode: str) -> None:
    renamed = dict(zip(LOCAL, (NodeId(f"x{i}") for i in range(8)), strict=True))
    fluids = []
    for nodes in (LOCAL, tuple(renamed.values())):
        fluid = Fluid(make_balancer(2, nodes, fractional=mode), nodes=nodes)
        fluid.run(600, 2.9)
        fluids.append(fluid)
    one, other = (fluid.plan() for fluid in fluids)
    names = renamed | {n: n for n in REMOTE}
    assert {names[n]: role for n, role in one.roles.items()} == other.roles
    assert one.epoch == other.epoch
    assert balancer_of(fluids[0]).assessments == balancer_of(fluids[1]).assessments or mode != "off"


def test_clusters_are_balanced_apart_and_share_what_is_remote() -> None:
    balancer = make_balancer(3, **STEADY)
    fluid = Fluid(balancer)
    for i in range(8):
        role = Role.PREFILL if i < 6 else Role.DECODE
        balancer.observe(
            NodeUp(
                node_id=NodeId(f"q{i}"),
                cluster_id=ClusterId("other"),
                kind=ClusterKind.PD,
                role=role,
                epoch=1,
                num_slots=20,
            ),
            0.0,
        )
    for second in range(1, 201):
        for k in range(5):
            tokens = LENGTHS[(second * 5 + k) * 197 % 512]
            balancer.observe(Arrived(routed_tokens=tokens), float(second))
        balancer.plan(float(second))
        fluid.now = float(second)
        for node_id, role in balancer.plan(fluid.now).roles.items():
            if node_id.startswith("q"):
                balancer.observe(
                    RoleChanged(
                        node_id=node_id,
                        plan_epoch=balancer.plan(fluid.now).epoch,
                        role=role,
                        phase=ChangePhase.DONE,
                    ),
                    fluid.now,
                )
    balancer.check()
    found = balancer.assessments
    assert found[ClusterId("pd")].arrival_rps == pytest.approx(2.5, rel=0.02)
    # Half of 4 remote nodes.
    present = found[ClusterId("pd")].present
    alone = attrs.evolve(split_model(num_remote=2), link_bps=50e9).at(
        present.num_prefill, present.num_decode
    )
    assert present.sustainable_rps == pytest.approx(alone.sustainable_rps, rel=0.03)
    num = sum(balancer.plan(200.0).roles[NodeId(f"q{i}")] is Role.PREFILL for i in range(8))
    assert num == found[ClusterId("other")].best.num_prefill < 6
    assert balancer.assessment in found.values()


def test_without_profiles_the_measured_busy_time_is_the_price() -> None:
    balancer = ThroughputBalancer(
        SPEC,
        baseline=split_roles(2),
        band=BAND,
        settings=BalancerSettings(**EAGER),  # type: ignore[arg-type]
        num_slots=20,
        output_tokens=OUTPUT,
    )
    fluid = Fluid(balancer, num_remote=0)
    fluid.run(60, 0.8, loads_every_s=1e9)
    assert balancer.assessment is None
    fluid.run(400, 0.8)
    found = balancer.assessment
    assert found is not None
    mean_s = fluid.load().prefill_s * num_prefill(fluid)
    assert found.present.prefill_s * found.present.num_prefill == pytest.approx(mean_s, rel=0.1)
    assert num_prefill(fluid) > 2


def test_the_band_can_be_narrowed_around_the_optimum() -> None:
    fluid = Fluid(make_balancer(band_margin=0.5, **EAGER))
    assert fluid.plan().threshold_band == BAND
    fluid.run(200, 2.0)
    plan = fluid.plan()
    low, high = plan.threshold_band
    assert (low, high) == (pytest.approx(9_800, rel=0.1), pytest.approx(29_400, rel=0.1))
    fluid.run(100, 2.0)
    assert fluid.plan() is plan
    fluid.lengths = DOUBLED
    fluid.run(600, 1.2)
    assert fluid.plan().threshold_band[0] > low


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"period_s": 0.0}, "period_s is 0.0"),
        ({"min_gain": -0.1}, "min_gain is -0.1"),
        ({"backoff_s": float("inf")}, "backoff_s is inf"),
        ({"window_s": 2000.0}, "max_window_s is 960.0"),
        ({"slice_period_s": 0.0}, "slice_period_s is 0.0"),
        ({"decode_base_share": 1.0}, "decode_base_share is 1.0"),
        ({"band_margin": 1.5}, "band_margin is 1.5"),
        ({"fractional": "some"}, "fractional is 'some'"),
    ],
)
def test_settings_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BalancerSettings(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["link_bps", "num_slots", "decode_step_s", "output_tokens"])
def test_arguments_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        ThroughputBalancer(SPEC, baseline={}, band=BAND, **{name: 0})  # type: ignore[arg-type]
