from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from random import Random

import attrs
import pytest

from prfaas.core import BlockHash, ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.policy import LoadLedger
from prfaas.seams import (
    CacheEvent,
    ClusterLoad,
    Delivery,
    NodeDown,
    NodeHit,
    NodeLoad,
    NodeUp,
    NodeView,
    RoutedRequest,
    RouteReason,
    RoutingDecision,
)
from prfaas.spec import preset

SPEC = preset("minimax-m2.5")
REMOTE, PREFILL, DECODE, MIXED = (NodeId(name) for name in ("remote", "prefill", "decode", "mixed"))
HASHES = [BlockHash(i.to_bytes(16, "big")) for i in range(8)]


def node_up(node_id: NodeId, role: Role, *, epoch: int = 1) -> NodeUp:
    kind = ClusterKind.PRFAAS if node_id == REMOTE else ClusterKind.PD
    return NodeUp(
        node_id=node_id, cluster_id=ClusterId(kind.value), kind=kind, role=role, epoch=epoch
    )


def make_ledger() -> LoadLedger:
    ledger = LoadLedger.for_spec(SPEC)
    roles = {
        REMOTE: Role.PREFILL,
        PREFILL: Role.PREFILL,
        DECODE: Role.DECODE,
        MIXED: Role.MIXED,
    }
    for node_id, role in roles.items():
        assert ledger.node_up(node_up(node_id, role)) == ()
    return ledger


def decision(
    name: str,
    *,
    prefill: NodeId = REMOTE,
    decode: NodeId = DECODE,
    uncached: int = 1000,
    predicted_bytes: int = 0,
    prefix_bytes: int = 0,
) -> RoutingDecision:
    return RoutingDecision(
        request_id=RequestId(name),
        decode_node=decode,
        prefill_node=prefill,
        offloaded=prefill == REMOTE,
        reason=RouteReason.LONG,
        cached_tokens=0,
        uncached_tokens=uncached,
        routed_tokens=uncached,
        held_tokens=0,
        threshold_tokens=0,
        predicted_bytes=predicted_bytes,
        predicted_ttft_s=None,
        view_version=0,
        prefix_bytes=prefix_bytes,
    )


def view_of(ledger: LoadLedger, node_id: NodeId) -> NodeView:
    ledger.check()
    (view,) = [view for view in ledger.nodes() if view.node_id == node_id]
    return view


def load_of(ledger: LoadLedger, node_id: NodeId) -> tuple[int, int]:
    view = view_of(ledger, node_id)
    return view.num_active, view.queued_tokens


def test_a_request_counts_at_both_nodes_until_each_is_done_with_it() -> None:
    ledger = make_ledger()
    ledger.admit(decision("a", uncached=700))
    ledger.admit(decision("b", uncached=50))
    assert load_of(ledger, REMOTE) == (2, 750)
    assert load_of(ledger, DECODE) == (2, 0)
    ledger.prefilled(RequestId("a"))
    assert load_of(ledger, REMOTE) == (1, 50)
    assert load_of(ledger, DECODE) == (2, 0)
    ledger.finished(RequestId("a"))
    assert load_of(ledger, DECODE) == (1, 0)
    assert ledger.num_in_flight == 1


def test_a_node_that_does_both_counts_a_request_once() -> None:
    ledger = make_ledger()
    ledger.admit(decision("a", prefill=MIXED, decode=MIXED))
    assert load_of(ledger, MIXED) == (1, 1000)
    ledger.prefilled(RequestId("a"))
    assert load_of(ledger, MIXED) == (1, 0)
    ledger.finished(RequestId("a"))
    assert load_of(ledger, MIXED) == (0, 0)


PATHS = {
    "success": ("prefilled", "finished"),
    "error before prefill": ("finished",),
    "reported twice": ("finished", "finished"),
    "prefilled twice": ("prefilled", "prefilled", "finished"),
    "prefilled after the end": ("finished", "prefilled"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("prefill", [REMOTE, PREFILL, MIXED])
def test_H36_every_path_takes_the_load_back(path: str, prefill: NodeId) -> None:
    ledger = make_ledger()
    idle = list(ledger.nodes())
    for name in "abc":
        ledger.admit(decision(name, prefill=prefill, decode=MIXED))
    for name in "bca":
        for event in PATHS[path]:
            getattr(ledger, event)(RequestId(name))
            ledger.check()
    assert list(ledger.nodes()) == idle
    assert ledger.num_in_flight == 0


def test_a_request_is_admitted_once_and_only_to_nodes_that_are_up() -> None:
    ledger = make_ledger()
    ledger.admit(decision("a"))
    before = ledger.version, list(ledger.nodes())
    with pytest.raises(LocalProtocolError, match="'a' is in flight already"):
        ledger.admit(decision("a", prefill=PREFILL))
    with pytest.raises(LocalProtocolError, match="'gone' is not up"):
        ledger.admit(decision("b", prefill=NodeId("gone")))
    with pytest.raises(LocalProtocolError, match="'gone' is not up"):
        ledger.admit(decision("b", decode=NodeId("gone")))
    assert (ledger.version, list(ledger.nodes())) == before
    ledger.check()


def test_a_node_that_goes_down_takes_its_requests_with_it() -> None:
    ledger = make_ledger()
    for name in ("queued", "shipped", "elsewhere"):
        ledger.admit(decision(name, prefill=PREFILL if name == "elsewhere" else REMOTE))
    ledger.prefilled(RequestId("shipped"))
    assert ledger.node_down(NodeDown(node_id=REMOTE, epoch=1)) == ("queued",)
    assert [view.node_id for view in ledger.nodes()] == [PREFILL, DECODE, MIXED]
    assert load_of(ledger, DECODE) == (2, 0)
    assert ledger.node_down(NodeDown(node_id=REMOTE, epoch=1)) == ()
    assert ledger.node_down(NodeDown(node_id=DECODE, epoch=1)) == ("shipped", "elsewhere")
    assert load_of(ledger, PREFILL) == (0, 0)
    assert ledger.num_in_flight == 0
    ledger.finished(RequestId("shipped"))
    ledger.check()


def test_a_restarted_node_starts_from_nothing() -> None:
    ledger = make_ledger()
    ledger.admit(decision("a"))
    ledger.observe_prefill(REMOTE, 1000, 1.0)
    ledger.cache_event(
        REMOTE, 1, CacheEvent(sequence=1, group_id=SPEC.groups[0].group_id, stored=(HASHES[0],))
    )
    assert ledger.node_up(node_up(REMOTE, Role.PREFILL, epoch=2)) == ("a",)
    assert view_of(ledger, REMOTE) == NodeView(
        node_id=REMOTE,
        cluster_id=ClusterId("prfaas"),
        kind=ClusterKind.PRFAAS,
        role=Role.PREFILL,
        epoch=2,
        num_active=0,
        queued_tokens=0,
        prefill_tokens_per_s=None,
        decode_step_s=None,
    )
    assert load_of(ledger, DECODE) == (0, 0)
    request = RoutedRequest(request_id=RequestId("b"), num_tokens=500, granule_hashes=HASHES)
    assert ledger.hit(REMOTE, request) == NodeHit()
    assert len(ledger.nodes()) == 4


def test_late_news_of_an_earlier_life_change_nothing() -> None:
    ledger = make_ledger()
    ledger.node_up(node_up(REMOTE, Role.PREFILL, epoch=3))
    ledger.admit(decision("a"))
    version = ledger.version
    assert ledger.node_up(node_up(REMOTE, Role.MIXED, epoch=2)) == ()
    assert ledger.node_up(node_up(REMOTE, Role.PREFILL, epoch=3)) == (), "announced again"
    assert ledger.node_down(NodeDown(node_id=REMOTE, epoch=2)) == ()
    assert ledger.node_down(NodeDown(node_id=NodeId("stranger"), epoch=2)) == ()
    assert (ledger.version, load_of(ledger, REMOTE)) == (version, (1, 1000))
    assert ledger.node_down(NodeDown(node_id=REMOTE, epoch=3)) == ("a",)
    assert ledger.node_up(node_up(REMOTE, Role.PREFILL, epoch=2)) == ()
    assert REMOTE not in {view.node_id for view in ledger.nodes()}


def test_roles_change_in_place() -> None:
    ledger = make_ledger()
    ledger.admit(decision("a"))
    ledger.role_changed(DECODE, Role.MIXED)
    assert view_of(ledger, DECODE).role is Role.MIXED
    assert load_of(ledger, DECODE) == (1, 0)
    version = ledger.version
    ledger.role_changed(DECODE, Role.MIXED)
    assert ledger.version == version
    with pytest.raises(LocalProtocolError, match="'gone' is not up"):
        ledger.role_changed(NodeId("gone"), Role.MIXED)


def test_rates_are_smoothed_and_weighed_by_time() -> None:
    ledger = make_ledger()
    assert view_of(ledger, PREFILL).prefill_tokens_per_s is None
    ledger.observe_prefill(PREFILL, 8000, 2.0)
    assert view_of(ledger, PREFILL).prefill_tokens_per_s == 4000
    ledger.observe_prefill(PREFILL, 100, 0.1)
    assert view_of(ledger, PREFILL).prefill_tokens_per_s == pytest.approx(6500 / 1.7)
    for _ in range(40):
        ledger.observe_prefill(PREFILL, 1000, 1.0)
        ledger.observe_decode(DECODE, 10, 0.25)
    assert view_of(ledger, PREFILL).prefill_tokens_per_s == pytest.approx(1000, rel=1e-3)
    assert view_of(ledger, DECODE).decode_step_s == pytest.approx(0.025)
    assert view_of(ledger, DECODE).prefill_tokens_per_s is None


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_measurements_that_measure_nothing_change_nothing(bad: float) -> None:
    ledger = make_ledger()
    version = ledger.version
    ledger.observe_prefill(PREFILL, 100, bad)
    ledger.observe_prefill(PREFILL, bad, 1.0)  # type: ignore[arg-type]
    ledger.observe_decode(DECODE, 1, bad)
    ledger.observe_decode(DECODE, bad, 1.0)  # type: ignore[arg-type]
    ledger.observe_prefill(NodeId("gone"), 100, 1.0)
    ledger.observe_decode(NodeId("gone"), 100, 1.0)
    ledger.observe_link([Delivery(num_bytes=10**9, start_s=0.0, end_s=bad)], 1.0)
    assert ledger.version == version
    assert ledger.link_bps() is None


def test_the_link_is_read_as_of_the_last_report() -> None:
    ledger = make_ledger()
    ledger.observe_link([Delivery(num_bytes=1_000_000, start_s=0.0, end_s=1.0)], 1.0)
    assert ledger.link_bps() == pytest.approx(8e6)
    version = ledger.version
    ledger.observe_link((), 2.0)
    assert ledger.version == version
    ledger.observe_link((), 1000.0)
    assert ledger.link_bps() is None
    assert ledger.version == version + 1


def test_H39_cache_events_reach_the_index_and_gaps_come_back() -> None:
    ledger = make_ledger()
    group = SPEC.groups[0].group_id
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=500, granule_hashes=HASHES)
    version = ledger.version
    ledger.cache_event(PREFILL, 1, CacheEvent(sequence=1, group_id=group, stored=tuple(HASHES[:3])))
    assert ledger.version == version + 1
    assert ledger.hit(PREFILL, request) == NodeHit(num_cached_tokens=192, num_held_tokens=192)
    assert ledger.hit(REMOTE, request) == NodeHit()
    ledger.cache_event(PREFILL, 0, CacheEvent(sequence=2, group_id=group))
    assert ledger.version == version + 1
    ledger.cache_event(PREFILL, 1, CacheEvent(sequence=4, group_id=group))
    assert ledger.needs_resync(PREFILL)
    assert ledger.resync(PREFILL, 1, 4, {group: HASHES[:2]})
    assert ledger.version == version + 3
    assert not ledger.needs_resync(PREFILL)
    assert ledger.hit(PREFILL, request).num_held_tokens == 128
    assert not ledger.resync(PREFILL, 1, 3, {group: HASHES})
    with pytest.raises(RemoteProtocolError):
        ledger.cache_event(PREFILL, 1, CacheEvent(sequence=5, group_id=7))  # type: ignore[arg-type]
    assert ledger.version == version + 3


def test_H38_a_node_that_is_gone_has_no_hits_and_its_events_are_ignored() -> None:
    ledger = make_ledger()
    group = SPEC.groups[0].group_id
    stored = CacheEvent(sequence=1, group_id=group, stored=tuple(HASHES))
    ledger.cache_event(PREFILL, 1, stored)
    ledger.node_down(NodeDown(node_id=PREFILL, epoch=1))
    version = ledger.version
    ledger.cache_event(PREFILL, 1, attrs.evolve(stored, sequence=2))
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=513, granule_hashes=HASHES)
    assert ledger.hit(PREFILL, request) == NodeHit()
    assert ledger.version == version
    ledger.node_up(node_up(PREFILL, Role.PREFILL, epoch=2))
    ledger.cache_event(PREFILL, 1, stored)
    assert ledger.hit(PREFILL, request) == NodeHit()
    ledger.cache_event(PREFILL, 2, stored)
    assert ledger.hit(PREFILL, request).num_held_tokens == 512


def test_blocks_of_a_node_may_be_larger_than_a_granule() -> None:
    ledger = make_ledger()
    ledger.node_up(node_up(PREFILL, Role.PREFILL, epoch=2), block_size=4)
    group = SPEC.groups[0].group_id
    ledger.cache_event(PREFILL, 2, CacheEvent(sequence=1, group_id=group, stored=(HASHES[3],)))
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=500, granule_hashes=HASHES)
    assert ledger.hit(PREFILL, request).num_cached_tokens == 256


def test_every_change_moves_the_version_by_one() -> None:
    ledger = make_ledger()
    steps: list[Callable[[], object]] = [
        lambda: ledger.node_up(node_up(NodeId("new"), Role.DECODE)),
        lambda: ledger.admit(decision("a")),
        lambda: ledger.prefilled(RequestId("a")),
        lambda: ledger.finished(RequestId("a")),
        lambda: ledger.role_changed(DECODE, Role.MIXED),
        lambda: ledger.observe_prefill(PREFILL, 10, 1.0),
        lambda: ledger.observe_decode(DECODE, 10, 1.0),
        lambda: ledger.admit(decision("b", predicted_bytes=7)),
        lambda: ledger.transferred(RequestId("b")),
        lambda: ledger.finished(RequestId("b")),
        lambda: ledger.draining(DECODE, True),
        lambda: ledger.draining(DECODE, False),
        lambda: ledger.observe_loss(0.5),
        lambda: ledger.node_down(NodeDown(node_id=NodeId("new"), epoch=1)),
    ]
    for step in steps:
        version = ledger.version
        step()
        assert ledger.version == version + 1
        ledger.nodes()
        assert ledger.version == version + 1


def test_only_the_views_of_changed_nodes_are_rebuilt() -> None:
    ledger = make_ledger()
    before = {view.node_id: view for view in ledger.nodes()}
    assert all(view is before[view.node_id] for view in ledger.nodes())
    ledger.admit(decision("a"))
    after = {view.node_id: view for view in ledger.nodes()}
    kept = {node_id for node_id in before if after[node_id] is before[node_id]}
    assert kept == {PREFILL, MIXED}


def test_repr_tells_the_load() -> None:
    ledger = make_ledger()
    ledger.admit(decision("a"))
    assert "4 nodes, 1 in flight, 1000 tokens queued" in repr(ledger)


def test_a_draining_node_takes_nothing_new_and_keeps_what_it_has() -> None:
    ledger = make_ledger()
    ledger.admit(decision("a"))
    ledger.draining(DECODE, True)
    assert view_of(ledger, DECODE).is_draining
    assert load_of(ledger, DECODE) == (1, 0)
    assert cluster_of(ledger, "pd").num_decode == 1, "the MIXED node"
    assert taken(ledger, "pd", Role.DECODE) == {MIXED}
    version = ledger.version
    ledger.draining(DECODE, True)
    assert ledger.version == version
    ledger.role_changed(DECODE, Role.MIXED)
    assert view_of(ledger, DECODE).is_draining
    assert taken(ledger, "pd", Role.PREFILL) == {PREFILL, MIXED}
    ledger.draining(DECODE, False)
    assert taken(ledger, "pd", Role.PREFILL) == {PREFILL, MIXED, DECODE}
    ledger.check()
    with pytest.raises(LocalProtocolError, match="'gone' is not up"):
        ledger.draining(NodeId("gone"), True)


def test_a_node_that_comes_back_no_longer_drains() -> None:
    ledger = make_ledger()
    ledger.draining(REMOTE, True)
    ledger.node_up(node_up(REMOTE, Role.PREFILL, epoch=2))
    assert not view_of(ledger, REMOTE).is_draining


def test_a_node_is_full_at_its_own_limit() -> None:
    ledger = make_ledger()
    ledger.node_up(attrs.evolve(node_up(MIXED, Role.MIXED, epoch=2), max_active=2))
    for name in "ab":
        assert not view_of(ledger, MIXED).is_full
        ledger.admit(decision(name, decode=MIXED))
    assert view_of(ledger, MIXED).is_full
    assert not view_of(ledger, DECODE).is_full


def cluster_of(ledger: LoadLedger, name: str) -> ClusterLoad:
    (load,) = [load for load in ledger.clusters() if load.cluster_id == name]
    return load


def test_clusters_are_summed_up_as_they_change() -> None:
    ledger = make_ledger()
    assert [load.cluster_id for load in ledger.clusters()] == ["prfaas", "pd"]
    assert cluster_of(ledger, "pd") == ClusterLoad(
        cluster_id=ClusterId("pd"),
        kind=ClusterKind.PD,
        num_prefill=2,
        num_decode=2,
        queued_tokens=0,
        num_active=0,
    )
    assert cluster_of(ledger, "pd") is cluster_of(ledger, "pd")
    ledger.admit(decision("a", prefill=PREFILL))
    assert cluster_of(ledger, "pd").queued_tokens == 1000
    assert cluster_of(ledger, "pd").num_active == 2
    ledger.node_up(
        attrs.evolve(node_up(PREFILL, Role.PREFILL, epoch=2), cluster_id=ClusterId("other"))
    )
    ledger.check()
    assert cluster_of(ledger, "pd") == attrs.evolve(
        cluster_of(ledger, "pd"), num_prefill=1, queued_tokens=0, num_active=0
    )
    assert cluster_of(ledger, "other").num_prefill == 1
    ledger.node_down(NodeDown(node_id=PREFILL, epoch=2))
    assert [load.cluster_id for load in ledger.clusters()] == ["prfaas", "pd"]


def taken(ledger: LoadLedger, cluster: str, stage: Role, **changes: object) -> set[NodeId]:
    """Nodes that come back as candidates in many draws."""
    request = attrs.evolve(RoutedRequest(request_id=RequestId("r"), num_tokens=500), **changes)
    rng = Random(0)
    return {
        candidate.node.node_id
        for _ in range(60)
        for candidate in ledger.candidates(request, ClusterId(cluster), stage, rng)
    }


def test_candidates_are_one_of_least_load_for_every_hit() -> None:
    ledger = make_ledger()
    assert taken(ledger, "pd", Role.PREFILL) == {PREFILL, MIXED}
    assert taken(ledger, "pd", Role.DECODE) == {DECODE, MIXED}
    assert taken(ledger, "nowhere", Role.DECODE) == set()
    excluded = frozenset({MIXED, NodeId("gone")})
    assert taken(ledger, "pd", Role.DECODE, excluded=excluded) == {DECODE}
    assert taken(ledger, "pd", Role.DECODE, excluded=excluded | {DECODE}) == set()
    ledger.admit(decision("a", prefill=PREFILL, decode=MIXED))
    assert taken(ledger, "pd", Role.PREFILL) == {MIXED}
    assert taken(ledger, "pd", Role.DECODE) == {DECODE}
    group = SPEC.groups[0].group_id
    ledger.cache_event(PREFILL, 1, CacheEvent(sequence=1, group_id=group, stored=(HASHES[0],)))
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=500, granule_hashes=HASHES)
    found = ledger.candidates(request, ClusterId("pd"), Role.PREFILL, Random(0))
    assert {candidate.node.node_id: candidate.hit for candidate in found} == {
        PREFILL: NodeHit(num_cached_tokens=64, num_held_tokens=64),
        MIXED: NodeHit(),
    }
    assert all(candidate.node in ledger.nodes() for candidate in found)


def test_hits_are_looked_up_once_per_request_and_cache_state() -> None:
    ledger = make_ledger()
    group = SPEC.groups[0].group_id
    request = RoutedRequest(request_id=RequestId("r"), num_tokens=500, granule_hashes=HASHES)

    def hits() -> set[int]:
        found = ledger.candidates(request, ClusterId("pd"), Role.PREFILL, Random(0))
        return {candidate.hit.num_held_tokens for candidate in found}

    assert hits() == {0}
    for sequence, num_blocks in enumerate((3, 4), 1):
        stored = tuple(HASHES[:num_blocks])
        ledger.cache_event(MIXED, 1, CacheEvent(sequence=sequence, group_id=group, stored=stored))
        assert hits() == {0, 64 * num_blocks}
    calls = []
    levels = ledger._index.levels
    ledger._index.levels = lambda *args: calls.append(args) or levels(*args)  # type: ignore[method-assign]
    for _ in range(3):
        assert hits() == {0, 256}
    assert not calls
    request = attrs.evolve(request, granule_hashes=HASHES[:1])
    assert hits() == {0, 64}
    ledger.node_down(NodeDown(node_id=MIXED, epoch=1))
    assert hits() == {0}
    assert len(calls) == 2


def test_H37_a_miss_goes_to_the_idle_node_and_equal_nodes_share() -> None:
    ledger = LoadLedger.for_spec(SPEC)
    names = [NodeId(f"n{i}") for i in range(4)]
    for node_id in names:
        ledger.node_up(node_up(node_id, Role.MIXED))
    request = RoutedRequest(request_id=RequestId("miss"), num_tokens=500)
    rng = Random(5)
    drawn: Counter[NodeId] = Counter()
    for _ in range(400):
        (chosen,) = ledger.candidates(request, ClusterId("pd"), Role.PREFILL, rng)
        drawn[chosen.node.node_id] += 1
    assert set(drawn) == set(names)
    assert all(60 <= count <= 140 for count in drawn.values())
    # One long prompt weighs more than ten short ones.
    ledger.admit(decision("long", prefill=names[0], decode=names[0], uncached=100_000))
    for i in range(30):
        node_id = names[1 + i % 3]
        ledger.admit(decision(f"s{i}", prefill=node_id, decode=node_id, uncached=100))
    assert taken(ledger, "pd", Role.PREFILL) == set(names[1:])
    assert taken(ledger, "pd", Role.DECODE) == {names[0]}


def test_the_backlog_is_what_was_admitted_and_has_not_landed() -> None:
    ledger = make_ledger()
    ledger.admit(decision("a", predicted_bytes=500, prefix_bytes=40))
    ledger.admit(decision("local", prefill=PREFILL, predicted_bytes=9000))
    ledger.admit(decision("pulled", prefill=PREFILL, predicted_bytes=9000, prefix_bytes=7))
    assert ledger.link_backlog_bytes() == 547
    ledger.prefilled(RequestId("pulled"))
    assert ledger.link_backlog_bytes() == 540, "nobody computes without its prefix"
    ledger.prefilled(RequestId("a"))
    assert ledger.link_backlog_bytes() == 500
    ledger.check()
    version = ledger.version
    for _ in range(2):
        ledger.transferred(RequestId("a"))
        ledger.transferred(RequestId("local"))
        ledger.transferred(RequestId("stranger"))
    assert (ledger.link_backlog_bytes(), ledger.version) == (0, version + 1)
    assert load_of(ledger, DECODE) == (3, 0), "it still decodes"
    ledger.finished(RequestId("a"))
    assert ledger.link_backlog_bytes() == 0
    ledger.check()


@pytest.mark.parametrize("node_id", [REMOTE, DECODE])
@pytest.mark.parametrize("is_prefilled", [False, True])
def test_H36_the_backlog_goes_with_the_request(node_id: NodeId, is_prefilled: bool) -> None:
    ledger = make_ledger()
    for name in ("done", "lost"):
        ledger.admit(decision(name, predicted_bytes=500, prefix_bytes=40))
        if is_prefilled:
            ledger.prefilled(RequestId(name))
    ledger.finished(RequestId("done"))
    assert ledger.link_backlog_bytes() == (500 if is_prefilled else 540)
    ledger.node_down(NodeDown(node_id=node_id, epoch=1))
    ledger.finished(RequestId("lost"))
    assert ledger.link_backlog_bytes() == 0
    ledger.check()


def test_loss_is_smoothed_and_what_is_no_share_changes_nothing() -> None:
    ledger = make_ledger()
    assert ledger.link_loss() is None
    ledger.observe_loss(0.5)
    assert ledger.link_loss() == 0.5
    ledger.observe_loss(0.0)
    assert ledger.link_loss() == pytest.approx(0.4)
    ledger.observe_loss(1.0)
    assert ledger.link_loss() == pytest.approx(0.52)
    version = ledger.version
    for bad in (math.nan, math.inf, -0.1, 1.1):
        ledger.observe_loss(bad)
    assert (ledger.link_loss(), ledger.version) == (pytest.approx(0.52), version)


def loads_of(ledger: LoadLedger, now: float) -> dict[NodeId, NodeLoad]:
    return {load.node_id: load for load in ledger.loads(now)}


def test_loads_tell_what_was_done_since_the_last_call() -> None:
    ledger = make_ledger()
    ledger.node_up(attrs.evolve(node_up(DECODE, Role.DECODE, epoch=2), num_slots=2))
    first = loads_of(ledger, 100.0)
    assert set(first) == {REMOTE, PREFILL, DECODE, MIXED}
    assert first[DECODE] == NodeLoad(
        node_id=DECODE, epoch=2, prefill_busy=0, decode_busy=0, queued_tokens=0, num_waiting=0
    )
    ledger.admit(decision("a"), 100.0)
    ledger.admit(decision("b", uncached=30), 100.0)
    ledger.prefilled(RequestId("a"), 104.0)
    ledger.prefilled(RequestId("a"), 105.0)
    loads = loads_of(ledger, 110.0)
    assert loads[REMOTE].prefill_busy == 1  # with "b", which is not done
    assert loads[REMOTE].queued_tokens == 30
    assert loads[DECODE].decode_busy == pytest.approx(6 / 20)
    ledger.prefilled(RequestId("b"), 114.0)
    ledger.finished(RequestId("b"), 114.0)
    ledger.finished(RequestId("a"), 115.0)
    loads = loads_of(ledger, 120.0)
    assert loads[REMOTE].prefill_busy == pytest.approx(0.4)
    assert loads[DECODE].decode_busy == pytest.approx(5 / 20)
    loads = loads_of(ledger, 130.0)
    assert loads[DECODE].decode_busy == 0
    assert loads[REMOTE].prefill_busy == 0


def test_requests_beyond_the_slots_wait() -> None:
    ledger = make_ledger()
    ledger.node_up(attrs.evolve(node_up(DECODE, Role.DECODE, epoch=2), num_slots=2))
    for name in "abcde":
        ledger.admit(decision(name), 0.0)
    for name in "abcd":
        ledger.prefilled(RequestId(name), 0.0)
    load = loads_of(ledger, 10.0)[DECODE]
    assert (load.decode_busy, load.num_waiting) == (1.0, 2)
    ledger.finished(RequestId("e"), 10.0)
    assert loads_of(ledger, 11.0)[DECODE].num_waiting == 2, "it was not decoding yet"
    for name in "abc":
        ledger.finished(RequestId(name), 12.0)
    load = loads_of(ledger, 13.0)[DECODE]
    assert (load.decode_busy, load.num_waiting) == (pytest.approx(0.75), 0)


@pytest.mark.parametrize(("num_slots", "num_waiting"), [(None, 0), (0, 1)])
def test_without_slots_a_node_that_decodes_counts_as_busy(
    num_slots: int | None, num_waiting: int
) -> None:
    ledger = make_ledger()
    ledger.node_up(attrs.evolve(node_up(DECODE, Role.DECODE, epoch=2), num_slots=num_slots))
    ledger.admit(decision("a"), 0.0)
    assert loads_of(ledger, 1.0)[DECODE].decode_busy == 0
    ledger.prefilled(RequestId("a"), 1.0)
    load = loads_of(ledger, 2.0)[DECODE]
    assert (load.decode_busy, load.num_waiting) == (1.0, num_waiting)
    ledger.finished(RequestId("a"), 2.0)
    assert loads_of(ledger, 3.0)[DECODE].decode_busy == 0


def test_events_without_a_time_count_as_of_the_latest_one() -> None:
    ledger = make_ledger()
    ledger.node_up(attrs.evolve(node_up(DECODE, Role.DECODE, epoch=2), num_slots=1))
    ledger.admit(decision("a"))
    ledger.prefilled(RequestId("a"))
    assert loads_of(ledger, 50.0)[DECODE].decode_busy == 1, "no period yet: this instant"
    ledger.admit(decision("b"), 54.0)
    ledger.finished(RequestId("a"))
    assert loads_of(ledger, 60.0)[DECODE].decode_busy == pytest.approx(0.4)
    ledger.transferred(RequestId("b"), 68.0)
    ledger.prefilled(RequestId("b"), 3.0)
    assert loads_of(ledger, 70.0)[DECODE].decode_busy == pytest.approx(0.2), "clocks run forward"


def test_the_first_time_that_is_told_starts_the_first_period() -> None:
    ledger = make_ledger()
    ledger.admit(decision("a"), 10.0)
    ledger.prefilled(RequestId("a"), 12.0)
    assert loads_of(ledger, 14.0)[REMOTE].prefill_busy == pytest.approx(0.5)
    ledger.admit(decision("b"), 16.0)
    ledger.node_up(node_up(PREFILL, Role.PREFILL, epoch=2))
    ledger.admit(decision("c", prefill=PREFILL))
    ledger.prefilled(RequestId("c"), 17.0)
    assert loads_of(ledger, 18.0)[PREFILL].prefill_busy == pytest.approx(0.5), "its own period"
