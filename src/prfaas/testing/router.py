"""Conformance of a `Router`: what every policy must hold, whatever its idea."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TypeAlias

import attrs

from prfaas.core import ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.errors import CapacityError
from prfaas.seams import (
    ClusterView,
    NodeHit,
    NodeView,
    RequestOutcome,
    RoutedRequest,
    Router,
    RouteReason,
    RoutingDecision,
)

MakeRouter: TypeAlias = Callable[[], Router]

_NUM_TOKENS = 40_000
_NUM_MISSES = 400


@attrs.frozen(kw_only=True)
class StillView(ClusterView):
    """A `ClusterView` in which nothing happens.

    Attributes:
        views: the nodes that are up.
        hits: predicted hits; nodes that are not named have none.
        rate_bps: link rate.
        version: any number.
    """

    views: Sequence[NodeView]
    hits: Mapping[NodeId, NodeHit] = attrs.field(factory=dict)
    rate_bps: float | None = None
    version: int = 7

    def nodes(self) -> Sequence[NodeView]:
        return self.views

    def hit(self, node_id: NodeId, request: RoutedRequest) -> NodeHit:
        return self.hits.get(node_id, NodeHit())

    def link_bps(self) -> float | None:
        return self.rate_bps


def check_router(make_router: MakeRouter) -> None:
    """Runs every check of the `Router` contract on fresh routers.

    Args:
        make_router: returns a new router without history, the same one each time.

    Raises:
        AssertionError: the contract is broken; the message says where.
    """
    _check_decisions(make_router)
    _check_refusals(make_router)
    _check_exclusion(make_router)
    _check_repeatable(make_router)
    _check_names(make_router)
    _check_ties(make_router)
    _check_failures(make_router)


def _check_decisions(make_router: MakeRouter) -> None:
    router = make_router()
    for number, view in enumerate(_views()):
        for num_tokens in (1, 64, 65, 2_000, _NUM_TOKENS, 200_000):
            request = RoutedRequest(request_id=RequestId(f"r{number}"), num_tokens=num_tokens)
            clipped = attrs.evolve(view, hits=_clipped(view.hits, num_tokens))
            decision = router.route(request, clipped, float(number), Random(number))
            _check_decision(decision, request, clipped)
            _require(
                decision.threshold_tokens == router.threshold_tokens,
                f"decided with t={decision.threshold_tokens}, reports {router.threshold_tokens}",
            )


def _check_decision(decision: RoutingDecision, request: RoutedRequest, view: StillView) -> None:
    nodes = {node.node_id: node for node in view.views}
    decode, prefill = nodes.get(decision.decode_node), nodes.get(decision.prefill_node)
    if decode is None or prefill is None:
        raise AssertionError(f"{decision} names a node that is not up")
    _require(decision.request_id == request.request_id, f"{decision} is for another request")
    _require(decode.kind is ClusterKind.PD, f"{decision} decodes in a PRFAAS cluster")
    _require(decode.role.decodes, f"{decision} decodes on a {decode.role.value} node")
    _require(prefill.role.prefills, f"{decision} prefills on a {prefill.role.value} node")
    is_remote = prefill.kind is ClusterKind.PRFAAS
    _require(decision.offloaded is is_remote, f"{decision} does not say where it prefills")
    hit = view.hit(prefill.node_id, request)
    _require(
        decision.cached_tokens <= hit.num_cached_tokens < request.num_tokens,
        f"{decision} predicts a larger hit than {hit}",
    )
    _require(
        decision.cached_tokens + decision.uncached_tokens == request.num_tokens,
        f"{decision}: cached and uncached tokens do not add up to {request.num_tokens}",
    )
    _require(
        decision.held_tokens <= view.hit(decode.node_id, request).num_held_tokens,
        f"{decision} counts on rows that the decode node does not hold",
    )
    _require(decision.predicted_bytes >= 0, f"{decision} predicts fewer than 0 bytes")
    if prefill is decode:
        _require(decision.predicted_bytes == 0, f"{decision} ships to itself")
    ttft_s = decision.predicted_ttft_s
    _require(ttft_s is None or ttft_s >= 0, f"{decision} predicts a negative TTFT")
    _require(decision.view_version == view.version, f"{decision} read another view")
    _check_reason(decision)


def _check_reason(decision: RoutingDecision) -> None:
    is_long = decision.routed_tokens > decision.threshold_tokens
    expected = {
        (False, False): RouteReason.SHORT,
        (False, True): RouteReason.LOCAL_DOWN,
        (True, True): RouteReason.LONG,
        (True, False): RouteReason.REMOTE_DOWN,
    }[is_long, decision.offloaded]
    _require(decision.reason is expected, f"{decision}: the reason should be {expected}")


def _check_refusals(make_router: MakeRouter) -> None:
    remote, local = _remote("r", 2), _local("p", 2, Role.PREFILL)
    decoders = _local("d", 2, Role.DECODE)
    for views, lack in (([], "nodes"), (remote + local, "decoders"), (decoders, "prefillers")):
        router, before = make_router(), make_router().threshold_tokens
        try:
            decision = router.route(_request(), StillView(views=views), 0.0, Random(0))
        except CapacityError:
            _require(router.threshold_tokens == before, "t moved on a refusal")
        else:
            raise AssertionError(f"routed without {lack}: {decision}; raise CapacityError")


def _check_exclusion(make_router: MakeRouter) -> None:
    views = _remote("r", 2) + _local("p", 2, Role.PREFILL) + _local("d", 2, Role.DECODE)
    everything = {node.node_id: NodeHit(num_held_tokens=6_400) for node in views}
    view = StillView(views=views, hits=everything)
    for kept in ("r0 p0 d0", "r1 d1", "p1 d0"):
        excluded = frozenset(node.node_id for node in views) - {NodeId(n) for n in kept.split()}
        request = attrs.evolve(_request(), excluded=excluded)
        decision = make_router().route(request, view, 0.0, Random(0))
        used = {decision.decode_node, decision.prefill_node}
        _require(not used & excluded, f"{decision} uses a node of {sorted(excluded)}")
    request = attrs.evolve(_request(), excluded=frozenset(node.node_id for node in views))
    try:
        decision = make_router().route(request, view, 0.0, Random(0))
    except CapacityError:
        return
    raise AssertionError(f"routed to an excluded node: {decision}; raise CapacityError")


def _check_repeatable(make_router: MakeRouter) -> None:
    one, two = make_router(), make_router()
    rngs = Random(11), Random(11)
    for step, view in enumerate(_views() * 3):
        request = attrs.evolve(_request(), num_tokens=1_000 * 3 ** (step % 5))
        view = attrs.evolve(view, hits=_clipped(view.hits, request.num_tokens))
        first = one.route(request, view, float(step), rngs[0])
        second = two.route(request, view, float(step), rngs[1])
        _require(first == second, f"the same history gave {first} and {second}")
        outcome = RequestOutcome(decision=first, ok=True)
        one.observe(outcome, float(step))
        two.observe(outcome, float(step))


def _check_names(make_router: MakeRouter) -> None:
    for view in _views():
        names = [node.node_id for node in view.views]
        renamed = dict(zip(names, (NodeId(f"x{i}") for i in range(len(names), 0, -1)), strict=True))
        twin = attrs.evolve(
            view,
            views=[attrs.evolve(node, node_id=renamed[node.node_id]) for node in view.views],
            hits={renamed[node_id]: hit for node_id, hit in view.hits.items()},
        )
        decision = make_router().route(_request(), view, 0.0, Random(3))
        other = make_router().route(_request(), twin, 0.0, Random(3))
        expected = attrs.evolve(
            decision,
            decode_node=renamed[decision.decode_node],
            prefill_node=renamed[decision.prefill_node],
        )
        _require(other == expected, f"other names of nodes changed {decision} to {other}")


def _check_ties(make_router: MakeRouter) -> None:
    decoders = _local("d", 2, Role.DECODE)
    view = StillView(views=_remote("r", 4) + _local("p", 4, Role.PREFILL) + decoders)
    router, rng = make_router(), Random(5)
    chosen: Counter[NodeId] = Counter()
    for _ in range(_NUM_MISSES):
        chosen[router.route(_request(), view, 0.0, rng).prefill_node] += 1
    share = _NUM_MISSES / 4
    _require(
        all(0.6 * share <= count <= 1.4 * share for count in chosen.values()) and len(chosen) == 4,
        f"{_NUM_MISSES} misses on 4 idle equal nodes went {dict(chosen)}; spread ties by rng",
    )


def _check_failures(make_router: MakeRouter) -> None:
    router, view = make_router(), _views()[0]
    decision = router.route(_request(), view, 0.0, Random(0))
    for ok in (False, True, False):
        router.observe(RequestOutcome(decision=decision, ok=ok), 1.0)
    _check_decision(router.route(_request(), view, 2.0, Random(0)), _request(), view)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _request() -> RoutedRequest:
    return RoutedRequest(request_id=RequestId("r"), num_tokens=_NUM_TOKENS)


def _views() -> list[StillView]:
    """Clusters that can serve: whole, without one side, mixed, loaded, and with caches."""
    remote, local = _remote("r", 3), _local("p", 2, Role.PREFILL)
    decoders = _local("d", 2, Role.DECODE)
    busy = [
        attrs.evolve(node, num_active=i, queued_tokens=30_000 * i, prefill_tokens_per_s=9_000.0)
        for i, node in enumerate(remote + local + decoders)
    ]
    hits = {
        NodeId("p0"): NodeHit(num_cached_tokens=32_000, num_held_tokens=38_400),
        NodeId("r1"): NodeHit(num_cached_tokens=6_400, num_held_tokens=6_400),
        NodeId("d1"): NodeHit(num_cached_tokens=0, num_held_tokens=12_800),
    }
    return [
        StillView(views=remote + local + decoders),
        StillView(views=local + decoders),
        StillView(views=remote + decoders),
        StillView(views=remote + _local("m", 2)),
        StillView(views=_local("m", 1)),
        StillView(views=busy, rate_bps=1e9),
        StillView(views=busy, hits=hits, rate_bps=1e9),
    ]


def _clipped(hits: Mapping[NodeId, NodeHit], num_tokens: int) -> dict[NodeId, NodeHit]:
    return {
        node_id: NodeHit(
            num_cached_tokens=min(hit.num_cached_tokens, (num_tokens - 1) // 64 * 64),
            num_held_tokens=min(hit.num_held_tokens, num_tokens // 64 * 64),
        )
        for node_id, hit in hits.items()
    }


def _remote(name: str, num: int) -> list[NodeView]:
    return _nodes(name, num, ClusterKind.PRFAAS, Role.PREFILL)


def _local(name: str, num: int, role: Role = Role.MIXED) -> list[NodeView]:
    return _nodes(name, num, ClusterKind.PD, role)


def _nodes(name: str, num: int, kind: ClusterKind, role: Role) -> list[NodeView]:
    return [
        NodeView(
            node_id=NodeId(f"{name}{i}"),
            cluster_id=ClusterId(kind.value),
            kind=kind,
            role=role,
            epoch=1,
            num_active=0,
            queued_tokens=0,
            prefill_tokens_per_s=None,
            decode_step_s=None,
        )
        for i in range(num)
    ]
