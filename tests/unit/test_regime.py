from __future__ import annotations

import math
from random import Random

import attrs
import pytest

from prfaas.core import ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.errors import ConfigError
from prfaas.policy import (
    PrefillTime,
    Regime,
    RegimeSettings,
    RouterSettings,
    ThresholdController,
    ThresholdRouter,
)
from prfaas.policy.regime import RegimeBorder
from prfaas.seams import NodeHit, NodeView, RoutedRequest, RouteReason, RoutingDecision
from prfaas.spec import preset
from prfaas.testing.router import StillView, check_router

SPEC = preset("paper-1t")
T = 20_000
GBIT = 10**9 // 8
R1, R2, P1, P2, D1 = (NodeId(name) for name in ("r1", "r2", "p1", "p2", "d1"))


def test_the_border_has_hysteresis() -> None:
    border = RegimeBorder(RegimeSettings(low=0.5, high=0.8))
    assert border.regime is Regime.SCARCE
    seen = [border.update(u, 1e9, 0.0) for u in (0.7, 0.5, 0.49, 0.7, 0.8, 0.81, 0.6, 0.1)]
    scarce, abundant = Regime.SCARCE, Regime.ABUNDANT
    assert seen == [scarce, scarce, abundant, abundant, abundant, scarce, scarce, abundant]
    assert border.regime is abundant
    assert repr(border) == "<RegimeBorder abundant>"


@pytest.mark.parametrize("link_bps", [None, 0.0, -1.0, math.nan, math.inf])
def test_an_unknown_link_is_scarce(link_bps: float | None) -> None:
    border = RegimeBorder()
    assert border.update(0.0, 1e9, 0.0) is Regime.ABUNDANT
    assert border.update(0.0, link_bps, 0.0) is Regime.SCARCE


def test_an_unknown_load_is_scarce() -> None:
    border = RegimeBorder()
    for unknown in (None, math.nan):
        assert border.update(0.0, 1e9, 0.0) is Regime.ABUNDANT
        assert border.update(unknown, 1e9, 0.0) is Regime.SCARCE


def test_expected_pulls_add_to_egress_and_fade() -> None:
    border = RegimeBorder(RegimeSettings(low=0.5, high=0.8, window_s=10.0))
    border.update(0.3, 1e9, 0.0)
    border.expect(6 * GBIT, 0.0, is_pull=True)
    # 6 Gbit in 10 s are 0.6 of the link.
    assert border.update(0.1, 1e9, 0.0) is Regime.ABUNDANT
    assert border.update(0.21, 1e9, 0.0) is Regime.SCARCE
    assert border.update(0.2, 1e9, 0.0) is Regime.SCARCE
    later = 10 * math.log(2)
    assert border.update(0.21, 1e9, later) is Regime.SCARCE
    assert border.update(0.19, 1e9, later) is Regime.ABUNDANT
    border.expect(6 * GBIT, later, is_pull=True)
    assert border.update(0.0, 1e9, later) is Regime.SCARCE


def test_pushes_take_the_other_direction() -> None:
    border = RegimeBorder(RegimeSettings(low=0.5, high=0.8, window_s=10.0))
    border.update(0.3, 1e9, 0.0)
    border.expect(6 * GBIT, 0.0, is_pull=False)
    assert border.update(0.7, 1e9, 0.0) is Regime.ABUNDANT
    border.expect(3 * GBIT, 0.0, is_pull=False)
    assert border.update(0.0, 1e9, 0.0) is Regime.SCARCE


@pytest.mark.parametrize(
    "wrong",
    [
        {"low": -0.1},
        {"low": 0.9, "high": 0.8},
        {"high": math.inf},
        {"high": math.nan},
        {"window_s": 0.0},
        {"window_s": math.inf},
    ],
)
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RegimeSettings(**wrong)


class Told(ThresholdController):
    """A controller with a fixed t that says of the link what it is told."""

    def __init__(self, utilisation: float | None = 0.1, *, is_down: bool = False) -> None:
        super().__init__(SPEC, band=(T, T))
        self.load = utilisation
        self.is_down = is_down

    def observe_offered(self, num_bytes: int, now: float) -> None: ...

    def utilisation(self, now: float) -> float | None:
        return self.load

    def is_link_down(self, now: float) -> bool:
        return self.is_down


def prefill_s(num_tokens: int, num_cached_tokens: int = 0, /) -> float:
    return num_tokens * 1e-4


PROFILES: dict[ClusterId, PrefillTime] = {
    ClusterId("prfaas"): prefill_s,
    ClusterId("pd"): prefill_s,
}


def node(node_id: NodeId, **load: object) -> NodeView:
    kind = ClusterKind.PRFAAS if node_id.startswith("r") else ClusterKind.PD
    view = NodeView(
        node_id=node_id,
        cluster_id=ClusterId(kind.value),
        kind=kind,
        role=Role.DECODE if node_id.startswith("d") else Role.PREFILL,
        epoch=1,
        num_active=0,
        queued_tokens=0,
        prefill_tokens_per_s=None,
        decode_step_s=None,
    )
    return attrs.evolve(view, **load)  # type: ignore[arg-type]


def view(hits: dict[NodeId, int], *nodes: NodeView, link_bps: float | None = 100e9) -> StillView:
    everyone = nodes or tuple(node(n) for n in (R1, R2, P1, P2, D1))
    found = {n: NodeHit(num_cached_tokens=h, num_held_tokens=h) for n, h in hits.items()}
    return StillView(views=everyone, hits=found, rate_bps=link_bps)


def make_router(
    controller: ThresholdController | None = None,
    *,
    profiles: dict[ClusterId, PrefillTime] | None = None,
    **options: object,
) -> ThresholdRouter:
    settings = RouterSettings(**{"prefix_transfers": True, **options})  # type: ignore[arg-type]
    return ThresholdRouter(
        SPEC,
        controller or Told(),
        settings=settings,
        profiles=PROFILES if profiles is None else profiles,
    )


def route(
    view: StillView, num_tokens: int, router: ThresholdRouter | None = None, now: float = 0.0
) -> RoutingDecision:
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=num_tokens)
    return (router or make_router()).route(request, view, now, Random(0))


def test_routers_that_move_prefixes_conform() -> None:
    check_router(make_router)
    check_router(lambda: make_router(Told(None)))
    check_router(lambda: make_router(ThresholdController(SPEC, band=(T, T)), profiles={}))
    check_router(lambda: make_router(ttft_slo_s=3.0))


def test_abundant_a_prefix_is_pulled_to_where_the_rest_is_short() -> None:
    router = make_router()
    decision = route(view({R1: 64_000, P1: 6400}), 70_000, router)
    assert router.regime is Regime.ABUNDANT
    assert "abundant" in repr(router)
    assert (decision.reason, decision.routed_tokens) == (RouteReason.SHORT, 6000)
    # P1 has 6,400 rows of it, so less has to cross and it is ready sooner.
    assert (decision.prefill_node, decision.prefix_node) == (P1, R1)
    assert (decision.prefix_tokens, decision.cached_tokens) == (64_000, 64_000)
    assert decision.uncached_tokens == 6000
    assert decision.prefix_bytes == SPEC.kv_bytes_delta(64_000, 6400)
    assert decision.predicted_ttft_s == pytest.approx(
        0.05 + 8 * decision.prefix_bytes / 100e9 + 0.6
    )


def test_abundant_a_prefix_is_pushed_to_where_a_long_rest_is_fast() -> None:
    decision = route(view({R1: 6400, P1: 32_000}), 70_000)
    assert (decision.reason, decision.routed_tokens) == (RouteReason.LONG, 38_000)
    assert (decision.prefill_node, decision.prefix_node) == (R1, P1)
    assert (decision.cached_tokens, decision.uncached_tokens) == (32_000, 38_000)
    assert decision.prefix_bytes == SPEC.kv_bytes_delta(32_000, 6400)


def test_scarce_the_caches_are_judged_apart() -> None:
    router = make_router(Told(0.9))
    pull = route(view({R1: 64_000, P1: 6400}), 70_000, router)
    assert router.regime is Regime.SCARCE
    assert (pull.reason, pull.routed_tokens) == (RouteReason.LONG, 63_600)
    assert (pull.prefill_node, pull.cached_tokens) == (R1, 64_000)
    push = route(view({R1: 6400, P1: 32_000}), 70_000, router)
    assert (push.reason, push.cached_tokens) == (RouteReason.LONG, 6400)
    for decision in (pull, push):
        assert (decision.prefix_node, decision.prefix_tokens, decision.prefix_bytes) == (None, 0, 0)


def test_without_transfers_each_cluster_uses_its_own_hit() -> None:
    router = make_router(prefix_transfers=False)
    decision = route(view({R1: 64_000, P1: 6400}), 70_000, router)
    assert (decision.reason, decision.prefill_node) == (RouteReason.LONG, R1)
    assert (decision.cached_tokens, decision.prefix_node) == (64_000, None)
    assert router.regime is Regime.SCARCE


@pytest.mark.parametrize("same", [0, 32_000])
def test_abundant_nothing_moves_if_the_chosen_side_has_as_much(same: int) -> None:
    for num_tokens in (40_000, 60_000):
        decision = route(view({R1: same, P1: 32_000}), num_tokens)
        is_local = num_tokens - 32_000 <= T
        assert decision.offloaded is not is_local
        assert (decision.prefix_node is None) is (is_local or same == 32_000)


def test_equal_hits_move_nothing_even_to_a_node_without_one() -> None:
    busy = node(P1, num_active=1, queued_tokens=60_000)
    nodes = (node(R1), busy, node(P2), node(D1))
    decision = route(view({R1: 32_000, P1: 32_000}, *nodes), 40_000)
    assert (decision.prefill_node, decision.prefix_node) == (P2, None)


def test_a_boundary_is_local_in_the_abundant_regime_too() -> None:
    hits = {R1: 64_000}
    assert route(view(hits), 64_000 + T).reason is RouteReason.SHORT
    assert route(view(hits), 64_001 + T).reason is RouteReason.LONG


def test_a_prefix_that_takes_longer_than_computing_it_stays_where_it_is() -> None:
    hits = {R1: 64_000}
    saved_s = 6.4
    limit_bps = 8 * SPEC.kv_bytes(64_000) / (saved_s - 0.05)
    for factor, moves in ((1.01, True), (0.99, False)):
        router = make_router(regime=RegimeSettings(window_s=1e6))
        decision = route(view(hits, link_bps=factor * limit_bps), 70_000, router)
        assert (decision.prefix_node == R1) is moves
        assert (decision.reason, decision.routed_tokens) == (RouteReason.SHORT, 6000)
        assert decision.cached_tokens == (64_000 if moves else 0)
    # The fixed part counts.
    slow = make_router(setup_s=6.4)
    assert route(view(hits), 70_000, slow).prefix_node is None
    # So does the state, however short the prefix: 0.15 s on this link.
    state_s = 8 * SPEC.kv_bytes(64) / 10e9
    assert state_s > 64 * 1e-4
    assert route(view({R1: 64}, link_bps=10e9), 1000, make_router(setup_s=0.0)).prefix_node is None


def test_the_node_is_the_one_that_is_done_first_with_the_prefix_or_without() -> None:
    busy = node(P1, num_active=1, queued_tokens=60_000)
    nodes = (node(R1), busy, node(P2), node(D1))
    decision = route(view({R1: 64_000, P1: 57_600}, *nodes), 70_000)
    assert (decision.prefill_node, decision.prefix_node) == (P2, R1)
    idle = (node(R1), node(P1), node(P2), node(D1))
    decision = route(view({R1: 57_664, P1: 57_600}, *idle), 70_000)
    # 64 tokens more are not worth a state.
    assert (decision.prefill_node, decision.prefix_node) == (P1, None)


def test_unknown_rates_are_scarce() -> None:
    decision = route(view({R1: 64_000}), 70_000, make_router(profiles={}))
    assert (decision.reason, decision.prefix_node) == (RouteReason.LONG, None)
    rated = [node(n, prefill_tokens_per_s=1e4) for n in (R1, P1)]
    known = view({R1: 64_000}, *rated, node(D1))
    decision = route(known, 70_000, make_router(profiles={}))
    assert (decision.reason, decision.prefix_node) == (RouteReason.SHORT, R1)


def test_a_link_that_is_unknown_or_down_moves_nothing() -> None:
    assert route(view({R1: 64_000}, link_bps=None), 70_000).prefix_node is None
    down = route(view({R1: 64_000}), 70_000, make_router(Told(is_down=True)))
    assert (down.reason, down.prefix_node) == (RouteReason.LINK_DOWN, None)


def test_a_fall_back_moves_nothing() -> None:
    full = node(R1, num_active=1, max_active=1)
    hits = {R1: 32_000}
    decision = route(view(hits, full, node(P1), node(D1)), 70_000)
    assert (decision.reason, decision.prefix_node) == (RouteReason.REMOTE_FULL, None)
    assert decision.cached_tokens == 0


def test_wanted_prefixes_turn_the_regime_scarce_and_hold_it_there() -> None:
    # A pull of 64,000 tokens is 10.3 Gbit, and two of them a second are twice what the link does.
    router = make_router(setup_s=0.0)
    hits = {R1: 64_000}
    regimes = []
    for step in range(40):
        route(view(hits, link_bps=10e9), 70_000, router, now=0.5 * step)
        regimes.append(router.regime)
    assert regimes[0] is Regime.ABUNDANT
    assert regimes[-20:] == [Regime.SCARCE] * 20
    for step in range(40):
        route(view({}, link_bps=10e9), 70_000, router, now=20 + 0.5 * step)
    assert router.regime is Regime.ABUNDANT
