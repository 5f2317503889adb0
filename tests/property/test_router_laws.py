"""Laws that every state obeys, for the router with a threshold and the one without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import attrs
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core import BlockHash, ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.policy import (
    LoadLedger,
    MaxWeightRouter,
    PrefillTime,
    RouterSettings,
    ThresholdController,
    ThresholdRouter,
)
from prfaas.seams import (
    CacheEvent,
    ClusterView,
    NodeHit,
    NodeUp,
    NodeView,
    RoutedRequest,
    Router,
    RoutingDecision,
)
from prfaas.spec import preset
from prfaas.testing.router import StillView

SPEC = preset("paper-1t")
GRANULE = SPEC.granule_tokens
PRFAAS, FAR, PD = ClusterId("prfaas"), ClusterId("far"), ClusterId("pd")

loads = st.integers(0, 5).flatmap(
    lambda num: st.tuples(st.just(num), st.integers(200 * num, 40_000 * num))
)
link_rates = st.floats(1e8, 1e11)
lengths = st.integers(1, 150_000)
thresholds = st.integers(0, 100_000)


def remote_s(num_tokens: int, num_cached_tokens: int = 0, /) -> float:
    return 0.4 + num_tokens / 20_000 + (num_tokens / 150_000) ** 2 + num_cached_tokens * 1e-7


def local_s(num_tokens: int, num_cached_tokens: int = 0, /) -> float:
    return 0.5 + num_tokens / 8000 + 4 * (num_tokens / 150_000) ** 2 + num_cached_tokens * 2e-7


PROFILES: dict[ClusterId, PrefillTime] = {PRFAAS: remote_s, FAR: remote_s, PD: local_s}


class Watched(ThresholdController):
    """A controller with a fixed t and a measured load of the link, in bits per second."""

    def __init__(self, t: int, offered_bps: float = 0.0, link_bps: float | None = None) -> None:
        super().__init__(SPEC, band=(t, t))
        self._load = None if link_bps is None else offered_bps / link_bps

    def utilisation(self, now: float) -> float | None:
        return self._load


def threshold_router(t: int) -> ThresholdRouter:
    return ThresholdRouter(SPEC, Watched(t), profiles=PROFILES)


def moving_router(t: int, link_bps: float) -> ThresholdRouter:
    """One that moves prefixes, with a link that is nearly idle."""
    return ThresholdRouter(
        SPEC,
        Watched(t, 1e6, link_bps),
        settings=RouterSettings(prefix_transfers=True),
        profiles=PROFILES,
    )


def aiming_router(t: int) -> ThresholdRouter:
    return ThresholdRouter(
        SPEC, Watched(t), settings=RouterSettings(ttft_slo_s=5.0), profiles=PROFILES
    )


def max_weight_router(_: int = 0) -> MaxWeightRouter:
    return MaxWeightRouter(SPEC, profiles=PROFILES)


def node(name: str, cluster_id: ClusterId, role: Role, num: int, queued: int) -> NodeView:
    return NodeView(
        node_id=NodeId(name),
        cluster_id=cluster_id,
        kind=ClusterKind.PD if cluster_id == PD else ClusterKind.PRFAAS,
        role=role,
        epoch=1,
        num_active=num,
        queued_tokens=queued,
        prefill_tokens_per_s=None,
        decode_step_s=None,
    )


@st.composite
def hits_of(draw: st.DrawFn, num_tokens: int) -> NodeHit:
    held = draw(st.integers(0, num_tokens // GRANULE))
    cached = draw(st.integers(0, min(held, (num_tokens - 1) // GRANULE)))
    return NodeHit(num_cached_tokens=cached * GRANULE, num_held_tokens=held * GRANULE)


@st.composite
def states(draw: st.DrawFn) -> tuple[StillView, int]:
    """Two PRFAAS clusters and a PD cluster, all with prefill nodes, and a prompt's length."""
    num_tokens = draw(lengths)
    places = [PRFAAS] * draw(st.integers(1, 2)) + [FAR] * draw(st.integers(0, 1))
    places += [PD] * draw(st.integers(1, 2))
    views = [
        node(f"n{i}", cluster_id, Role.PREFILL, *draw(loads)) for i, cluster_id in enumerate(places)
    ]
    views += [
        node(f"d{i}", PD, Role.DECODE, draw(st.integers(0, 9)), 0)
        for i in range(draw(st.integers(1, 2)))
    ]
    hits = {
        v.node_id: draw(hits_of(num_tokens)) if draw(st.booleans()) else NodeHit() for v in views
    }
    return (
        StillView(
            views=views,
            hits=hits,
            rate_bps=draw(link_rates),
            backlog_bytes=draw(st.sampled_from([0, 10**8, 10**10])),
            is_sparse=draw(st.booleans()),
        ),
        num_tokens,
    )


def decide(router: Router, view: ClusterView, num_tokens: int, seed: int = 0) -> RoutingDecision:
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=num_tokens)
    return router.route(request, view, 0.0, Random(seed))


@given(state=states(), slower=st.floats(0.01, 1.0))
def test_less_bandwidth_never_offloads_more_without_a_threshold(
    state: tuple[StillView, int], slower: float
) -> None:
    view, num_tokens = state
    assert view.rate_bps is not None
    slow = attrs.evolve(view, rate_bps=view.rate_bps * slower)
    before = decide(max_weight_router(), view, num_tokens)
    after = decide(max_weight_router(), slow, num_tokens)
    assert before.offloaded or not after.offloaded


@given(
    state=states(),
    slower=st.floats(0.01, 1.0),
    seen=st.lists(lengths, max_size=40),
    offered_bps=st.floats(1e6, 1e11),
    moves=st.booleans(),
)
def test_less_bandwidth_never_offloads_more_with_a_threshold(
    state: tuple[StillView, int], slower: float, seen: list[int], offered_bps: float, moves: bool
) -> None:
    """t and the regime follow the link. Where PRFAAS has the longer hit, a scarce link sends the
    request to it and an abundant one moves the hit: the paper's rules, and the one exception."""
    view, num_tokens = state
    if moves:
        longest = max(
            view.hits[n.node_id].num_cached_tokens
            for n in view.views
            if n.cluster_id == PD and n.role is Role.PREFILL
        )
        shorter = {
            n.node_id: NodeHit()
            for n in view.views
            if n.kind is ClusterKind.PRFAAS and view.hits[n.node_id].num_cached_tokens > longest
        }
        view = attrs.evolve(view, hits={**view.hits, **shorter})
    offloaded = []
    for rate in (1.0, slower):
        assert view.rate_bps is not None
        link_bps = view.rate_bps * rate
        controller = ThresholdController(
            SPEC,
            band=(0, 200_000),
            link_bps=link_bps,
            remote_prefill_s=remote_s,
            local_prefill_s=local_s,
        )
        for length in seen:
            controller.observe(length)
        router = ThresholdRouter(
            SPEC,
            controller,
            settings=RouterSettings(prefix_transfers=moves),
            profiles=PROFILES,
        )
        controller.observe_offered(int(offered_bps), 0.0)
        decision = decide(router, attrs.evolve(view, rate_bps=link_bps), num_tokens)
        offloaded.append(decision.offloaded)
    assert offloaded[0] or not offloaded[1]


@given(
    state=states(),
    t=thresholds,
    which=st.sampled_from([threshold_router, max_weight_router, None]),
    data=st.data(),
)
def test_a_longer_local_hit_never_turns_local_into_remote(
    state: tuple[StillView, int],
    t: int,
    which: Callable[[int], Router] | None,
    data: st.DataObject,
) -> None:
    view, num_tokens = state
    # A MaxWeightRouter sees one node per hit if the view is sparse: the best one, too.
    local = [n.node_id for n in view.views if n.cluster_id == PD and n.role is Role.PREFILL]
    node_id = data.draw(st.sampled_from(local))
    before_hit = view.hits[node_id]
    longer = GRANULE * data.draw(
        st.integers(
            before_hit.num_cached_tokens // GRANULE,
            max(before_hit.num_cached_tokens, num_tokens - 1) // GRANULE,
        )
    )
    hit = NodeHit(num_cached_tokens=longer, num_held_tokens=max(longer, before_hit.num_held_tokens))
    warmer = attrs.evolve(view, hits={**view.hits, node_id: hit})

    def offloaded(view: StillView) -> bool:
        assert view.rate_bps is not None
        router = moving_router(t, view.rate_bps) if which is None else which(t)
        return decide(router, view, num_tokens).offloaded

    assert offloaded(view) or not offloaded(warmer)


@given(
    state=states(),
    t=thresholds,
    which=st.sampled_from([threshold_router, max_weight_router, aiming_router]),
    seed=st.integers(),
    data=st.data(),
)
def test_other_names_change_only_names(
    state: tuple[StillView, int],
    t: int,
    which: Callable[[int], Router],
    seed: int,
    data: st.DataObject,
) -> None:
    view, num_tokens = state
    names = [n.node_id for n in view.views]
    renamed = dict(zip(names, data.draw(st.permutations(names)), strict=True))
    twin = attrs.evolve(
        view,
        views=[attrs.evolve(n, node_id=renamed[n.node_id]) for n in view.views],
        hits={renamed[n]: hit for n, hit in view.hits.items()},
    )
    decision = decide(which(t), view, num_tokens, seed)
    assert decide(which(t), twin, num_tokens, seed) == attrs.evolve(
        decision,
        decode_node=renamed[decision.decode_node],
        prefill_node=renamed[decision.prefill_node],
    )


def with_idle_node(view: StillView, cluster_id: ClusterId) -> StillView:
    newcomer = node("new", cluster_id, Role.PREFILL, 0, 0)
    return attrs.evolve(view, views=[*view.views, newcomer])


@given(state=states(), t=thresholds, cluster_id=st.sampled_from([PRFAAS, FAR, PD]))
def test_an_idle_node_more_never_delays_with_a_threshold(
    state: tuple[StillView, int], t: int, cluster_id: ClusterId
) -> None:
    view, num_tokens = state
    before = decide(threshold_router(t), view, num_tokens)
    after = decide(threshold_router(t), with_idle_node(view, cluster_id), num_tokens)
    assert before.predicted_ttft_s is not None
    assert after.predicted_ttft_s is not None
    assert after.predicted_ttft_s <= before.predicted_ttft_s * (1 + 1e-9)


@given(state=states(), cluster_id=st.sampled_from([PRFAAS, FAR, PD]))
def test_an_idle_node_more_never_delays_without_a_threshold_and_queues(
    state: tuple[StillView, int], cluster_id: ClusterId
) -> None:
    """With queues it may: there the request waits a little so that others wait less."""
    view, num_tokens = state
    idle = attrs.evolve(
        view,
        views=[attrs.evolve(n, num_active=0, queued_tokens=0) for n in view.views],
        backlog_bytes=0,
    )
    before = decide(max_weight_router(), idle, num_tokens)
    after = decide(max_weight_router(), with_idle_node(idle, cluster_id), num_tokens)
    assert before.predicted_ttft_s is not None
    assert after.predicted_ttft_s is not None
    assert after.predicted_ttft_s <= before.predicted_ttft_s * (1 + 1e-9)


HASHES = tuple(BlockHash(i.to_bytes(16, "big")) for i in range(20))


@given(
    rows=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    checkpoints=st.lists(st.sets(st.integers(1, 20)), min_size=3, max_size=3),
    t=st.integers(0, 1500),
    which=st.sampled_from([threshold_router, max_weight_router, aiming_router]),
)
def test_H39_no_hit_is_predicted_where_the_state_is_missing(
    rows: Sequence[int],
    checkpoints: Sequence[set[int]],
    t: int,
    which: Callable[[int], Router],
) -> None:
    ledger = LoadLedger.for_spec(SPEC)
    row_group, state_group = SPEC.groups
    usable: dict[NodeId, int] = {}
    names = (NodeId("r0"), NodeId("p0"), NodeId("p1"))
    for name, num_rows, states in zip(names, rows, checkpoints, strict=True):
        is_pd = name.startswith("p")
        ledger.node_up(
            NodeUp(
                node_id=name,
                cluster_id=PD if is_pd else PRFAAS,
                kind=ClusterKind.PD if is_pd else ClusterKind.PRFAAS,
                role=Role.MIXED if is_pd else Role.PREFILL,
                epoch=1,
            )
        )
        stored = {
            row_group.group_id: HASHES[:num_rows],
            state_group.group_id: tuple(HASHES[n - 1] for n in sorted(states)),
        }
        for sequence, (group_id, hashes) in enumerate(stored.items(), 1):
            event = CacheEvent(sequence=sequence, group_id=group_id, stored=hashes)
            ledger.cache_event(name, 1, event)
        usable[name] = GRANULE * max((n for n in states if n <= num_rows), default=0)
    request = RoutedRequest(
        request_id=RequestId("r"), num_tokens=20 * GRANULE + 7, granule_hashes=HASHES
    )
    decision = which(t).route(request, ledger, 0.0, Random(0))
    assert decision.cached_tokens == usable[decision.prefill_node]
    assert decision.routed_tokens == request.num_tokens - max(usable["p0"], usable["p1"])  # type: ignore[index]
