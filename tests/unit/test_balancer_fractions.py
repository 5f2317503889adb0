"""The role balancer: fractional splits, several clusters, prices, and what it refuses."""

from __future__ import annotations

import attrs
import pytest

from fluid import (
    BAND,
    DRAIN_S,
    EAGER,
    LENGTHS,
    LOCAL,
    OUTPUT,
    REMOTE,
    SPEC,
    STEADY,
    STEP_S,
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
from prfaas.policy import BalancerSettings, ThroughputBalancer
from prfaas.seams import Arrived, ChangePhase, NodeUp, RoleChanged

DOUBLED = [min(131_072, 2 * n) for n in LENGTHS]


# Fractional splits.


def swinging(mode: str, start: int = 3, **settings: object) -> Fluid:
    fluid = Fluid(make_balancer(start, fractional=mode, **settings))
    fluid.run(700, 2.9)
    return fluid


@pytest.mark.parametrize(("start", "conversions"), [(3, 0), (4, 1)])
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


def test_measured_drains_are_what_slices_cost() -> None:
    fluid = Fluid(make_balancer(fractional="slices", slice_period_s=600.0))
    fluid.drain_s = lambda role: 60.0
    fluid.run(2500, 2.9)
    found = balancer_of(fluid).assessment
    assert found is not None
    assert balancer_of(fluid).num_slices >= 4
    # Half of the batch idles for 60 s, once in 600 s.
    cost = 8 - found.present.num_prefill - found.present.num_decode
    assert cost == pytest.approx(60 / 2 / 600, rel=0.05)


def test_a_flip_is_a_deadline_that_plan_keeps() -> None:
    fluid = swinging("slices")
    balancer = balancer_of(fluid)
    while fluid.changing or balancer.next_deadline() % 10 == 0:  # type: ignore[operator]
        fluid.run(1, 2.9)
    due_s, num = balancer.next_deadline(), balancer.num_slices
    assert due_s is not None
    assert balancer.plan(due_s).epoch == fluid.plan().epoch
    assert balancer.num_slices == num + 1


def swing_of(fluid: Fluid) -> NodeId:
    """The node that alternates: runs until it is asked to flip, and has done so."""
    while not fluid.changing:
        fluid.run(1, 2.9)
    (swing,) = fluid.changing
    while fluid.changing:
        fluid.run(1, 2.9)
    return swing


@pytest.mark.parametrize("serves", [Role.PREFILL, Role.DECODE])
def test_the_swing_node_flips_early_for_a_waiting_stage(serves: Role) -> None:
    fluid = swinging("slices", slice_period_s=400.0)
    balancer = balancer_of(fluid)
    while fluid.roles[swing_of(fluid)] is not serves:
        pass
    num = balancer.num_slices
    queue, other = (
        ({"num_waiting": 3}, LOCAL[7])
        if serves is Role.PREFILL
        else ({"queued_tokens": 10**7}, LOCAL[0])
    )
    # Half a slice is 140 s of prefill, or 60 s of decode.
    fluid.run(50, 2.9, loads_every_s=1e9)
    fluid.balancer.observe(sample(fluid, other, **queue), fluid.now)
    fluid.plan()
    assert balancer.num_slices == num
    fluid.run(100 if serves is Role.PREFILL else 15, 2.9, loads_every_s=1e9)
    assert balancer.num_slices == num + 1


def test_the_swing_node_stays_while_its_own_stage_waits_as_well() -> None:
    fluid = swinging("slices", slice_period_s=400.0)
    while fluid.roles[swing_of(fluid)] is not Role.PREFILL:
        pass
    balancer = balancer_of(fluid)
    num = balancer.num_slices
    fluid.balancer.observe(sample(fluid, LOCAL[7], num_waiting=3), fluid.now)
    fluid.balancer.observe(sample(fluid, LOCAL[0], queued_tokens=10), fluid.now)
    fluid.run(160, 2.9, loads_every_s=1e9)
    assert balancer.num_slices == num


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
    assert Role.MIXED not in fluid.plan().roles.values()


def test_a_mixed_node_that_restarts_decodes() -> None:
    fluid = swinging("mixed")
    ((swing, _),) = fluid.plan().prefill_budgets.items()
    fluid.go_down(swing)
    assert fluid.plan().prefill_budgets == {}
    fluid.come_up(swing, Role.MIXED)
    assert fluid.plan().roles[swing] is Role.DECODE
    balancer_of(fluid)


@pytest.mark.parametrize("how", ["fails", "is taken back"])
def test_a_node_that_did_not_get_out_of_mixed_is_asked_again(how: str) -> None:
    fluid = swinging("mixed", backoff_s=300.0)
    ((swing, _),) = fluid.plan().prefill_budgets.items()
    fluid.drain_s = lambda role: None
    while not fluid.changing:
        fluid.run(1, 1.5)
    assert fluid.changing.keys() == {swing}
    if how == "fails":
        fluid.tell(swing, fluid.plan().epoch, Role.MIXED, ChangePhase.FAILED)
    else:  # all others that prefill go, so it is needed for that
        others = [n for n, role in fluid.roles.items() if role is Role.PREFILL]
        for node_id in others:
            fluid.go_down(node_id)
        assert fluid.plan().roles[swing] is Role.MIXED
        for node_id in others:
            fluid.come_up(node_id, Role.PREFILL)
    assert fluid.plan().roles[swing] is Role.MIXED
    assert fluid.plan().prefill_budgets == {}
    fluid.changing.clear()
    fluid.drain_s = DRAIN_S.get
    if how == "fails":
        fluid.run(280, 1.5)
        assert fluid.plan().roles[swing] is Role.MIXED
    fluid.run(80, 1.5)
    assert fluid.roles[swing] is Role.DECODE
    assert fluid.plan().roles[swing] is Role.DECODE
    balancer_of(fluid)


def test_a_stray_node_takes_the_role_that_nobody_else_has() -> None:
    fluid = Fluid(make_balancer(1, LOCAL[:2], **EAGER), nodes=LOCAL[:2], num_remote=0)
    planned = balancer_of(fluid)._planned
    planned._planned[LOCAL[1]] = Role.MIXED
    assert planned.stray(LOCAL[:2], None, 0.0) == {LOCAL[1]: Role.DECODE}
    assert planned.stray(LOCAL[:2], LOCAL[1], 0.0) == {}
    planned._planned |= {LOCAL[0]: Role.DECODE}
    assert planned.stray(LOCAL[:2], None, 0.0) == {LOCAL[1]: Role.PREFILL}
    planned._planned |= {LOCAL[0]: Role.MIXED, LOCAL[1]: Role.PREFILL}
    assert planned.stray(LOCAL[:2], None, 0.0) == {LOCAL[0]: Role.DECODE}


def test_a_stray_node_waits_for_the_change_of_another_one() -> None:
    settings = STEADY | {"change_deadline_s": 1000.0}
    fluid = Fluid(make_balancer(2, **settings), drain_s=lambda role: None)
    while not fluid.changing:
        fluid.run(1, 2.9)
    (changing,) = fluid.changing
    stray = next(n for n, role in fluid.roles.items() if role is Role.DECODE and n != changing)
    balancer_of(fluid)._planned._planned[stray] = Role.MIXED
    for _ in range(3):
        fluid.run(10, 2.9)
        assert [change.node_id for change in balancer_of(fluid).changes()] == [changing]


def test_a_node_that_is_configured_mixed_stays_so() -> None:
    balancer = ThroughputBalancer(
        SPEC, baseline=split_roles(3) | {LOCAL[7]: Role.MIXED}, band=BAND, num_slots=20
    )
    fluid = Fluid(balancer)
    fluid.run(200, 2.0)
    assert fluid.plan().roles[LOCAL[7]] is Role.MIXED


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


def test_a_swing_node_stops_when_the_best_fraction_is_elsewhere() -> None:
    fluid = swinging("slices")
    swing_of(fluid)
    fluid.output_tokens = OUTPUT // 3
    fluid.run(900, 0.9 * fluid.best().sustainable_rps)
    assert fluid.load().sustainable_rps >= 0.9 * fluid.best().sustainable_rps


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
    first, second = (balancer_of(fluid).assessment for fluid in fluids)
    assert first is not None
    assert second is not None
    assert attrs.evolve(first, reason="") == attrs.evolve(second, reason="")


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
