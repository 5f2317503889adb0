from __future__ import annotations

from collections import Counter
from random import Random

import attrs
import pytest

from prfaas.core import BlockHash, ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.errors import CapacityError, ConfigError
from prfaas.policy import (
    GlobalPrefixIndex,
    LinkEstimator,
    LoadLedger,
    PredictionError,
    PrefillTime,
    RouterSettings,
    ThresholdController,
    ThresholdRouter,
)
from prfaas.seams import (
    CacheEvent,
    ClusterView,
    NodeDown,
    NodeHit,
    NodeUp,
    NodeView,
    RequestOutcome,
    RoutedRequest,
    RouteReason,
    RoutingDecision,
)
from prfaas.spec import preset
from prfaas.testing.router import StillView, check_router

SPEC = preset("paper-1t")
T = 19_000
R1, R2, P1, P2, D1, D2 = (NodeId(name) for name in ("r1", "r2", "p1", "p2", "d1", "d2"))


def make_router(*, threshold_tokens: int = T) -> ThresholdRouter:
    """A router whose band pins t."""
    band = (threshold_tokens, threshold_tokens)
    return ThresholdRouter(SPEC, ThresholdController(SPEC, band=band))


def node(node_id: NodeId, **load: object) -> NodeView:
    kind = ClusterKind.PRFAAS if node_id.startswith("r") else ClusterKind.PD
    role = {"d": Role.DECODE, "m": Role.MIXED}.get(node_id[0], Role.PREFILL)
    view = NodeView(
        node_id=node_id,
        cluster_id=ClusterId(kind.value),
        kind=kind,
        role=role,
        epoch=1,
        num_active=0,
        queued_tokens=0,
        prefill_tokens_per_s=None,
        decode_step_s=None,
    )
    return attrs.evolve(view, **load)  # type: ignore[arg-type]


def view(*nodes: NodeView, hits: dict[NodeId, int] | None = None, **options: object) -> StillView:
    everything = nodes or tuple(node(n) for n in (R1, R2, P1, P2, D1, D2))
    usable = {
        n: NodeHit(num_cached_tokens=hit, num_held_tokens=hit) for n, hit in (hits or {}).items()
    }
    return StillView(views=everything, hits=usable, **options)  # type: ignore[arg-type]


def route(
    view: StillView | LoadLedger,
    num_tokens: int,
    *,
    rng: Random | None = None,
    excluded: frozenset[NodeId] = frozenset(),
    hashes: tuple[BlockHash, ...] = (),
    name: str = "r",
) -> RoutingDecision:
    request = RoutedRequest(
        request_id=RequestId(name), num_tokens=num_tokens, excluded=excluded, granule_hashes=hashes
    )
    return make_router().route(request, view, 0.0, rng or Random(0))


def test_the_router_conforms() -> None:
    check_router(make_router)
    check_router(lambda: ThresholdRouter(SPEC, ThresholdController(SPEC, band=(1000, 50_000))))


class Bent(ThresholdRouter):
    """A router with one thing wrong."""

    shared_rng = Random(99)

    def __init__(self, flaw: str) -> None:
        super().__init__(SPEC, ThresholdController(SPEC, band=(T, T)))
        self.flaw = flaw

    def route(
        self, request: RoutedRequest, view: ClusterView, now: float, rng: Random
    ) -> RoutingDecision:
        if self.flaw == "takes the first of equals":
            rng = Random(0)
        elif self.flaw == "brings its own luck":
            rng = self.shared_rng
        elif self.flaw == "goes by names":
            rng = Random("".join(n.node_id for n in view.nodes()))
        elif self.flaw == "tries failed nodes again":
            request = attrs.evolve(request, excluded=frozenset())
        elif self.flaw == "leaks an error":
            try:
                return super().route(request, view, now, rng)
            except CapacityError as error:
                raise KeyError from error
        decision = super().route(request, view, now, rng)
        changes: dict[str, dict[str, object]] = {
            "dreams of hits": {
                "cached_tokens": decision.cached_tokens + 1,
                "uncached_tokens": decision.uncached_tokens - 1,
            },
            "cannot add": {"uncached_tokens": decision.uncached_tokens + 1},
            "gives a wrong reason": {"reason": RouteReason.REMOTE_DOWN},
            "ships to itself": {"predicted_bytes": 1},
            "ships less than nothing": {"predicted_bytes": -1},
            "counts on rows": {"held_tokens": 10**6},
            "decodes anywhere": {"decode_node": decision.prefill_node},
            "prefills anywhere": {"prefill_node": decision.decode_node},
            "invents nodes": {"decode_node": NodeId("nowhere")},
            "hides offloading": {"offloaded": not decision.offloaded},
            "names no view": {"view_version": 0},
            "mixes requests up": {"request_id": RequestId("other")},
            "hides t": {"threshold_tokens": decision.threshold_tokens + 1},
            "foresees the past": {"predicted_ttft_s": -1.0},
        }
        return attrs.evolve(decision, **changes.get(self.flaw, {}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "flaw",
    [
        "takes the first of equals",
        "brings its own luck",
        "goes by names",
        "tries failed nodes again",
        "dreams of hits",
        "cannot add",
        "gives a wrong reason",
        "ships to itself",
        "ships less than nothing",
        "counts on rows",
        "decodes anywhere",
        "prefills anywhere",
        "invents nodes",
        "hides offloading",
        "names no view",
        "mixes requests up",
        "hides t",
        "foresees the past",
    ],
)
def test_the_conformance_check_finds_flaws(flaw: str) -> None:
    with pytest.raises(AssertionError):
        check_router(lambda: Bent(flaw))


def test_the_conformance_check_wants_capacity_errors() -> None:
    check_router(lambda: Bent("none"))
    with pytest.raises(KeyError):
        check_router(lambda: Bent("leaks an error"))


def test_H40_the_boundary_is_local_and_one_token_more_is_remote() -> None:
    local, remote = route(view(), T), route(view(), T + 1)
    assert (local.reason, local.offloaded, local.routed_tokens) == (RouteReason.SHORT, False, T)
    assert (remote.reason, remote.offloaded, remote.routed_tokens) == (
        RouteReason.LONG,
        True,
        T + 1,
    )
    assert local.prefill_node in {P1, P2}
    assert remote.prefill_node in {R1, R2}


def test_H40_a_long_cached_follow_up_stays_local() -> None:
    decision = route(view(hits={P2: 100_000}), 101_000)
    assert (decision.reason, decision.prefill_node) == (RouteReason.SHORT, P2)
    assert (decision.cached_tokens, decision.uncached_tokens) == (100_000, 1000)
    assert decision.routed_tokens == 1000
    boundary = view(hits={P2: 100_000 - T})
    assert route(boundary, 100_000).offloaded is False
    assert route(boundary, 100_001).offloaded is True


def test_the_caches_of_the_clusters_are_judged_apart() -> None:
    decision = route(view(hits={R2: 60_000, P1: 6400}), 64_000)
    assert (decision.reason, decision.routed_tokens) == (RouteReason.LONG, 57_600)
    assert (decision.prefill_node, decision.cached_tokens) == (R2, 60_000)
    assert decision.uncached_tokens == 4000


def test_the_length_is_that_of_the_best_local_hit_even_when_its_node_is_busy() -> None:
    busy = view(node(P1, queued_tokens=10**6), node(P2), node(D1), node(R1), hits={P1: 100_032})
    decision = route(busy, 101_000)
    assert (decision.reason, decision.routed_tokens) == (RouteReason.SHORT, 968)
    assert (decision.prefill_node, decision.uncached_tokens) == (P2, 101_000)


def test_a_hit_of_a_decode_node_or_a_down_node_does_not_shorten_the_request() -> None:
    hits = {D1: 50_000, NodeId("p9"): 50_000}
    decision = route(view(hits=hits), 51_000)
    assert (decision.offloaded, decision.routed_tokens) == (True, 51_000)


def test_the_decode_node_has_the_fewest_requests_then_the_most_rows() -> None:
    d1, d2 = node(D1, num_active=1), node(D2)
    assert route(view(node(P1), d1, d2, hits={D1: 9000}), 10_000).decode_node == D2
    equal = view(node(P1), node(D1), node(D2), hits={D2: 9000})
    assert {route(equal, 10_000, rng=Random(i)).decode_node for i in range(20)} == {D2}


def test_only_rows_that_the_decode_node_lacks_are_predicted_to_travel() -> None:
    decision = route(view(hits={D1: 6400}), 64_000)
    assert (decision.decode_node, decision.held_tokens) == (D1, 6400)
    assert decision.predicted_bytes == SPEC.kv_bytes_delta(64_000, 6400)
    assert decision.predicted_bytes < SPEC.kv_bytes(64_000)


def test_a_mixed_node_prefills_what_it_decodes_and_ships_nothing() -> None:
    m1, m2 = NodeId("m1"), NodeId("m2")
    decision = route(view(node(m1), node(m2), hits={m2: 640}), 1000)
    assert decision.decode_node == decision.prefill_node == m2
    assert decision.predicted_bytes == 0
    assert decision.cached_tokens == 640


def test_H37_the_busy_node_with_an_empty_cache_loses() -> None:
    for hits in ({P2: 6400}, {}):
        choice = view(node(P1, queued_tokens=50_000), node(P2), node(D1), hits=hits)
        assert route(choice, 10_000).prefill_node == P2


def test_H37_load_counts_in_tokens_not_in_requests() -> None:
    one_long = node(P1, num_active=1, queued_tokens=100_000)
    ten_short = node(P2, num_active=10, queued_tokens=1000)
    assert route(view(one_long, ten_short, node(D1)), 5000).prefill_node == P2
    one_long, ten_short = attrs.evolve(one_long, node_id=R1), attrs.evolve(ten_short, node_id=R2)
    prfaas = {"kind": ClusterKind.PRFAAS, "cluster_id": ClusterId("prfaas")}
    remote = [attrs.evolve(n, **prfaas) for n in (one_long, ten_short)]
    assert route(view(*remote, node(P1), node(D1)), 50_000).prefill_node == R2


def test_a_cache_attracts_as_far_as_it_saves_more_than_the_queue_costs() -> None:
    def chosen(queued_tokens: int) -> NodeId:
        nodes = node(R1, queued_tokens=queued_tokens), node(R2), node(P1), node(D1)
        return route(view(*nodes, hits={R1: 32_000}), 64_000).prefill_node

    assert chosen(31_999) == R1
    assert chosen(32_001) == R2


def test_H37_misses_are_spread_over_equal_nodes() -> None:
    rng = Random(4)
    four = view(*(node(NodeId(f"p{i}")) for i in range(4)), node(D1), node(D2))
    counts = Counter(route(four, 1000, rng=rng).prefill_node for _ in range(400))
    assert len(counts) == 4
    assert all(60 <= count <= 140 for count in counts.values())
    decoders = Counter(route(four, 1000, rng=rng).decode_node for _ in range(400))
    assert all(140 <= decoders[d] <= 260 for d in (D1, D2))
    remote = view(*(node(NodeId(f"r{i}")) for i in range(4)), node(P1), node(D1))
    counts = Counter(route(remote, 50_000, rng=rng).prefill_node for _ in range(400))
    assert all(60 <= counts[NodeId(f"r{i}")] <= 140 for i in range(4))


def test_without_prfaas_nodes_long_requests_stay_local_and_say_so() -> None:
    decision = route(view(node(P1), node(D1)), 64_000)
    assert (decision.reason, decision.offloaded) == (RouteReason.REMOTE_DOWN, False)
    excluded = frozenset({R1, R2})
    assert route(view(), 64_000, excluded=excluded).reason is RouteReason.REMOTE_DOWN


def test_without_local_prefill_short_requests_go_remote_and_say_so() -> None:
    remote_only = view(node(R1), node(D1))
    decision = route(remote_only, 100)
    assert (decision.reason, decision.offloaded) == (RouteReason.LOCAL_DOWN, True)
    assert route(remote_only, 64_000).reason is RouteReason.LONG
    assert route(view(), 100, excluded=frozenset({P1, P2})).reason is RouteReason.LOCAL_DOWN


def test_excluded_nodes_are_neither_used_nor_counted_on() -> None:
    hits = {P1: 60_032, D1: 60_032}
    decision = route(view(hits=hits), 61_000, excluded=frozenset({P1, D1}))
    assert (decision.decode_node, decision.routed_tokens) == (D2, 61_000)
    assert decision.held_tokens == 0
    decision = route(view(hits={R1: 60_032}), 61_000, excluded=frozenset({R1}))
    assert (decision.prefill_node, decision.cached_tokens) == (R2, 0)


@pytest.mark.parametrize(
    ("names", "lack", "num_up"),
    [
        ((), "decode", 0),
        ((R1, R2, P1), "decode", 3),
        ((D1, D2), "prefill", 2),
        ((R1,), "decode", 1),
    ],
)
def test_no_room_is_an_error_with_counts(names: tuple[NodeId, ...], lack: str, num_up: int) -> None:
    nodes = StillView(views=[node(n) for n in names])
    message = f"no node can {lack} request 'r': {num_up} nodes are up, 0 of them excluded"
    with pytest.raises(CapacityError, match=message):
        route(nodes, 1000)


def test_no_room_after_exclusions_says_how_many() -> None:
    with pytest.raises(CapacityError, match="6 nodes are up, 2 of them excluded"):
        route(view(), 1000, excluded=frozenset({D1, D2}))


def test_a_refusal_changes_nothing() -> None:
    router = ThresholdRouter(SPEC, ThresholdController(SPEC, band=(1, 131_072)))
    rng, before = Random(0), router.threshold_tokens
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=1000)
    with pytest.raises(CapacityError):
        router.route(request, view(node(R1), node(P1), node(P2)), 0.0, rng)
    assert router.threshold_tokens == before
    assert rng.random() == Random(0).random()
    router.route(request, view(node(R1), node(P1), node(P2), node(D1)), 0.0, rng)
    assert router.threshold_tokens != before


def test_a_request_is_decoded_where_it_can_be_prefilled() -> None:
    far = [
        attrs.evolve(node(n), cluster_id=ClusterId("far"), num_active=9)
        for n in (NodeId("p8"), NodeId("d8"))
    ]
    lone = node(D1)
    decision = route(view(lone, *far), 64_000)
    assert (decision.decode_node, decision.prefill_node) == ("d8", "p8")
    decision = route(view(lone, *far, node(R1)), 64_000)
    assert (decision.decode_node, decision.prefill_node) == (D1, R1)
    decision = route(view(lone, *far, node(R1)), 100)
    assert (decision.decode_node, decision.reason) == (D1, RouteReason.LOCAL_DOWN)


def test_nothing_is_predicted_from_rates_that_were_not_measured() -> None:
    assert route(view(), 64_000).predicted_ttft_s is None
    assert route(view(), 100).predicted_ttft_s is None
    fast = [node(n, prefill_tokens_per_s=10_000.0) for n in (R1, P1)]
    assert route(view(*fast, node(D1)), 64_000).predicted_ttft_s is None, "the link is unknown"


def test_ttft_is_queue_then_the_slower_of_prefill_and_transfer() -> None:
    nodes = [node(n, prefill_tokens_per_s=10_000.0, queued_tokens=5000) for n in (R1, P1)]
    whole = view(*nodes, node(D1), rate_bps=1e9)
    assert route(whole, 10_000).predicted_ttft_s == pytest.approx(0.5 + 1.0)
    decision = route(whole, 20_000)
    transfer_s = 8 * decision.predicted_bytes / 1e9
    assert transfer_s > 2.0
    assert decision.predicted_ttft_s == pytest.approx(0.5 + transfer_s)
    fast_link = attrs.evolve(whole, rate_bps=1e12)
    assert route(fast_link, 20_000).predicted_ttft_s == pytest.approx(0.5 + 2.0)


class Spy(ThresholdController):
    """Notes what a router tells it, and knows of the link what it is told."""

    def __init__(self, t: int = T, *, utilisation: float | None = 0.1) -> None:
        super().__init__(SPEC, band=(t, t))
        self.lengths: list[int] = []
        self.offered: list[tuple[int, float]] = []
        self.is_down = False
        self.load = utilisation

    def observe(self, uncached_tokens: int) -> None:
        self.lengths.append(uncached_tokens)

    def observe_offered(self, num_bytes: int, now: float) -> None:
        self.offered.append((num_bytes, now))

    def utilisation(self, now: float) -> float | None:
        return self.load

    def is_link_down(self, now: float) -> bool:
        return self.is_down


def test_outcomes_feed_the_lengths_failed_ones_too() -> None:
    spy = Spy()
    router = ThresholdRouter(SPEC, spy)
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=101_000)
    decision = router.route(request, view(hits={P2: 100_000}), 0.0, Random(0))
    router.observe(RequestOutcome(decision=decision, ok=True), 0.0)
    router.observe(RequestOutcome(decision=decision, ok=False), 0.0)
    assert spy.lengths == [1000, 1000]


def test_the_controller_hears_what_is_offered_to_the_link() -> None:
    spy = Spy()
    router = ThresholdRouter(SPEC, spy)
    for num_tokens in (10_000, 64_000):
        request = RoutedRequest(request_id=RequestId("r"), num_tokens=num_tokens)
        router.route(request, view(hits={D1: 6400}), 3.0, Random(0))
    assert spy.offered == [(SPEC.kv_bytes_delta(64_000, 6400), 3.0)]


def make_ledger(*names: NodeId) -> LoadLedger:
    ledger = LoadLedger(
        GlobalPrefixIndex(SPEC.groups, granule_tokens=SPEC.granule_tokens), LinkEstimator()
    )
    for name in names:
        bring_up(ledger, name)
    return ledger


def bring_up(ledger: LoadLedger, name: NodeId, *, epoch: int = 1) -> None:
    n = node(name)
    ledger.node_up(
        NodeUp(node_id=name, cluster_id=n.cluster_id, kind=n.kind, role=n.role, epoch=epoch)
    )


def fill(ledger: LoadLedger, name: NodeId, hashes: tuple[BlockHash, ...]) -> None:
    for sequence, group in enumerate(SPEC.groups, 1):
        event = CacheEvent(sequence=sequence, group_id=group.group_id, stored=hashes)
        ledger.cache_event(name, 1, event)


HASHES = tuple(BlockHash(i.to_bytes(16, "big")) for i in range(100))


def test_H36_a_shared_prefix_does_not_pile_requests_on_one_worker() -> None:
    workers = [NodeId(f"p{i}") for i in range(8)]
    ledger = make_ledger(*workers, D1, D2)
    fill(ledger, workers[0], HASHES)
    rng, counts, running = Random(1), Counter[NodeId](), list[RoutingDecision]()
    for i in range(480):
        decision = route(ledger, 6401 + 2000, rng=rng, hashes=HASHES, name=f"r{i}")
        ledger.admit(decision)
        counts[decision.prefill_node] += 1
        running.append(decision)
        if len(running) > 40:
            done = running.pop(rng.randrange(len(running)))
            ledger.prefilled(done.request_id)
            ledger.finished(done.request_id)
    assert sum(counts.values()) == 480
    assert max(counts.values()) <= 480 * 0.45
    for decision in running:
        ledger.finished(decision.request_id)
    ledger.check()
    assert all(n.num_active == n.queued_tokens == 0 for n in ledger.nodes())


def test_H38_a_dead_worker_loses_its_attraction() -> None:
    ledger = make_ledger(P1, P2, D1)
    fill(ledger, P1, HASHES)
    assert route(ledger, 6500, hashes=HASHES).prefill_node == P1
    assert route(ledger, 6500, hashes=HASHES).cached_tokens == 6400
    ledger.node_down(NodeDown(node_id=P1, epoch=1))
    fill(ledger, P1, HASHES)
    decision = route(ledger, 6500, hashes=HASHES)
    assert (decision.prefill_node, decision.cached_tokens) == (P2, 0)
    bring_up(ledger, P1, epoch=2)
    assert route(ledger, 6500, hashes=HASHES).cached_tokens == 0


def test_H39_no_hit_is_predicted_where_the_state_is_missing() -> None:
    ledger = make_ledger(P1, R1, D1)
    rows, state = SPEC.groups
    ledger.cache_event(P1, 1, CacheEvent(sequence=1, group_id=rows.group_id, stored=HASHES))
    decision = route(ledger, T + 3200, hashes=HASHES)
    assert (decision.reason, decision.routed_tokens) == (RouteReason.LONG, T + 3200)
    at_50 = CacheEvent(sequence=2, group_id=state.group_id, stored=(HASHES[49],))
    ledger.cache_event(P1, 1, at_50)
    decision = route(ledger, T + 3200, hashes=HASHES)
    assert (decision.reason, decision.cached_tokens) == (RouteReason.SHORT, 3200)
    ledger.cache_event(P1, 1, attrs.evolve(at_50, sequence=4))
    assert ledger.needs_resync(P1)
    assert route(ledger, T + 3200, hashes=HASHES).reason is RouteReason.LONG


def test_decisions_name_the_view_that_they_read() -> None:
    ledger = make_ledger(P1, D1)
    assert route(ledger, 100).view_version == ledger.version
    ledger.admit(route(ledger, 100))
    assert route(ledger, 100, name="s").view_version == ledger.version


def spied(
    view: ClusterView,
    num_tokens: int,
    spy: Spy | None = None,
    *,
    settings: RouterSettings | None = None,
    profiles: dict[ClusterId, PrefillTime] | None = None,
    rng: Random | None = None,
) -> RoutingDecision:
    router = ThresholdRouter(SPEC, spy or Spy(), settings=settings, profiles=profiles)
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=num_tokens)
    return router.route(request, view, 0.0, rng or Random(0))


def test_a_dead_link_leaves_long_requests_local() -> None:
    spy = Spy()
    spy.is_down = True
    decision = spied(view(), 64_000, spy)
    assert (decision.reason, decision.offloaded) == (RouteReason.LINK_DOWN, False)
    assert spied(view(), 100, spy).reason is RouteReason.SHORT
    assert spy.offered == []
    # Without a PD node that can prefill there is nothing to lose.
    assert spied(view(node(R1), node(D1)), 64_000, spy).reason is RouteReason.LONG


def test_with_a_dead_link_the_decode_node_is_where_prefill_is() -> None:
    far = [
        attrs.evolve(node(n), cluster_id=ClusterId("far"), num_active=9)
        for n in (NodeId("p8"), NodeId("d8"))
    ]
    spy = Spy()
    both = view(node(R1), node(D1), *far)
    assert spied(both, 64_000, spy).decode_node == D1
    spy.is_down = True
    decision = spied(both, 64_000, spy)
    assert (decision.decode_node, decision.prefill_node) == ("d8", "p8")


def full(node_id: NodeId, **load: object) -> NodeView:
    return node(node_id, num_active=3, max_active=3, **load)


def test_full_prfaas_nodes_leave_long_requests_local() -> None:
    decision = route(view(full(R1), full(R2), node(P1), node(D1)), 64_000)
    assert (decision.reason, decision.prefill_node) == (RouteReason.REMOTE_FULL, P1)
    one = route(view(full(R1), node(R2, queued_tokens=10**6), node(P1), node(D1)), 64_000)
    assert (one.reason, one.prefill_node) == (RouteReason.LONG, R2)
    both = route(view(full(R1), full(P1), node(D1)), 64_000)
    assert (both.reason, both.prefill_node) == (RouteReason.LONG, R1)


def test_full_nodes_of_a_side_are_passed_over() -> None:
    assert route(view(full(P1), node(P2, queued_tokens=10**6), node(D1)), 100).prefill_node == P2
    assert route(view(full(P1), node(D1)), 100).reason is RouteReason.SHORT
    busy = node(D2, num_active=9)
    assert route(view(node(P1), full(D1), busy), 100).decode_node == D2


def test_draining_nodes_take_nothing() -> None:
    leaving = {"is_draining": True}
    decision = route(view(node(P1, **leaving), node(P2, queued_tokens=9), node(D1)), 100)
    assert decision.prefill_node == P2
    decision = route(view(node(R1, **leaving), node(P1), node(D1)), 64_000)
    assert decision.reason is RouteReason.REMOTE_DOWN
    decision = route(view(node(P1), node(D1, **leaving), node(D2, num_active=5)), 100)
    assert decision.decode_node == D2


@pytest.mark.parametrize(
    ("nodes", "num_tokens", "is_down", "why"),
    [
        ((node(P1), node(D1)), 64_000, False, "remote_down"),
        ((node(R1), node(D1)), 100, False, "local_down"),
        ((full(R1), node(P1), node(D1)), 64_000, False, "remote_full"),
        ((node(R1), node(P1), node(D1)), 64_000, True, "link_down"),
    ],
)
def test_a_strict_router_refuses_instead_of_falling_back(
    nodes: tuple[NodeView, ...], num_tokens: int, is_down: bool, why: str
) -> None:
    spy = Spy()
    spy.is_down = is_down
    assert spied(view(*nodes), num_tokens, spy).reason.value == why
    strict = RouterSettings(strict=True)
    with pytest.raises(CapacityError, match=why):
        spied(view(*nodes), num_tokens, spy, settings=strict)
    spy.is_down = False
    whole = view()
    assert spied(whole, 64_000, spy, settings=strict).reason is RouteReason.LONG
    assert spied(whole, 100, spy, settings=strict).reason is RouteReason.SHORT


def per_token(seconds: float, extra_s: float = 0.0) -> PrefillTime:
    return lambda num_tokens, num_cached_tokens=0, /: extra_s + num_tokens * seconds


FAST, SLOW = per_token(5e-5), per_token(1e-4)
PROFILES = {ClusterId("prfaas"): FAST, ClusterId("pd"): SLOW}


def test_among_prfaas_clusters_the_predicted_finish_counts() -> None:
    far = ClusterId("far")
    r8 = node(NodeId("r8"), cluster_id=far, queued_tokens=30_000, num_active=1)
    nodes = view(node(R1), r8, node(P1), node(D1))
    assert spied(nodes, 64_000).prefill_node == R1
    swift = {**PROFILES, far: per_token(1e-5)}
    # 94,000 tokens at 10 us against 64,000 at 50 us.
    assert spied(nodes, 64_000, profiles=swift).prefill_node == "r8"
    assert spied(nodes, 64_000, profiles={far: per_token(1e-5)}).prefill_node == R1


def test_a_queue_is_as_long_as_its_prompts_take() -> None:
    prompt_s = per_token(1e-4, extra_s=1.0)
    profiles = {ClusterId("pd"): prompt_s}
    ten = node(P1, num_active=10, queued_tokens=10_000)
    assert spied(view(ten, node(D1)), 1000, profiles=profiles).predicted_ttft_s == pytest.approx(
        10 * 1.1 + 1.1
    )
    # Ten short prompts cost more than two long ones with more tokens.
    two = node(P2, num_active=2, queued_tokens=12_000)
    assert spied(view(ten, two, node(D1)), 1000, profiles=profiles).prefill_node == P2
    assert spied(view(ten, two, node(D1)), 1000).prefill_node == P1


def test_the_queue_of_a_mixed_node_is_counted_by_the_mean_length_sent_there() -> None:
    profiles = {ClusterId("pd"): per_token(1e-4, extra_s=1.0)}
    router = ThresholdRouter(SPEC, Spy(), profiles=profiles)

    def ttft_s(queued_tokens: int) -> float | None:
        m1 = node(NodeId("m1"), num_active=7, queued_tokens=queued_tokens)
        request = RoutedRequest(request_id=RequestId("r"), num_tokens=1000)
        return router.route(request, view(m1), 0.0, Random(0)).predicted_ttft_s

    assert ttft_s(3000) == pytest.approx(1.3 + 1.1)
    assert ttft_s(3000) == pytest.approx(3 * 1.1 + 1.1)


def test_profiles_know_the_cached_prefix_and_the_link_its_backlog() -> None:
    def prefill_s(num_tokens: int, num_cached_tokens: int = 0, /) -> float:
        return num_tokens * 1e-4 + num_cached_tokens * 1e-5

    profiles = {ClusterId("pd"): prefill_s, ClusterId("prfaas"): prefill_s}
    cached = view(hits={P1: 6400}, rate_bps=1e9)
    decision = spied(cached, 10_000, profiles=profiles)
    assert decision.predicted_ttft_s == pytest.approx(0.36 + 0.064)
    clear = spied(view(rate_bps=1e9), 64_000, profiles=profiles)
    waiting = spied(view(rate_bps=1e9, backlog_bytes=10**9), 64_000, profiles=profiles)
    transfer_s = 8 * SPEC.kv_bytes(64_000) / 1e9
    assert clear.predicted_ttft_s == pytest.approx(max(6.4, transfer_s))
    assert waiting.predicted_ttft_s == pytest.approx(8 + transfer_s)


def test_a_node_that_measured_nothing_is_predicted_by_its_cluster() -> None:
    router = ThresholdRouter(SPEC, Spy())
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=1000)
    known = view(node(P1, prefill_tokens_per_s=1e4), node(D1))
    assert router.route(request, known, 0.0, Random(0)).predicted_ttft_s == pytest.approx(0.1)
    new = view(node(P2), node(D1))
    assert router.route(request, new, 0.0, Random(0)).predicted_ttft_s == pytest.approx(0.1)


def test_errors_of_prediction_are_measured() -> None:
    router = ThresholdRouter(SPEC, Spy(), profiles=PROFILES)
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=10_000)
    decision = router.route(request, view(), 0.0, Random(0))
    assert decision.predicted_ttft_s == pytest.approx(1.0)
    assert "nothing compared" in repr(router)
    for ttft_s in (2.0, 1.0, 0.5):
        router.observe(RequestOutcome(decision=decision, ok=True, ttft_s=ttft_s), 0.0)
    router.observe(RequestOutcome(decision=decision, ok=False, ttft_s=9.0), 0.0)
    router.observe(RequestOutcome(decision=decision, ok=True), 0.0)
    unknown = attrs.evolve(decision, predicted_ttft_s=None)
    router.observe(RequestOutcome(decision=unknown, ok=True, ttft_s=9.0), 0.0)
    found = router.prediction
    assert (found.count, found.p90) == (3, pytest.approx(1.0))
    assert found.mean == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert found.bias == pytest.approx((-0.5 + 0.0 + 1.0) / 3)
    assert "mean 50%, P90 100%, bias +17%" in repr(router)


def test_the_p90_is_that_of_the_latest_ones() -> None:
    found = PredictionError(window=10)
    assert (found.mean, found.p90, found.bias) == (None, None, None)
    decision = attrs.evolve(route(view(), 100), predicted_ttft_s=1.0)
    for error in (99, *range(1, 11)):
        outcome = RequestOutcome(decision=decision, ok=True, ttft_s=1 / (1 + error))
        found.observe(outcome)
    assert (found.count, found.p90) == (11, pytest.approx(9.0))
    with pytest.raises(ConfigError, match="window is 0"):
        PredictionError(window=0)


def aimed(slo_s: float, **options: object) -> RouterSettings:
    return RouterSettings(ttft_slo_s=slo_s, **options)  # type: ignore[arg-type]


def test_a_request_that_misses_its_slo_moves_to_where_it_meets_it() -> None:
    # Short: 2 s of queue at P1. Remote: nothing queued, and half a second.
    crowded = view(node(P1, num_active=1, queued_tokens=20_000), node(R1), node(D1), rate_bps=100e9)
    stays = spied(crowded, 10_000, profiles=PROFILES)
    assert (stays.reason, stays.predicted_ttft_s) == (RouteReason.SHORT, pytest.approx(3.0))
    moved = spied(crowded, 10_000, settings=aimed(2.5), profiles=PROFILES)
    assert (moved.reason, moved.offloaded) == (RouteReason.CHEAPER_REMOTE, True)
    assert moved.predicted_ttft_s == pytest.approx(0.5)
    assert moved.routed_tokens == 10_000
    fine = spied(crowded, 10_000, settings=aimed(3.5), profiles=PROFILES)
    assert fine.reason is RouteReason.SHORT
    hopeless = spied(crowded, 10_000, settings=aimed(0.4), profiles=PROFILES)
    assert hopeless.reason is RouteReason.SHORT
    queue = node(R1, num_active=1, queued_tokens=100_000)
    far = view(queue, node(P1), node(D1), rate_bps=100e9)
    home = spied(far, 20_000, settings=aimed(2.5), profiles=PROFILES)
    assert (home.reason, home.prefill_node) == (RouteReason.CHEAPER_LOCAL, P1)


def test_nothing_moves_over_a_dead_or_unknown_link_or_to_a_full_side() -> None:
    queue = node(P1, num_active=1, queued_tokens=20_000)
    spy = Spy()
    spy.is_down = True
    crowded = view(queue, node(R1), node(D1), rate_bps=100e9)
    assert spied(crowded, 10_000, spy, settings=aimed(2.5), profiles=PROFILES).offloaded is False
    unknown = view(queue, node(R1), node(D1))
    assert spied(unknown, 10_000, settings=aimed(2.5), profiles=PROFILES).offloaded is False
    none_free = view(queue, full(R1), node(D1), rate_bps=100e9)
    assert spied(none_free, 10_000, settings=aimed(2.5), profiles=PROFILES).offloaded is False


def test_under_overload_t_decides_over_all_but_a_share() -> None:
    router = ThresholdRouter(SPEC, Spy(), settings=aimed(2.5), profiles=PROFILES)
    crowded = view(node(P1, num_active=1, queued_tokens=20_000), node(R1), node(D1), rate_bps=100e9)
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=10_000)
    moved = [router.route(request, crowded, 0.0, Random(0)).offloaded for _ in range(1020)]
    # The burst of 10 s is 20 moves of 0.5 s; later each earns 0.1 s, so every fifth moves.
    assert all(moved[:20])
    assert sum(moved[20:]) == pytest.approx(200, abs=8)
    none = aimed(2.5, moved_share=0.0, moved_burst_s=0.0)
    assert not spied(crowded, 10_000, settings=none, profiles=PROFILES).offloaded


def test_where_both_meet_the_slo_the_cheaper_one_wins_if_it_is_idle() -> None:
    def reason(num_tokens: int, price: float, nodes: StillView, slo_s: float = 9.0) -> RouteReason:
        prices = {ClusterId("prfaas"): price, ClusterId("pd"): 1.0}
        settings = aimed(slo_s, prices=prices)
        return spied(nodes, num_tokens, settings=settings, profiles=PROFILES).reason

    idle = view(node(R1), node(P1), node(D1), rate_bps=100e9)
    # PRFAAS is twice as fast.
    assert reason(10_000, 1.9, idle) is RouteReason.CHEAPER_REMOTE
    assert reason(10_000, 2.1, idle) is RouteReason.SHORT
    assert reason(40_000, 1.9, idle) is RouteReason.LONG
    assert reason(40_000, 2.1, idle) is RouteReason.CHEAPER_LOCAL
    assert reason(40_000, 2.1, idle, slo_s=3.9) is RouteReason.LONG
    at_work = view(node(R1), node(P1, num_active=1, queued_tokens=100), node(D1), rate_bps=100e9)
    assert reason(40_000, 2.1, at_work) is RouteReason.LONG
    unpriced = aimed(9.0, prices={ClusterId("pd"): 1.0})
    assert spied(idle, 40_000, settings=unpriced, profiles=PROFILES).reason is RouteReason.LONG


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"setup_s": -1.0}, "setup_s is -1.0"),
        ({"ttft_slo_s": 0.0}, "ttft_slo_s is 0.0"),
        ({"prices": {ClusterId("pd"): 1.0}}, "prices are given without ttft_slo_s"),
        ({"ttft_slo_s": 1.0, "prices": {ClusterId("pd"): -1.0}}, "price of cluster 'pd' is -1.0"),
        ({"moved_share": 1.5}, "moved_share is 1.5"),
        ({"moved_burst_s": float("inf")}, "moved_burst_s inf"),
    ],
)
def test_settings_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterSettings(**options)  # type: ignore[arg-type]
