"""The fast answers of index and ledger against the plain ones, on random states."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core import BlockHash, ClusterId, ClusterKind, DType, GroupId, NodeId, RequestId, Role
from prfaas.policy import LoadLedger
from prfaas.policy.node_set import members
from prfaas.seams import (
    CacheEvent,
    Candidate,
    ClusterView,
    NodeDown,
    NodeHit,
    NodeUp,
    RoutedRequest,
    RouteReason,
    RoutingDecision,
)
from prfaas.spec import FullAttentionSpec, LinearStateSpec, MLASpec, ModelSpec, SlidingWindowSpec

FOUR_GROUPS = ModelSpec(
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
TWO_GROUPS = ModelSpec(name="two-groups", layers=FOUR_GROUPS.layers[::3])
ROWS_ONLY = ModelSpec(name="rows-only", layers=FOUR_GROUPS.layers[:1])
GRANULE = FOUR_GROUPS.granule_tokens
NUM_HASHES = 14
NODES = tuple(NodeId(f"n{i}") for i in range(9))
CLUSTERS = {ClusterId("p"): ClusterKind.PRFAAS, ClusterId("a"): ClusterKind.PD}
CLUSTERS[ClusterId("b")] = ClusterKind.PD


def prompt(branch: int) -> tuple[BlockHash, ...]:
    """Two prompts that share their first 5 granules."""
    return tuple(
        BlockHash(bytes([0 if i < 5 else branch, i]).rjust(16, b"\0")) for i in range(NUM_HASHES)
    )


PROMPTS = (prompt(1), prompt(2))


class Cluster:
    """A ledger and what it was told, changed at random but legally."""

    def __init__(self, spec: ModelSpec, rng: Random) -> None:
        self.spec = spec
        self.rng = rng
        self.ledger = LoadLedger.for_spec(spec)
        self.epochs: dict[NodeId, int] = {}
        self.sizes: dict[NodeId, int] = {}
        self.sequences: dict[NodeId, int] = {}
        self.held: dict[tuple[NodeId, GroupId], set[BlockHash]] = {}
        self.num_requests = 0
        self.in_flight: list[RequestId] = []

    @property
    def up(self) -> list[NodeId]:
        return sorted(self.sizes)

    def come_up(self) -> None:
        node_id = self.rng.choice(NODES)
        cluster_id = self.rng.choice(sorted(CLUSTERS))
        event = NodeUp(
            node_id=node_id,
            cluster_id=cluster_id,
            kind=CLUSTERS[cluster_id],
            role=self.rng.choice(list(Role)),
            epoch=self.epochs.get(node_id, 0) + 1,
            max_active=self.rng.choice([None, 2]),
        )
        self.epochs[node_id] = event.epoch
        self.sizes[node_id] = self.rng.choice([1, 1, 1, 2, 3, 4])
        self.sequences[node_id] = 0
        for group in self.spec.groups:
            self.held[node_id, group.group_id] = set()
        lost = self.ledger.node_up(event, block_size=self.sizes[node_id])
        self.in_flight = [r for r in self.in_flight if r not in lost]

    def go_down(self) -> None:
        node_id = self.rng.choice(self.up)
        lost = self.ledger.node_down(NodeDown(node_id=node_id, epoch=self.epochs[node_id]))
        del self.sizes[node_id]
        self.in_flight = [r for r in self.in_flight if r not in lost]

    def change_cache(self) -> None:
        """Rows stay closed under prefixes, checkpoints are free; some events get lost."""
        node_id = self.rng.choice(self.up)
        size = self.sizes[node_id]
        group = self.rng.choice(self.spec.groups)
        ends = [hashes[size - 1 :: size] for hashes in PROMPTS]
        if group.layer_spec.is_token_kind:
            wanted = {h for path in ends for h in path[: self.rng.randint(0, len(path))]}
        else:
            share = self.rng.random()
            wanted = {h for path in ends for h in path if self.rng.random() < share}
        held = self.held[node_id, group.group_id]
        event = CacheEvent(
            sequence=self.sequences[node_id] + 1 + self.rng.choice([0, 0, 0, 0, 1]),
            group_id=group.group_id,
            stored=tuple(sorted(wanted - held)),
            removed=tuple(sorted(held - wanted)),
        )
        self.held[node_id, group.group_id] = wanted
        self.sequences[node_id] = event.sequence
        self.ledger.cache_event(node_id, self.epochs[node_id], event)

    def resync(self) -> None:
        node_id = self.rng.choice(self.up)
        groups = [group.group_id for group in self.spec.groups]
        snapshot = {g: sorted(self.held[node_id, g]) for g in groups}
        self.ledger.resync(node_id, self.epochs[node_id], self.sequences[node_id], snapshot)

    def admit(self) -> None:
        decode, prefill = (self.rng.choice(self.up) for _ in range(2))
        self.num_requests += 1
        request_id = RequestId(f"r{self.num_requests}")
        self.in_flight.append(request_id)
        self.ledger.admit(
            RoutingDecision(
                request_id=request_id,
                decode_node=decode,
                prefill_node=prefill,
                offloaded=(self.rng.random() < 0.5),
                reason=RouteReason.SHORT,
                cached_tokens=0,
                uncached_tokens=self.rng.randint(1, 3),
                routed_tokens=1,
                held_tokens=0,
                threshold_tokens=0,
                predicted_bytes=self.rng.randint(0, 9),
                predicted_ttft_s=None,
                view_version=0,
                prefix_bytes=self.rng.randint(0, 9),
            ),
            self.rng.choice([None, 10 * self.rng.random()]),
        )

    def proceed(self) -> None:
        if self.in_flight:
            request_id = self.rng.choice(self.in_flight)
            what = self.rng.choice(["prefilled", "transferred", "finished"])
            getattr(self.ledger, what)(request_id, self.rng.choice([None, 5.0]))
            if what == "finished":
                self.in_flight.remove(request_id)

    def change_node(self) -> None:
        node_id = self.rng.choice(self.up)
        if self.rng.random() < 0.5:
            self.ledger.draining(node_id, (self.rng.random() < 0.5))
        else:
            self.ledger.role_changed(node_id, self.rng.choice(list(Role)))

    def step(self) -> None:
        steps = [self.come_up]
        if self.up:
            steps += [self.go_down, self.change_cache, self.change_cache, self.change_cache]
            steps += [self.resync, self.admit, self.admit, self.proceed, self.change_node]
        self.rng.choice(steps)()

    def request(self) -> RoutedRequest:
        failed = [*NODES[:4], NodeId("gone")]
        hashes = self.rng.choice(PROMPTS)
        num_hashes = self.rng.choice([0, 3, 9, 12, NUM_HASHES])
        extra = self.rng.choice([0, 1, GRANULE - 1])
        return RoutedRequest(
            request_id=RequestId("new"),
            num_tokens=max(1, num_hashes * GRANULE + extra),
            granule_hashes=hashes[:num_hashes],
            excluded=frozenset(self.rng.sample(failed, self.rng.randint(0, 3))),
        )


def grown_cluster(spec: ModelSpec, num_steps: int, seed: int) -> Cluster:
    cluster = Cluster(spec, Random(seed))
    for _ in range(3):
        cluster.come_up()
    for _ in range(num_steps):
        cluster.step()
    return cluster


clusters = st.builds(
    grown_cluster,
    spec=st.sampled_from([FOUR_GROUPS, TWO_GROUPS, TWO_GROUPS, ROWS_ONLY]),
    num_steps=st.integers(0, 120),
    seed=st.integers(),
)


@settings(max_examples=200)
@given(cluster=clusters)
def test_H39_levels_are_the_hits_of_all_nodes(cluster: Cluster) -> None:
    index = cluster.ledger._index
    index.check()
    at = {index.position(node_id): node_id for node_id in cluster.up}
    for _ in range(3):
        request = cluster.request()
        found: dict[NodeId, NodeHit] = {}
        levels = index.levels(request.granule_hashes, request.num_tokens)
        for level in levels:
            for position in members(level.nodes):
                assert at[position] not in found, "a node on two levels"
                found[at[position]] = level.hit
        assert len({level.hit for level in levels}) == len(levels)
        for node_id in cluster.up:
            assert found.get(node_id, NodeHit()) == cluster.ledger.hit(node_id, request)
    assert index.misfits == frozenset()


def load_of(candidate: Candidate, stage: Role) -> tuple[bool, int]:
    node = candidate.node
    return node.is_full, node.queued_tokens if stage is Role.PREFILL else node.num_active


@settings(max_examples=200)
@given(cluster=clusters, seed=st.integers())
def test_candidates_are_legal_and_the_least_loaded_of_every_hit(
    cluster: Cluster, seed: int
) -> None:
    ledger = cluster.ledger
    ledger.check()
    for _ in range(2):
        request = cluster.request()
        for cluster_id in (*CLUSTERS, ClusterId("nowhere")):
            for stage in (Role.PREFILL, Role.DECODE):
                rng = Random(seed)
                found = ledger.candidates(request, cluster_id, stage, rng)
                plain = ClusterView.candidates(ledger, request, cluster_id, stage, rng)
                assert all(candidate in plain for candidate in found)
                assert len({candidate.hit for candidate in found}) == len(found)
                least: dict[NodeHit, tuple[bool, int]] = {}
                for candidate in plain:
                    load = load_of(candidate, stage)
                    least[candidate.hit] = min(load, least.get(candidate.hit, load))
                assert {c.hit: load_of(c, stage) for c in found} == least
        cluster.step()


@given(cluster=clusters)
def test_cluster_sums_are_those_of_the_nodes(cluster: Cluster) -> None:
    for _ in range(3):
        found = {load.cluster_id: load for load in cluster.ledger.clusters()}
        plain = {load.cluster_id: load for load in ClusterView.clusters(cluster.ledger)}
        assert found == plain
        cluster.step()


@given(cluster=clusters)
def test_H36_the_link_is_empty_when_nothing_is_in_flight(cluster: Cluster) -> None:
    cluster.ledger.check()
    assert cluster.ledger.link_backlog_bytes() >= 0
    for request_id in cluster.in_flight:
        cluster.ledger.finished(request_id)
    cluster.ledger.check()
    assert cluster.ledger.num_in_flight == 0
    assert cluster.ledger.link_backlog_bytes() == 0
    assert all(load.queued_tokens == load.num_active == 0 for load in cluster.ledger.clusters())


@given(
    slots=st.one_of(st.none(), st.integers(1, 3)),
    spans=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20)), max_size=8),
    period_s=st.floats(0.5, 20),
)
def test_busy_shares_are_the_mean_over_the_period(
    slots: int | None,
    spans: list[tuple[float, float]],
    period_s: float,
) -> None:
    """Each span is a request that prefills until its first and decodes until its second time."""
    node = NodeUp(
        node_id=NODES[0],
        cluster_id=ClusterId("a"),
        kind=ClusterKind.PD,
        role=Role.MIXED,
        epoch=1,
        num_slots=slots,
    )
    ledger = LoadLedger.for_spec(ROWS_ONLY)
    ledger.node_up(node)
    assert [load.prefill_busy for load in ledger.loads(0.0)] == [0.0]
    events = []
    template = attrs.evolve(DECISION, decode_node=NODES[0], prefill_node=NODES[0])
    for number, span in enumerate(spans):
        request_id = RequestId(f"r{number}")
        ledger.admit(attrs.evolve(template, request_id=request_id), 0.0)
        start, end = sorted(span)
        events += [(start, 0, ledger.prefilled, request_id), (end, 1, ledger.finished, request_id)]
    for now, _, event, request_id in sorted(events, key=lambda e: e[:2]):
        if now <= period_s:
            event(request_id, now)
    (load,) = ledger.loads(period_s)
    last_s = max((min(span) for span in spans), default=0.0)
    assert math.isclose(load.prefill_busy, min(1.0, last_s / period_s))
    edges = sorted({0.0, period_s, *(t for span in spans for t in span if t < period_s)})
    taken_s = num_decoding = 0.0
    for left, right in pairwise(edges):
        now = (left + right) / 2
        num_decoding = sum(min(span) < now < max(span) for span in spans)
        taken_s += (right - left) * min(num_decoding, slots or 0)
    at_end = sum(min(span) <= period_s < max(span) for span in spans)
    if slots is None:
        assert load.decode_busy == (1.0 if at_end else 0.0)
        assert load.num_waiting == 0
    else:
        assert math.isclose(load.decode_busy, taken_s / (slots * period_s), abs_tol=1e-9)
        assert load.num_waiting == max(0, at_end - slots)
    assert load.queued_tokens == sum(min(span) > period_s for span in spans)


DECISION = RoutingDecision(
    request_id=RequestId("r"),
    decode_node=NODES[0],
    prefill_node=NODES[0],
    offloaded=False,
    reason=RouteReason.SHORT,
    cached_tokens=0,
    uncached_tokens=1,
    routed_tokens=1,
    held_tokens=0,
    threshold_tokens=0,
    predicted_bytes=0,
    predicted_ttft_s=None,
    view_version=0,
)
