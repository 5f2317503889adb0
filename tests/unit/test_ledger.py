from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import pytest

from prfaas.core import BlockHash, ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.policy import LoadLedger
from prfaas.seams import (
    CacheEvent,
    Delivery,
    NodeDown,
    NodeHit,
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
    name: str, *, prefill: NodeId = REMOTE, decode: NodeId = DECODE, uncached: int = 1000
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
        predicted_bytes=0,
        predicted_ttft_s=None,
        view_version=0,
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
        lambda: ledger.admit(decision("b")),
        lambda: ledger.finished(RequestId("b")),
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
