from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from random import Random

import attrs
import pytest

from prfaas.capacity import (
    Deployment,
    LogNormalLengths,
    RateForm,
    best_threshold,
)
from prfaas.core import ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.errors import CapacityError, ConfigError
from prfaas.paper.profiles import H20, H200
from prfaas.policy import LoadLedger, MaxWeightRouter, MaxWeightSettings
from prfaas.policy.prefix import PrefixSources
from prfaas.policy.survey import Survey
from prfaas.seams import (
    Candidate,
    ClusterLoad,
    ClusterView,
    NodeHit,
    NodeUp,
    NodeView,
    RequestOutcome,
    RoutedRequest,
    Router,
    RouteReason,
    RoutingDecision,
)
from prfaas.spec import preset
from prfaas.testing.router import StillView, check_router

SPEC = preset("paper-1t")
PRFAAS, PD = ClusterId("prfaas"), ClusterId("pd")
R1, R2, P1, P2, D1, D2 = (NodeId(name) for name in ("r1", "r2", "p1", "p2", "d1", "d2"))


def h200(num_tokens: int, num_cached_tokens: int = 0) -> float:
    return H200.prefill_s(num_tokens)


def h20(num_tokens: int, num_cached_tokens: int = 0) -> float:
    return H20.prefill_s(num_tokens)


PROFILES = {PRFAAS: h200, PD: h20}


def node(node_id: NodeId, **load: object) -> NodeView:
    kind = ClusterKind.PRFAAS if node_id.startswith("r") else ClusterKind.PD
    view = NodeView(
        node_id=node_id,
        cluster_id=ClusterId(kind.value),
        kind=kind,
        role={"d": Role.DECODE, "m": Role.MIXED}.get(node_id[0], Role.PREFILL),
        epoch=1,
        num_active=0,
        queued_tokens=0,
        prefill_tokens_per_s=None,
        decode_step_s=None,
    )
    return attrs.evolve(view, **load)  # type: ignore[arg-type]


def view(*nodes: NodeView, hits: dict[NodeId, int] | None = None, **options: object) -> StillView:
    everything = nodes or tuple(node(n) for n in (R1, R2, P1, P2, D1, D2))
    found = {n: NodeHit(num_cached_tokens=h, num_held_tokens=h) for n, h in (hits or {}).items()}
    return StillView(views=everything, hits=found, **{"rate_bps": 100e9, **options})  # type: ignore[arg-type]


def make_router(**options: object) -> MaxWeightRouter:
    return MaxWeightRouter(SPEC, **{"profiles": PROFILES, **options})  # type: ignore[arg-type]


def route(
    view: ClusterView,
    num_tokens: int,
    *,
    router: MaxWeightRouter | None = None,
    rng: Random | None = None,
    now: float = 0.0,
) -> RoutingDecision:
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=num_tokens)
    return (router or make_router()).route(request, view, now, rng or Random(0))


def test_the_router_conforms() -> None:
    check_router(make_router)
    check_router(lambda: MaxWeightRouter(SPEC))
    settings = MaxWeightSettings(prefix_transfers=True)
    check_router(lambda: make_router(settings=settings))
    check_router(lambda: MaxWeightRouter(SPEC, settings=settings))


def test_with_nothing_queued_the_least_ttft_wins() -> None:
    for num_tokens in (200, 2000, 20_000, 100_000):
        decision = route(view(rate_bps=10e9), num_tokens)
        shipping_s = 8 * SPEC.kv_bytes(num_tokens) / 10e9
        remote_s = max(h200(num_tokens), shipping_s)
        assert decision.offloaded is (remote_s < h20(num_tokens))
        assert decision.predicted_ttft_s == pytest.approx(min(remote_s, h20(num_tokens)))
    slow = view(rate_bps=0.5e9)
    assert not route(slow, 20_000).offloaded
    assert route(slow, 20_000).reason is RouteReason.CHEAPER_LOCAL
    assert route(view(), 20_000).reason is RouteReason.CHEAPER_REMOTE


def queued(node_id: NodeId, num: int, length: int) -> NodeView:
    return node(node_id, num_active=num, queued_tokens=num * length)


def test_long_prompts_stay_where_they_are_fast_as_the_queues_grow() -> None:
    # Prefill times differ by a factor of 1.8 at 4,000 tokens and 3 at 100,000; the queues by 1.7.
    even = view(queued(R1, 40, 20_000), queued(P1, 16, 20_000), node(D1))
    tilted = view(queued(R1, 70, 20_000), queued(P1, 16, 20_000), node(D1))
    assert 1.6 < 70 * h200(20_000) / (16 * h20(20_000)) < 1.8
    assert not route(tilted, 4000).offloaded
    assert route(tilted, 100_000).offloaded
    assert route(even, 4000).offloaded


def test_the_weight_decides_how_much_the_queue_of_others_counts() -> None:
    # Remote: 6.4 s of wait and 1.84 s of work; local: 4.93 s of work, nothing queued.
    nodes = (queued(R1, 2, 16_000), node(P1), node(D1))
    wait_s = 2 * h200(16_000)
    selfish, kind = (make_router(settings=MaxWeightSettings(weight_per_s=v)) for v in (0.0, 1.0))
    assert wait_s + h200(32_000) < h20(32_000) < wait_s + h200(32_000) * (1 + wait_s)
    assert route(view(*nodes), 32_000, router=selfish).offloaded
    assert not route(view(*nodes), 32_000, router=kind).offloaded


def test_a_backlog_on_the_link_keeps_requests_at_home() -> None:
    assert route(view(rate_bps=10e9), 32_000).offloaded
    assert route(view(rate_bps=10e9, backlog_bytes=10**9), 32_000).offloaded
    assert not route(view(rate_bps=10e9, backlog_bytes=10**10), 32_000).offloaded
    # 4 s of backlog and 0.6 s of its own are less than 4.9 s at home, but others wait as well.
    link_s = 8 * SPEC.kv_bytes(32_000) / 10e9
    near = view(rate_bps=10e9, backlog_bytes=5 * 10**9)
    assert 4 + link_s < h20(32_000) < 4 + link_s + 0.3 * link_s * 4
    assert not route(near, 32_000).offloaded
    selfish = make_router(settings=MaxWeightSettings(weight_per_s=0.0))
    assert route(near, 32_000, router=selfish).offloaded
    assert route(view(backlog_bytes=10**9), 32_000).predicted_ttft_s == pytest.approx(h200(32_000))
    waiting = view(backlog_bytes=10**10)
    transfer_s = 8 * (10**10 + SPEC.kv_bytes(100_000)) / 100e9
    assert 0.8 < transfer_s < h200(100_000)
    assert route(waiting, 100_000).predicted_ttft_s == pytest.approx(h200(100_000))


def test_a_hit_counts_as_work_saved_where_it_is() -> None:
    assert route(view(), 60_000).offloaded
    near = route(view(hits={P2: 48_000}), 60_000)
    assert (near.prefill_node, near.cached_tokens, near.routed_tokens) == (P2, 48_000, 12_000)
    far = route(view(hits={P2: 48_000, R2: 57_600}), 60_000)
    assert (far.prefill_node, far.cached_tokens, far.uncached_tokens) == (R2, 57_600, 2400)


def test_profiles_are_asked_with_the_cached_prefix() -> None:
    asked: list[tuple[int, int]] = []

    def curious(num_tokens: int, num_cached_tokens: int = 0) -> float:
        asked.append((num_tokens, num_cached_tokens))
        return 1.0

    router = make_router(profiles={PD: curious})
    route(view(node(P1), node(D1), hits={P1: 6400}), 10_000, router=router)
    assert (3600, 6400) in asked


def test_the_queue_of_a_mixed_node_is_counted_by_the_mean_length_sent_there() -> None:
    router, m1 = make_router(), NodeId("m1")
    nodes = view(node(m1, num_active=7, queued_tokens=30_000))
    first, second = (route(nodes, 1000, router=router).predicted_ttft_s for _ in range(2))
    assert first == pytest.approx(h20(30_000) + h20(1000))
    assert second == pytest.approx(30 * h20(1000) + h20(1000))


def test_measured_rates_do_as_well() -> None:
    fast = [node(R1, prefill_tokens_per_s=20_000.0), node(P1, prefill_tokens_per_s=5000.0)]
    decision = route(view(*fast, node(D1)), 20_000, router=MaxWeightRouter(SPEC))
    assert (decision.offloaded, decision.predicted_ttft_s) == (True, pytest.approx(1.0))
    small = view(*fast, node(D1), rate_bps=1e9)
    assert not route(small, 2000, router=MaxWeightRouter(SPEC)).offloaded


def test_nothing_measured_is_routed_all_the_same_and_predicts_nothing() -> None:
    router = MaxWeightRouter(SPEC)
    unknown = view(rate_bps=None)
    assert route(unknown, 60_000, router=router).predicted_ttft_s is None
    # A queue still repels, and so does a link of the assumed rate.
    one_side = view(queued(P1, 1, 90_000), node(R1), node(D1), rate_bps=None)
    assert route(one_side, 60_000, router=router).offloaded
    assert not route(unknown, 1000, router=router).offloaded
    # A profile predicts, an assumed link does not.
    assert route(unknown, 60_000).offloaded
    assert route(unknown, 60_000).predicted_ttft_s is None
    assert route(unknown, 200).predicted_ttft_s is None or not route(unknown, 200).offloaded


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_junk_rates_count_as_unmeasured(rate: float) -> None:
    nodes = [node(n, prefill_tokens_per_s=rate) for n in (R1, P1)]
    junk = view(*nodes, node(D1), rate_bps=rate)
    plain = view(node(R1), node(P1), node(D1), rate_bps=None)
    for num_tokens in (500, 50_000):
        assert (
            route(junk, num_tokens, router=MaxWeightRouter(SPEC)).prefill_node
            == route(plain, num_tokens, router=MaxWeightRouter(SPEC)).prefill_node
        )


def test_a_dead_link_is_not_chosen_as_long_as_there_is_a_choice() -> None:
    router = make_router(is_link_down=lambda now: now >= 5)
    assert route(view(), 60_000, router=router).reason is RouteReason.CHEAPER_REMOTE
    decision = route(view(), 60_000, router=router, now=5.0)
    assert (decision.reason, decision.offloaded) == (RouteReason.LINK_DOWN, False)
    only = view(node(R1), node(D1))
    assert route(only, 60_000, router=router, now=5.0).offloaded


def test_where_one_side_cannot_the_reason_says_so() -> None:
    assert route(view(node(P1), node(D1)), 60_000).reason is RouteReason.REMOTE_DOWN
    assert route(view(node(R1), node(D1)), 200).reason is RouteReason.LOCAL_DOWN
    full = {"max_active": 2, "num_active": 2}
    crowded = view(node(R1, **full), node(P1), node(D1))
    decision = route(crowded, 100_000)
    assert (decision.reason, decision.prefill_node) == (RouteReason.REMOTE_FULL, P1)
    decision = route(view(node(R1), node(P1, **full), node(D1)), 200)
    assert (decision.reason, decision.prefill_node) == (RouteReason.LOCAL_DOWN, R1)
    everyone = view(node(R1, **full), node(P1, **full), node(D1))
    assert route(everyone, 60_000).reason is RouteReason.CHEAPER_REMOTE
    with pytest.raises(CapacityError):
        route(view(node(R1), node(P1)), 1000)


def test_ties_are_spread_and_repeatable() -> None:
    counts: Counter[NodeId] = Counter()
    rng, router = Random(3), make_router()
    four = view(*(node(NodeId(f"r{i}")) for i in range(4)), node(P1), node(D1))
    for _ in range(400):
        counts[route(four, 60_000, router=router, rng=rng).prefill_node] += 1
    assert all(60 <= counts[NodeId(f"r{i}")] <= 140 for i in range(4))
    assert route(four, 60_000, rng=Random(8)) == route(four, 60_000, rng=Random(8))


def test_t_is_the_length_at_which_an_uncached_request_would_switch() -> None:
    slow = view(rate_bps=1e9)
    router = make_router()
    assert router.threshold_tokens == 0
    t = route(slow, 500, router=router).threshold_tokens
    assert t == router.threshold_tokens
    assert 0 < t < 131_072
    assert not route(slow, t).offloaded
    assert route(slow, t + 1).offloaded
    # The last one stands until a period is over.
    fast = view(rate_bps=100e9)
    assert route(fast, 500, router=router, now=0.9).threshold_tokens == t
    assert route(fast, 500, router=router, now=1.0).threshold_tokens < t
    assert f"t={router.threshold_tokens}" in repr(router)


def test_t_rises_with_the_remote_queue() -> None:
    found = [
        route(view(queued(R1, n, 10_000), queued(P1, 8, 10_000), node(D1)), 500).threshold_tokens
        for n in (0, 18, 20, 22, 200)
    ]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == 1 << 20


def test_errors_of_prediction_are_counted() -> None:
    router = make_router()
    decision = route(view(), 20_000, router=router)
    assert decision.predicted_ttft_s is not None
    late = 2 * decision.predicted_ttft_s
    router.observe(RequestOutcome(decision=decision, ok=True, ttft_s=late), 0.0)
    router.observe(RequestOutcome(decision=decision, ok=False, ttft_s=late), 0.0)
    assert (router.prediction.count, router.prediction.mean) == (1, pytest.approx(0.5))
    assert "50%" in repr(router)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_per_s": -1.0},
        {"weight_per_s": math.inf},
        {"link_bps": 0.0},
        {"tokens_per_s": math.nan},
        {"period_s": -0.1},
        {"setup_s": -0.1},
        {"setup_s": math.inf},
    ],
)
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        MaxWeightSettings(**wrong)


def test_it_reads_the_ledger() -> None:
    ledger = LoadLedger.for_spec(SPEC)
    for name in (R1, P1, P2, D1):
        shape = node(name)
        ledger.node_up(
            NodeUp(
                node_id=name,
                cluster_id=shape.cluster_id,
                kind=shape.kind,
                role=shape.role,
                epoch=1,
            )
        )
    router = make_router()
    places: Counter[bool] = Counter()
    for i in range(60):
        request = RoutedRequest(request_id=RequestId(str(i)), num_tokens=30_000)
        decision = router.route(request, ledger, float(i), Random(i))
        ledger.admit(decision)
        places[decision.offloaded] += 1
    # An H200 does 30,000 tokens in 1.75 s, an H20 in 4.6 s, and there are two of those.
    assert 15 <= places[False] <= 35


def fetching(**options: object) -> MaxWeightRouter:
    settings = MaxWeightSettings(prefix_transfers=True, **options)  # type: ignore[arg-type]
    return make_router(settings=settings)


def moved(decision: RoutingDecision) -> tuple[NodeId | None, NodeId, int]:
    return decision.prefix_node, decision.prefill_node, decision.prefix_tokens


def pulling(**options: object) -> StillView:
    """R1 has most of a prompt and a long queue; P1 has nothing, and nothing to do."""
    nodes = (queued(R1, 40, 20_000), node(P1), node(D1))
    return view(*nodes, **{"hits": {R1: 51_200}, **options})  # type: ignore[arg-type]


def test_a_prefix_comes_over_the_link_where_that_is_cheaper_than_to_compute_it() -> None:
    decision = route(pulling(), 60_000, router=fetching())
    num_bytes = SPEC.kv_bytes(51_200)
    assert moved(decision) == (R1, P1, 51_200)
    assert not decision.offloaded
    assert (decision.cached_tokens, decision.uncached_tokens) == (51_200, 8800)
    assert (decision.prefix_bytes, decision.routed_tokens) == (num_bytes, 60_000)
    seconds = 0.05 + 8 * num_bytes / 100e9 + h20(8800)
    assert decision.predicted_ttft_s == pytest.approx(seconds)


def test_a_prefix_goes_to_prfaas_too_and_the_queue_hides_its_way() -> None:
    nodes = (queued(P1, 40, 20_000), queued(R1, 1, 8192), node(D1))
    decision = route(view(*nodes, hits={P1: 51_200}), 60_000, router=fetching())
    assert moved(decision) == (P1, R1, 51_200)
    assert decision.offloaded
    assert decision.predicted_ttft_s == pytest.approx(h200(8192) + h200(8800))


def test_no_prefix_moves_unless_that_is_allowed() -> None:
    for hits in ({R1: 51_200}, {D1: 51_200}):
        decision = route(pulling(hits=hits), 60_000)
        assert moved(decision) == (None, P1, 0)
        assert (decision.uncached_tokens, decision.prefix_bytes) == (60_000, 0)


def test_a_slow_or_busy_or_dead_link_carries_no_prefix() -> None:
    without_s, with_s = h20(60_000), h20(8800)
    num_bytes = SPEC.kv_bytes(51_200)
    slow_bps = 8 * num_bytes / (without_s - with_s)
    busy = round((without_s - with_s) * 100e9 / 8)
    assert moved(route(pulling(rate_bps=1.1 * slow_bps), 60_000, router=fetching()))[0] == R1
    assert moved(route(pulling(rate_bps=slow_bps), 60_000, router=fetching()))[0] is None
    assert moved(route(pulling(backlog_bytes=busy // 2), 60_000, router=fetching()))[0] == R1
    assert moved(route(pulling(backlog_bytes=busy), 60_000, router=fetching()))[0] is None
    dead = make_router(
        settings=MaxWeightSettings(prefix_transfers=True), is_link_down=lambda now: True
    )
    assert moved(route(pulling(), 60_000, router=dead))[0] is None
    near = pulling(hits={D1: 51_200}, rate_bps=slow_bps, backlog_bytes=busy)
    assert moved(route(near, 60_000, router=dead))[0] == D1
    assert moved(route(near, 60_000, router=fetching()))[0] == D1


def test_bytes_of_a_prefix_weigh_by_the_backlog_like_others() -> None:
    # Over this link it saves a second, but others wait for 4 s on it.
    saved_s, backlog_s = h20(60_000) - h20(8800) - 0.05, 4.0
    link_s = saved_s - backlog_s - 1.0
    assert 0.3 * link_s * backlog_s > 1.0
    rate_bps = 8 * SPEC.kv_bytes(51_200) / link_s
    waiting = pulling(rate_bps=rate_bps, backlog_bytes=round(backlog_s * rate_bps / 8))
    assert moved(route(waiting, 60_000, router=fetching(weight_per_s=0.0)))[0] == R1
    assert moved(route(waiting, 60_000, router=fetching()))[0] is None


@pytest.mark.parametrize(("source", "taker"), [(P2, P1), (D1, P1), (R2, R1)])
def test_inside_a_cluster_a_prefix_takes_only_its_setup(source: NodeId, taker: NodeId) -> None:
    # Of the two sides only that of the taker is short of nothing.
    loads = {n: queued(n, 60, 20_000) for n in (R1, R2, P1, P2)} | {taker: node(taker)}
    slow = view(*loads.values(), node(D1), hits={source: 51_200}, rate_bps=10e9)
    decision = route(slow, 60_000, router=fetching())
    assert moved(decision) == (source, taker, 51_200)
    assert decision.prefix_bytes == SPEC.kv_bytes(51_200)
    prefill_s = (h200 if taker == R1 else h20)(8800)
    shipping_s = 8 * SPEC.kv_bytes_delta(60_000, 0) / 10e9 if taker == R1 else 0.0
    assert decision.predicted_ttft_s == pytest.approx(0.05 + max(prefill_s, shipping_s))
    costly = fetching(setup_s=h20(60_000))
    assert moved(route(slow, 60_000, router=costly))[0] is None


def test_rows_that_the_taker_has_stay_and_the_state_travels() -> None:
    hits = {
        D1: NodeHit(num_cached_tokens=51_200, num_held_tokens=51_200),
        P1: NodeHit(num_cached_tokens=0, num_held_tokens=25_600),
    }
    decision = route(attrs.evolve(pulling(), hits=hits), 60_000, router=fetching())
    assert moved(decision) == (D1, P1, 51_200)
    assert decision.prefix_bytes == SPEC.kv_bytes_delta(51_200, 25_600)
    assert SPEC.kv_bytes_delta(51_200, 51_200) > 0


def test_a_prefix_without_a_state_or_from_an_excluded_node_or_no_longer_than_the_own_stays() -> (
    None
):
    rows = {n: NodeHit(num_cached_tokens=0, num_held_tokens=51_200) for n in (R1, D1)}
    assert moved(route(attrs.evolve(pulling(), hits=rows), 60_000, router=fetching()))[0] is None
    equal = pulling(hits={R1: 51_200, D1: 51_200, P1: 51_200})
    assert moved(route(equal, 60_000, router=fetching())) == (None, P1, 0)
    several = view(queued(R1, 40, 20_000), node(R2), node(P1), node(D1), hits={R1: 51_200})
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=60_000, excluded=frozenset({R1}))
    assert fetching().route(request, several, 0.0, Random(0)).prefix_node is None


def test_only_prefixes_longer_than_the_own_hit_are_offered() -> None:
    for own, lengths in ((12_800, [25_600, 51_200]), (25_600, [51_200]), (51_200, [])):
        hits = {P1: own, D1: 25_600, R1: 51_200, R2: 512}
        still = view(*(node(n) for n in (P1, D1, R1, R2)), hits=hits)
        request = RoutedRequest(request_id=RequestId("r"), num_tokens=60_000)
        survey = Survey(request, still, Random(0))
        sources = PrefixSources(SPEC, survey, link_bps=100e9, backlog_s=0.0, setup_s=0.05)
        (taker,) = survey.local
        assert [prefix.num_tokens for prefix in sources.offers(taker)] == lengths


def test_an_assumed_link_moves_prefixes_and_predicts_nothing() -> None:
    decision = route(pulling(rate_bps=None), 60_000, router=fetching())
    assert (moved(decision)[0], decision.predicted_ttft_s) == (R1, None)
    near = route(pulling(rate_bps=None, hits={D1: 51_200}), 60_000, router=fetching())
    assert moved(near)[0] == D1
    assert near.predicted_ttft_s == pytest.approx(0.05 + h20(8800))


def test_the_ledger_has_no_backlog_for_a_prefix_inside_a_cluster() -> None:
    ledger = LoadLedger.for_spec(SPEC)
    for name in (R1, P1, D1):
        up = node(name)
        ledger.node_up(
            NodeUp(node_id=name, cluster_id=up.cluster_id, kind=up.kind, role=up.role, epoch=1)
        )
    pulled = route(pulling(), 60_000, router=fetching())
    near = route(pulling(hits={D1: 51_200}), 60_000, router=fetching())
    ledger.admit(near)
    assert ledger.link_backlog_bytes() == 0
    ledger.admit(attrs.evolve(pulled, request_id=RequestId("pulled")))
    assert ledger.link_backlog_bytes() == pulled.prefix_bytes
    ledger.finished(near.request_id)
    assert ledger.link_backlog_bytes() == pulled.prefix_bytes
    ledger.check()


def test_prefixes_are_chosen_alike_every_time() -> None:
    nodes = [queued(n, 8, 9000) for n in (R1, R2, P1, P2)]
    rng = Random(4)
    for _ in range(50):
        hits = {n: 512 * rng.randrange(100) for n in (R1, R2, P1, P2, D1, D2)}
        still = view(*nodes, node(D1), node(D2), hits=hits)
        first, second = (route(still, 60_000, router=fetching(), rng=Random(1)) for _ in range(2))
        assert first == second
        if first.prefix_node is not None:
            assert first.prefix_node != first.prefill_node
            assert first.prefix_tokens == hits[first.prefix_node] > hits[first.prefill_node]


class Stages(ClusterView):
    """Prefill nodes as FIFO queues and a FIFO link, in continuous time; decoding takes none."""

    def __init__(self, num_remote: int, num_local: int, link_bps: float) -> None:
        names = [f"r{i}" for i in range(num_remote)] + [f"p{i}" for i in range(num_local)]
        self._kinds = {
            NodeId(n): ClusterKind.PRFAAS if n[0] == "r" else ClusterKind.PD for n in names
        }
        self.queues: dict[NodeId, deque[int]] = {n: deque() for n in self._kinds}
        self.free_s = dict.fromkeys(self._kinds, 0.0)
        self.link_free_s = 0.0
        self.rate_bps = link_bps
        self.backlog_bytes = 0
        self.events: list[tuple[float, int, NodeId, int]] = []

        self.num_tokens = dict.fromkeys(self._kinds, 0)
        self._idle = {n: node(n) for n in self._kinds} | {D1: node(D1)}
        self._loads = ClusterView.clusters(self)

    version = 1

    def nodes(self) -> Sequence[NodeView]:
        return list(self._idle.values())

    def clusters(self) -> Sequence[ClusterLoad]:
        return self._loads

    def hit(self, node_id: NodeId, request: RoutedRequest) -> NodeHit:
        return NodeHit()

    def link_bps(self) -> float:
        return self.rate_bps

    def link_backlog_bytes(self) -> int:
        return self.backlog_bytes

    def candidates(
        self, request: RoutedRequest, cluster_id: ClusterId, stage: Role, rng: Random
    ) -> Sequence[Candidate]:
        if stage is Role.DECODE:
            return [Candidate(node=self._idle[D1], hit=NodeHit())]
        names = [n for n in self._kinds if self._idle[n].cluster_id == cluster_id]
        name = min(names, key=self.num_tokens.__getitem__)
        load = {"num_active": len(self.queues[name]), "queued_tokens": self.num_tokens[name]}
        return [Candidate(node=attrs.evolve(self._idle[name], **load), hit=NodeHit())]

    def advance(self, now: float) -> None:
        while self.events and self.events[0][0] <= now:
            _, kind, node_id, amount = heapq.heappop(self.events)
            if kind:
                self.backlog_bytes -= amount
            else:
                self.num_tokens[node_id] -= self.queues[node_id].popleft()

    def admit(self, node_id: NodeId, num_tokens: int, now: float) -> float:
        """Returns when the request has its first token."""
        profile = h200 if self._kinds[node_id] is ClusterKind.PRFAAS else h20
        done = max(now, self.free_s[node_id]) + profile(num_tokens)
        self.free_s[node_id] = done
        self.queues[node_id].append(num_tokens)
        self.num_tokens[node_id] += num_tokens
        heapq.heappush(self.events, (done, 0, node_id, 0))
        if self._kinds[node_id] is ClusterKind.PRFAAS:
            num_bytes = SPEC.kv_bytes(num_tokens)
            done = max(done, self.link_free_s) + 8 * num_bytes / self.rate_bps
            self.link_free_s = done
            self.backlog_bytes += num_bytes
            heapq.heappush(self.events, (done, 1, node_id, num_bytes))
        return done


class Static(Router):
    """A fixed t, and inside a side the node that is free first."""

    def __init__(self, t: float) -> None:
        self._t = t

    @property
    def threshold_tokens(self) -> int:
        return int(self._t)

    def observe(self, outcome: RequestOutcome, now: float) -> None: ...

    def route(
        self, request: RoutedRequest, view: ClusterView, now: float, rng: Random
    ) -> RoutingDecision:
        raise NotImplementedError

    def choose(self, stages: Stages, num_tokens: int) -> NodeId:
        side = "r" if num_tokens > self._t else "p"
        return min((n for n in stages.queues if n[0] == side), key=stages.free_s.__getitem__)


def run(router: Router, stages: Stages, rate: float, num: int, seed: int = 1) -> list[float]:
    """TTFT of each of ``num`` Poisson arrivals of the paper's lengths."""
    rng, now, ttfts = Random(seed), 0.0, []
    for i in range(num):
        now += rng.expovariate(rate)
        num_tokens = 0
        while not 128 <= num_tokens <= 131_072:
            num_tokens = round(rng.lognormvariate(9.9, 1.0))
        stages.advance(now)
        if isinstance(router, Static):
            node_id = router.choose(stages, num_tokens)
        else:
            request = RoutedRequest(request_id=RequestId(str(i)), num_tokens=num_tokens)
            node_id = router.route(request, stages, now, rng).prefill_node
        ttfts.append(stages.admit(node_id, num_tokens, now) - now)
    return ttfts


def best_static(link_bps: float) -> tuple[float, float]:
    """(t, requests per second) at which the prefill stages saturate: the true limit."""
    deployment = Deployment(
        model=SPEC,
        remote_profile=H200,
        local_profile=H20,
        num_prfaas=4,
        num_prefill=3,
        num_decode=1000,
        egress_bps=link_bps,
        batch_size=20,
        decode_step_s=0.025,
        output_tokens=1024,
    )
    lengths = LogNormalLengths(mu=9.9, sigma=1.0, min_tokens=128, max_tokens=131_072)
    best = best_threshold(deployment, lengths, RateForm.EXPECTATION)
    return best.threshold_tokens, best.max_rate.requests_per_s


@pytest.mark.parametrize("link_bps", [100e9, 8e9])
def test_overloaded_it_serves_what_the_best_threshold_serves(link_bps: float) -> None:
    _, limit = best_static(link_bps)
    stages, num = Stages(4, 3, link_bps), 3000
    run(make_router(), stages, 1.1 * limit, num)
    end = max(stages.link_free_s, *stages.free_s.values())
    assert num / end >= 0.97 * limit


def test_near_the_limit_its_queues_stay_as_short_as_those_of_the_best_threshold() -> None:
    t, limit = best_static(100e9)
    num = 3000
    ours = run(make_router(), Stages(4, 3, 100e9), 0.9 * limit, num)
    best = run(Static(t), Stages(4, 3, 100e9), 0.9 * limit, num)
    assert sum(ours) <= 1.15 * sum(best)


def test_with_little_load_it_is_as_fast_as_the_best_threshold() -> None:
    t, limit = best_static(8e9)
    ours = run(make_router(), Stages(4, 3, 8e9), 0.2 * limit, 1000)
    best = run(Static(t), Stages(4, 3, 8e9), 0.2 * limit, 1000)
    assert sum(ours) <= sum(best)


def test_it_stands_a_link_that_the_best_threshold_of_before_does_not() -> None:
    t, _ = best_static(100e9)
    _, limit = best_static(3e9)
    ours = run(make_router(), Stages(4, 3, 3e9), 0.85 * limit, 2000)
    old = run(Static(t), Stages(4, 3, 3e9), 0.85 * limit, 2000)
    assert sum(ours[-500:]) / 500 < 20 < 100 < sum(old[-500:]) / 500
