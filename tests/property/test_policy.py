from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from itertools import count
from random import Random

import attrs
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.cache import PagedHybridCache, PoolGeometry, checkpoint_positions
from prfaas.core import BlockHash, ClusterId, ClusterKind, DType, GroupId, NodeId, RequestId, Role
from prfaas.errors import CapacityError
from prfaas.policy import (
    FixedRoles,
    GlobalPrefixIndex,
    LinkEstimator,
    LoadCurve,
    LoadLedger,
    PrefillStage,
    ThresholdController,
    ThresholdRouter,
)
from prfaas.seams import (
    CacheEvent,
    ChangePhase,
    Delivery,
    NodeDown,
    NodeHit,
    NodeUp,
    NodeView,
    RequestOutcome,
    RoleChanged,
    RoutedRequest,
    RouteReason,
    RoutingDecision,
)
from prfaas.spec import FullAttentionSpec, LinearStateSpec, MLASpec, ModelSpec, SlidingWindowSpec
from prfaas.testing.router import StillView

SPEC = ModelSpec(
    name="four-groups",
    layers=(
        FullAttentionSpec(num_kv_heads=2, key_dim=8, value_dim=8, dtype=DType.BFLOAT16),
        MLASpec(kv_lora_rank=8, rope_dim=4, dtype=DType.BFLOAT16),
        SlidingWindowSpec(
            num_kv_heads=2, key_dim=8, value_dim=8, window_tokens=32, dtype=DType.BFLOAT16
        ),
        LinearStateSpec.delta_rule(
            num_heads=2, key_dim=8, value_dim=8, conv_channels=16, conv_columns=3
        ),
    ),
)
GRANULE = SPEC.granule_tokens
TOKEN_GROUPS = tuple(g.group_id for g in SPEC.groups if g.layer_spec.is_token_kind)
SLOT_GROUPS = tuple(g.group_id for g in SPEC.groups if not g.layer_spec.is_token_kind)
NUM_HASHES = 12
HASHES = tuple(BlockHash(i.to_bytes(16, "big")) for i in range(NUM_HASHES))

lengths = st.integers(1, 200_000)
rates = st.floats(1e3, 1e13)
junk = st.one_of(
    st.none(), st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e-300, 1e300]), rates
)
roles = st.sampled_from(Role)


def slow_hit(
    held: Mapping[GroupId, set[int]], block_size: int, num_hashes: int, num_tokens: int
) -> NodeHit:
    """The definition, block by block; ``held`` has the block counts at which a prefix ends."""
    block_tokens = block_size * GRANULE
    num_held = num_cached = 0
    while (
        (num_held + 1) * block_size <= num_hashes
        and (num_held + 1) * block_tokens <= num_tokens
        and all(num_held + 1 in held[group_id] for group_id in TOKEN_GROUPS)
    ):
        num_held += 1
    for blocks in range(1, num_held + 1):
        if blocks * block_tokens < num_tokens and all(blocks in held[g] for g in SLOT_GROUPS):
            num_cached = blocks
    return NodeHit(
        num_cached_tokens=num_cached * block_tokens, num_held_tokens=num_held * block_tokens
    )


class IndexMachine(RuleBasedStateMachine):
    """The index against sets of block counts, with lost, late and foreign events."""

    @initialize(block_size=st.integers(1, 3))
    def start(self, block_size: int) -> None:
        self.index = GlobalPrefixIndex(SPEC.groups, granule_tokens=GRANULE)
        self.block_size = block_size
        self.epoch = 0
        self.restart()

    @rule()
    def restart(self) -> None:
        self.epoch += 1
        self.index.add(NodeId("n"), self.epoch, block_size=self.block_size)
        self.sequence = 0
        self.is_lost = False
        self.held: dict[GroupId, set[int]] = {g.group_id: set() for g in SPEC.groups}

    def hash_at(self, blocks: int) -> BlockHash:
        return HASHES[blocks * self.block_size - 1]

    @property
    def max_blocks(self) -> int:
        return NUM_HASHES // self.block_size

    def change(self, data: st.DataObject) -> CacheEvent:
        """One legal change of the cache: rows stay prefix-closed, checkpoints are free."""
        group_id = data.draw(st.sampled_from([g.group_id for g in SPEC.groups]))
        held = self.held[group_id]
        if group_id in TOKEN_GROUPS:
            depth = data.draw(st.integers(0, self.max_blocks))
            wanted = set(range(1, depth + 1))
        else:
            wanted = data.draw(st.sets(st.integers(1, self.max_blocks)))
        stored, removed = sorted(wanted - held), sorted(held - wanted, reverse=True)
        self.held[group_id] = wanted
        self.sequence += 1
        return CacheEvent(
            sequence=self.sequence,
            group_id=group_id,
            stored=tuple(map(self.hash_at, stored)),
            removed=tuple(map(self.hash_at, removed)),
        )

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.index.apply(NodeId("n"), self.epoch, self.change(data))

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.change(data)
        self.index.apply(NodeId("n"), self.epoch, self.change(data))
        self.is_lost = True

    @precondition(lambda self: self.sequence > 0)
    @rule(data=st.data(), is_old_epoch=st.booleans())
    def repeat(self, data: st.DataObject, is_old_epoch: bool) -> None:
        event = CacheEvent(
            sequence=data.draw(st.integers(1, self.sequence + is_old_epoch)),
            group_id=SPEC.groups[0].group_id,
            stored=HASHES,
        )
        assert not self.index.apply(NodeId("n"), self.epoch - is_old_epoch, event)

    @rule()
    def resync(self) -> None:
        snapshot = {g: tuple(map(self.hash_at, sorted(b))) for g, b in self.held.items()}
        assert self.index.resync(NodeId("n"), self.epoch, self.sequence, snapshot)
        self.is_lost = False

    @rule(num_hashes=st.integers(0, NUM_HASHES), extra=st.integers(0, GRANULE - 1))
    def look_up(self, num_hashes: int, extra: int) -> None:
        num_tokens = max(1, num_hashes * GRANULE + extra)
        hit = self.index.hit(NodeId("n"), HASHES[:num_hashes], num_tokens)
        if self.is_lost:
            assert hit == NodeHit()
        else:
            assert hit == slow_hit(self.held, self.block_size, num_hashes, num_tokens)

    @invariant()
    def holds(self) -> None:
        self.index.check()
        assert self.index.needs_resync(NodeId("n")) == self.is_lost


test_H39_index_machine = IndexMachine.TestCase


@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(0, GRANULE - 1)),
        min_size=1,
        max_size=25,
    ),
    block_size=st.integers(1, 2),
    is_resynced=st.booleans(),
)
def test_H39_the_index_predicts_what_the_cache_serves(
    requests: list[tuple[list[int], int]], block_size: int, is_resynced: bool
) -> None:
    """A small real cache that evicts: prompts are paths in a binary tree of granules."""
    geometry = PoolGeometry.for_spec(
        SPEC, block_size=block_size * GRANULE, pool_bytes=2**18, slab_bytes=2**14
    )
    cache = PagedHybridCache(geometry)
    index = GlobalPrefixIndex(SPEC.groups, granule_tokens=GRANULE)
    index.add(NodeId("n"), 1, block_size=block_size)
    for number, (path, tail) in enumerate(requests):
        hashes = [BlockHash(bytes([1, *path[:i]]).rjust(16, b"\0")) for i in range(1, 9)]
        hashes = hashes[: len(path)]
        num_tokens = len(path) * GRANULE + tail
        blocks = hashes[block_size - 1 :: block_size]
        match = cache.match(blocks, max_tokens=num_tokens - 1)
        hit = index.hit(NodeId("n"), hashes, num_tokens)
        assert hit.num_cached_tokens == match.num_cached_tokens
        assert hit.num_held_tokens == cache.match(blocks, max_tokens=num_tokens).num_held_tokens
        request_id = RequestId(str(number))
        with contextlib.suppress(CapacityError):
            wanted = checkpoint_positions(num_tokens, match, block_size * GRANULE)
            cache.reserve(request_id, num_tokens, match, now=float(number), checkpoints=wanted)
            cache.commit(request_id, blocks, num_tokens, float(number))
            cache.release(request_id)
        events = cache.take_events()
        if is_resynced and events:
            index.apply(NodeId("n"), 1, attrs.evolve(events[-1], sequence=10**6 + number))
            assert index.resync(NodeId("n"), 1, 10**6 + number, cache.snapshot()[1])
        else:
            assert all([index.apply(NodeId("n"), 1, event) for event in events])
        index.check()


NODES = {
    NodeId(f"{kind.value}{i}"): kind
    for kind in (ClusterKind.PRFAAS, ClusterKind.PD)
    for i in (0, 1)
}


class LedgerMachine(RuleBasedStateMachine):
    """H36: whatever happens in whatever order, the counts are those of what is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = LoadLedger(
            GlobalPrefixIndex(SPEC.groups, granule_tokens=GRANULE), LinkEstimator()
        )
        self.up: dict[NodeId, int] = {}
        self.epochs = count(1)
        self.names = count()
        self.flights: dict[RequestId, RoutingDecision] = {}
        self.prefilled: set[RequestId] = set()

    def forget(self, node_id: NodeId) -> set[RequestId]:
        lost = {
            r
            for r, d in self.flights.items()
            if d.decode_node == node_id or (d.prefill_node == node_id and r not in self.prefilled)
        }
        for request_id in lost:
            del self.flights[request_id]
        return lost

    @rule(node_id=st.sampled_from(sorted(NODES)), role=roles)
    def come_up(self, node_id: NodeId, role: Role) -> None:
        self.up[node_id] = epoch = next(self.epochs)
        kind = NODES[node_id]
        event = NodeUp(
            node_id=node_id, cluster_id=ClusterId(kind.value), kind=kind, role=role, epoch=epoch
        )
        lost = self.ledger.node_up(event)
        assert set(lost) == self.forget(node_id)
        assert self.ledger.node_up(event) == ()

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def go_down(self, data: st.DataObject) -> None:
        node_id = data.draw(st.sampled_from(sorted(self.up)))
        lost = self.ledger.node_down(NodeDown(node_id=node_id, epoch=self.up.pop(node_id)))
        assert set(lost) == self.forget(node_id)

    @precondition(lambda self: self.up)
    @rule(data=st.data(), uncached=st.integers(1, 100_000))
    def admit(self, data: st.DataObject, uncached: int) -> None:
        decode, prefill = (data.draw(st.sampled_from(sorted(self.up))) for _ in range(2))
        request_id = RequestId(str(next(self.names)))
        decision = RoutingDecision(
            request_id=request_id,
            decode_node=decode,
            prefill_node=prefill,
            offloaded=NODES[prefill] is ClusterKind.PRFAAS,
            reason=RouteReason.SHORT,
            cached_tokens=0,
            uncached_tokens=uncached,
            routed_tokens=uncached,
            held_tokens=0,
            threshold_tokens=0,
            predicted_bytes=0,
            predicted_ttft_s=None,
            view_version=self.ledger.version,
        )
        self.ledger.admit(decision)
        self.flights[request_id] = decision

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.flights)))
        self.ledger.prefilled(request_id)
        self.prefilled.add(request_id)

    @rule(data=st.data())
    def finish_or_forget(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([*sorted(self.flights), RequestId("stranger")]))
        self.ledger.finished(request_id)
        self.ledger.prefilled(request_id)
        self.flights.pop(request_id, None)

    @invariant()
    def holds(self) -> None:
        self.ledger.check()
        views = {view.node_id: view for view in self.ledger.nodes()}
        assert {node_id: view.epoch for node_id, view in views.items()} == self.up
        for node_id, view in views.items():
            waiting = [
                d.uncached_tokens
                for r, d in self.flights.items()
                if d.prefill_node == node_id and r not in self.prefilled
            ]
            assert view.queued_tokens == sum(waiting)
        if not self.flights:
            assert all(view.num_active == 0 for view in views.values())

    def teardown(self) -> None:
        for request_id in list(self.flights):
            self.ledger.finished(request_id)
        assert self.ledger.num_in_flight == 0
        assert all(n.num_active == n.queued_tokens == 0 for n in self.ledger.nodes())


test_H36_ledger_machine = LedgerMachine.TestCase


@given(
    ends=st.lists(st.tuples(st.floats(0, 1.8), st.floats(0.01, 0.2)), min_size=1, max_size=20),
    rate=st.floats(1e6, 1e11),
    seed=st.integers(),
)
def test_link_is_bytes_over_the_union_in_any_order(
    ends: list[tuple[float, float]], rate: float, seed: int
) -> None:
    deliveries = [
        Delivery(num_bytes=max(1, int(rate * length / 8)), start_s=start, end_s=start + length)
        for start, length in ends
    ]
    busy_s = reached = 0.0
    for delivery in sorted(deliveries, key=lambda d: d.start_s):
        busy_s += max(0.0, delivery.end_s - max(reached, delivery.start_s))
        reached = max(reached, delivery.end_s)
    Random(seed).shuffle(deliveries)
    estimator = LinkEstimator(window_s=4.0, min_bytes=1, min_busy_s=1e-9)
    for delivery in deliveries:
        estimator.observe(delivery)
        estimator.check()
    measured = estimator.rate_bps(2.0)
    expected = 8 * sum(d.num_bytes for d in deliveries) / busy_s
    assert measured is not None
    assert math.isclose(measured, expected, rel_tol=1e-6)


@given(
    deliveries=st.lists(
        st.builds(
            Delivery,
            num_bytes=st.integers(-1, 10**12),
            start_s=st.floats(),
            end_s=st.floats(),
        ),
        max_size=10,
    ),
    now=st.floats(allow_nan=False),
)
def test_link_rate_is_none_or_a_finite_rate_whatever_comes_in(
    deliveries: list[Delivery], now: float
) -> None:
    estimator = LinkEstimator()
    for delivery in deliveries:
        estimator.observe(delivery)
    measured = estimator.rate_bps(now)
    assert measured is None or 0 < measured < math.inf


def cluster_view(
    remote: list[float | None], local: list[float | None], link_bps: float | None
) -> StillView:
    views = [
        NodeView(
            node_id=NodeId(f"{kind.value}{i}"),
            cluster_id=ClusterId(kind.value),
            kind=kind,
            role=Role.MIXED if kind is ClusterKind.PD else Role.PREFILL,
            epoch=1,
            num_active=0,
            queued_tokens=0,
            prefill_tokens_per_s=rate,
            decode_step_s=None,
        )
        for kind, stage in ((ClusterKind.PRFAAS, remote), (ClusterKind.PD, local))
        for i, rate in enumerate(stage)
    ]
    return StillView(views=views, rate_bps=link_bps)


@given(
    prior=st.lists(lengths, min_size=1, max_size=40),
    seen=st.lists(lengths, max_size=80),
    remote=st.lists(rates, min_size=1, max_size=3),
    local=st.lists(rates, min_size=1, max_size=3),
    links=st.tuples(rates, rates),
    band=st.tuples(st.integers(0, 200_000), st.integers(0, 200_000)).map(sorted).map(tuple),
)
def test_less_bandwidth_never_lowers_t(
    prior: list[int],
    seen: list[int],
    remote: list[float],
    local: list[float],
    links: tuple[float, float],
    band: tuple[int, int],
) -> None:
    thresholds = []
    for link_bps in (max(links), min(links)):
        controller = ThresholdController(SPEC, band=band, prior_tokens=prior)
        for length in seen:
            controller.observe(length)
        thresholds.append(controller.update(cluster_view([*remote], [*local], link_bps), 0.0))
    assert thresholds[0] <= thresholds[1]
    # One controller that sees the link fall arrives at the same place.
    falling = ThresholdController(SPEC, band=band, prior_tokens=prior)
    for length in seen:
        falling.observe(length)
    for now, link_bps in enumerate((max(links), min(links))):
        t = falling.threshold_tokens
        falling.update(cluster_view([*remote], [*local], link_bps), float(now))
    assert falling.threshold_tokens >= t


@given(
    weights=st.dictionaries(lengths, st.floats(0.01, 10), min_size=1, max_size=30),
    nodes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    link_bps=st.one_of(st.none(), rates),
    band=st.tuples(st.integers(0, 200_000), st.integers(0, 200_000)).map(sorted).map(tuple),
)
def test_no_t_in_the_band_is_better_and_no_smaller_one_as_good(
    weights: dict[int, float],
    nodes: tuple[int, int],
    link_bps: float | None,
    band: tuple[int, int],
) -> None:
    curve = LoadCurve(
        SPEC,
        weights,
        remote=PrefillStage(num_nodes=nodes[0], prefill_s=lambda n: 0.1 + n / 2e4),
        local=PrefillStage(num_nodes=nodes[1], prefill_s=lambda n: 0.2 + n / 8e3),
        link_bps=link_bps,
    )
    best = curve.best(band)
    assert band[0] <= best <= band[1]
    for t in {*band, *(n for n in weights if band[0] <= n <= band[1])}:
        assert curve.load_s(best) <= curve.load_s(t)
        assert t >= best or curve.load_s(t) > curve.load_s(best)


@given(
    steps=st.lists(
        st.tuples(st.lists(junk, max_size=3), st.lists(junk, max_size=3), junk, st.floats(-5, 500)),
        max_size=8,
    ),
    prior=st.lists(lengths, min_size=1, max_size=5),
    band=st.tuples(st.integers(0, 200_000), st.integers(0, 200_000)).map(sorted).map(tuple),
)
def test_t_is_a_whole_number_inside_the_band_whatever_comes_in(
    steps: list[tuple[list[float | None], list[float | None], float | None, float]],
    prior: list[int],
    band: tuple[int, int],
) -> None:
    controller = ThresholdController(SPEC, band=band, prior_tokens=prior)
    for remote, local, link_bps, now in steps:
        t = controller.update(cluster_view(remote, local, link_bps), now)
        assert type(t) is int
        assert band[0] <= t <= band[1]
        controller.check()


@st.composite
def still_views(draw: st.DrawFn) -> tuple[StillView, int]:
    """Clusters that can serve, some caches, and a prompt's length."""
    num_tokens = draw(st.integers(1, 150_000))
    views, hits = [], {}
    for i in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(ClusterKind)) if i else ClusterKind.PD
        role = draw(roles) if i and kind is ClusterKind.PD else Role.MIXED
        node_id = NodeId(f"n{i}")
        views.append(
            NodeView(
                node_id=node_id,
                cluster_id=ClusterId(kind.value),
                kind=kind,
                role=Role.PREFILL if kind is ClusterKind.PRFAAS else role,
                epoch=1,
                num_active=draw(st.integers(0, 3)),
                queued_tokens=draw(st.sampled_from([0, 0, 5000, 80_000])),
                prefill_tokens_per_s=draw(st.sampled_from([None, 9000.0])),
                decode_step_s=None,
            )
        )
        held = draw(st.integers(0, num_tokens // GRANULE))
        cached = draw(st.integers(0, min(held, (num_tokens - 1) // GRANULE)))
        hits[node_id] = NodeHit(num_cached_tokens=cached * GRANULE, num_held_tokens=held * GRANULE)
    views = draw(st.permutations(views))
    rate = draw(st.sampled_from([None, 1e9]))
    return StillView(views=views, hits=hits, rate_bps=rate), num_tokens


def decide(view: StillView, num_tokens: int, t: int, seed: int) -> RoutingDecision:
    router = ThresholdRouter(SPEC, ThresholdController(SPEC, band=(t, t)))
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=num_tokens)
    decision = router.route(request, view, 0.0, Random(seed))
    router.observe(RequestOutcome(decision=decision, ok=False), 1.0)
    return decision


@given(case=still_views(), t=st.integers(0, 100_000), seed=st.integers(), data=st.data())
def test_a_longer_local_hit_never_turns_local_into_remote(
    case: tuple[StillView, int], t: int, seed: int, data: st.DataObject
) -> None:
    view, num_tokens = case
    before = decide(view, num_tokens, t, seed)
    local = [n.node_id for n in view.views if n.kind is ClusterKind.PD]
    node_id = data.draw(st.sampled_from(local))
    at_least = view.hits[node_id].num_cached_tokens // GRANULE
    longer = GRANULE * data.draw(st.integers(at_least, max(at_least, (num_tokens - 1) // GRANULE)))
    hit = NodeHit(
        num_cached_tokens=longer,
        num_held_tokens=max(longer, view.hits[node_id].num_held_tokens),
    )
    after = decide(attrs.evolve(view, hits={**view.hits, node_id: hit}), num_tokens, t, seed)
    assert before.offloaded or not after.offloaded
    assert after.routed_tokens <= before.routed_tokens


@given(case=still_views(), t=st.integers(0, 100_000), seed=st.integers(), data=st.data())
def test_other_names_change_only_names(
    case: tuple[StillView, int], t: int, seed: int, data: st.DataObject
) -> None:
    view, num_tokens = case
    names = [n.node_id for n in view.views]
    renamed = dict(zip(names, data.draw(st.permutations(names)), strict=True))
    twin = attrs.evolve(
        view,
        views=[attrs.evolve(n, node_id=renamed[n.node_id]) for n in view.views],
        hits={renamed[n]: hit for n, hit in view.hits.items()},
    )
    decision = decide(view, num_tokens, t, seed)
    assert decide(twin, num_tokens, t, seed) == attrs.evolve(
        decision,
        decode_node=renamed[decision.decode_node],
        prefill_node=renamed[decision.prefill_node],
    )


@given(case=still_views(), t=st.integers(0, 100_000), seed=st.integers())
def test_less_threshold_never_offloads_less(case: tuple[StillView, int], t: int, seed: int) -> None:
    view, num_tokens = case
    assert (
        decide(view, num_tokens, t // 2, seed).offloaded
        >= decide(view, num_tokens, t, seed).offloaded
    )


PD_NAMES = tuple(NodeId(f"n{i}") for i in range(4))


@given(
    baseline=st.dictionaries(st.sampled_from(PD_NAMES), roles),
    events=st.lists(
        st.tuples(
            st.sampled_from(["up", "down", "changed"]),
            st.sampled_from([*PD_NAMES, NodeId("remote")]),
            st.integers(1, 3),
            roles,
        ),
        max_size=25,
    ),
)
def test_no_cluster_with_nodes_is_left_without_a_role(
    baseline: dict[NodeId, Role], events: list[tuple[str, NodeId, int, Role]]
) -> None:
    balancer = FixedRoles(baseline, (1, 2))
    last = balancer.plan(0.0)
    for what, node_id, epoch, role in events:
        kind = ClusterKind.PRFAAS if node_id == "remote" else ClusterKind.PD
        cluster = ClusterId(kind.value if node_id != PD_NAMES[0] else "other")
        if what == "up":
            event = NodeUp(node_id=node_id, cluster_id=cluster, kind=kind, role=role, epoch=epoch)
            balancer.observe(event, 0.0)
        elif what == "down":
            balancer.observe(NodeDown(node_id=node_id, epoch=epoch), 0.0)
        else:
            balancer.observe(
                RoleChanged(
                    node_id=node_id, plan_epoch=epoch, role=Role.PREFILL, phase=ChangePhase.FAILED
                ),
                0.0,
            )
        balancer.check()
        plan = balancer.plan(0.0)
        assert plan.epoch == last.epoch + (plan.roles != last.roles)
        assert plan.roles.get(NodeId("remote"), Role.PREFILL) is Role.PREFILL
        last = plan
