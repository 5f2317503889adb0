"""Conformance of a `Router`: what every policy must hold, whatever its idea."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import TypeAlias

import attrs

from prfaas.core import ClusterKind, NodeId, RequestId, Role
from prfaas.errors import CapacityError
from prfaas.seams import (
    NodeHit,
    RequestOutcome,
    RoutedRequest,
    Router,
    RouteReason,
    RoutingDecision,
)
from prfaas.testing.still_view import StillView, example_views, pd_nodes, prfaas_nodes

__all__ = ["MakeRouter", "StillView", "check_router"]

MakeRouter: TypeAlias = Callable[[], Router]

_NUM_TOKENS = 40_000
_NUM_MISSES = 400


def check_router(make_router: MakeRouter) -> None:
    """Runs every check of the `Router` contract on fresh routers.

    Args:
        make_router: returns a new router without history, the same one each time.

    Raises:
        AssertionError: the contract is broken; the message says where.
    """
    _check_decisions(make_router)
    _check_refusals(make_router)
    _check_limits(make_router)
    _check_exclusion(make_router)
    _check_repeatable(make_router)
    _check_names(make_router)
    _check_ties(make_router)
    _check_failures(make_router)


def _check_decisions(make_router: MakeRouter) -> None:
    router = make_router()
    for number, view in enumerate(example_views()):
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
    _require(decode.takes(Role.DECODE), f"{decision} decodes on {decode}")
    _require(prefill.takes(Role.PREFILL), f"{decision} prefills on {prefill}")
    is_remote = prefill.kind is ClusterKind.PRFAAS
    _require(decision.offloaded is is_remote, f"{decision} does not say where it prefills")
    _require(
        is_remote or prefill.cluster_id == decode.cluster_id,
        f"{decision} prefills in one PD cluster and decodes in another",
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
    _check_hit(decision, request, view)
    _check_reason(decision, request, view)


def _check_hit(decision: RoutingDecision, request: RoutedRequest, view: StillView) -> None:
    """The hit is the prefill node's own, or that of a node whose prefix goes there first."""
    usable = view.hit(decision.prefill_node, request).num_cached_tokens
    if decision.prefix_node is None:
        _require(
            decision.prefix_tokens == decision.prefix_bytes == 0,
            f"{decision} moves a prefix of no node",
        )
    else:
        source = view.hit(decision.prefix_node, request).num_cached_tokens
        _require(
            usable < decision.prefix_tokens <= source,
            f"{decision} moves a prefix that is not there, or is not longer than {usable}",
        )
        _require(decision.prefix_bytes > 0, f"{decision} moves a prefix without bytes")
        usable = decision.prefix_tokens
    _require(
        decision.cached_tokens <= usable < request.num_tokens,
        f"{decision} predicts a larger hit than {usable}",
    )


def _check_reason(decision: RoutingDecision, request: RoutedRequest, view: StillView) -> None:
    able = [
        node
        for node in view.views
        if node.takes(Role.PREFILL) and node.node_id not in request.excluded
    ]
    cluster = next(n.cluster_id for n in view.views if n.node_id == decision.decode_node)
    remote = [node for node in able if node.kind is ClusterKind.PRFAAS]
    local = [node for node in able if node.cluster_id == cluster]
    is_long = decision.routed_tokens > decision.threshold_tokens
    # A sparse view shows one node per hit: that one is full, others need not be.
    enough = any if view.is_sparse else all
    is_remote_full = bool(remote) and enough(node.is_full for node in remote)
    holds = {
        RouteReason.SHORT: not is_long and not decision.offloaded,
        RouteReason.LONG: is_long and decision.offloaded,
        RouteReason.REMOTE_DOWN: not remote and not decision.offloaded,
        RouteReason.REMOTE_FULL: is_remote_full and not decision.offloaded,
        RouteReason.LOCAL_DOWN: decision.offloaded
        and (not local or enough(node.is_full for node in local)),
        RouteReason.LINK_DOWN: not decision.offloaded,
        RouteReason.CHEAPER_LOCAL: not decision.offloaded,
        RouteReason.CHEAPER_REMOTE: decision.offloaded,
    }
    _require(holds[decision.reason], f"{decision}: its reason does not hold")


def _check_limits(make_router: MakeRouter) -> None:
    """A node at its limit gets nothing while an equal one has room."""
    for name in ("r0", "p0", "d0"):
        views = (
            prfaas_nodes("r", 2) + pd_nodes("p", 2, Role.PREFILL) + pd_nodes("d", 2, Role.DECODE)
        )
        full = [attrs.evolve(v, max_active=0 if v.node_id == name else None) for v in views]
        for seed in range(8):
            for num_tokens in (1, 200_000):
                request = attrs.evolve(_request(), num_tokens=num_tokens)
                decision = make_router().route(request, StillView(views=full), 0.0, Random(seed))
                _require(
                    name not in (decision.decode_node, decision.prefill_node),
                    f"{decision} goes to {name}, which is full, and its twin is idle",
                )


def _check_refusals(make_router: MakeRouter) -> None:
    remote, local = prfaas_nodes("r", 2), pd_nodes("p", 2, Role.PREFILL)
    decoders = pd_nodes("d", 2, Role.DECODE)
    for views, lack in (([], "nodes"), (remote + local, "decoders"), (decoders, "prefillers")):
        router, before = make_router(), make_router().threshold_tokens
        try:
            decision = router.route(_request(), StillView(views=views), 0.0, Random(0))
        except CapacityError:
            _require(router.threshold_tokens == before, "t moved on a refusal")
        else:
            raise AssertionError(f"routed without {lack}: {decision}; raise CapacityError")


def _check_exclusion(make_router: MakeRouter) -> None:
    views = prfaas_nodes("r", 2) + pd_nodes("p", 2, Role.PREFILL) + pd_nodes("d", 2, Role.DECODE)
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
    for step, view in enumerate(example_views() * 3):
        request = attrs.evolve(_request(), num_tokens=1_000 * 3 ** (step % 5))
        view = attrs.evolve(view, hits=_clipped(view.hits, request.num_tokens))
        first = one.route(request, view, float(step), rngs[0])
        second = two.route(request, view, float(step), rngs[1])
        _require(first == second, f"the same history gave {first} and {second}")
        outcome = RequestOutcome(decision=first, ok=True)
        one.observe(outcome, float(step))
        two.observe(outcome, float(step))


def _check_names(make_router: MakeRouter) -> None:
    for view in example_views():
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
            prefix_node=None if decision.prefix_node is None else renamed[decision.prefix_node],
        )
        _require(other == expected, f"other names of nodes changed {decision} to {other}")


def _check_ties(make_router: MakeRouter) -> None:
    decoders = pd_nodes("d", 2, Role.DECODE)
    nodes = prfaas_nodes("r", 4) + pd_nodes("p", 4, Role.PREFILL) + decoders
    for is_sparse in (False, True):
        view = StillView(views=nodes, is_sparse=is_sparse)
        router, rng = make_router(), Random(5)
        chosen: Counter[NodeId] = Counter()
        for _ in range(_NUM_MISSES):
            chosen[router.route(_request(), view, 0.0, rng).prefill_node] += 1
        share = _NUM_MISSES / 4
        _require(
            all(0.6 * share <= n <= 1.4 * share for n in chosen.values()) and len(chosen) == 4,
            f"{_NUM_MISSES} misses on 4 idle equal nodes went {dict(chosen)}; spread ties by rng",
        )


def _check_failures(make_router: MakeRouter) -> None:
    router, view = make_router(), example_views()[0]
    decision = router.route(_request(), view, 0.0, Random(0))
    for ok in (False, True, False):
        router.observe(RequestOutcome(decision=decision, ok=ok), 1.0)
    _check_decision(router.route(_request(), view, 2.0, Random(0)), _request(), view)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _request() -> RoutedRequest:
    return RoutedRequest(request_id=RequestId("r"), num_tokens=_NUM_TOKENS)


def _clipped(hits: Mapping[NodeId, NodeHit], num_tokens: int) -> dict[NodeId, NodeHit]:
    return {
        node_id: NodeHit(
            num_cached_tokens=min(hit.num_cached_tokens, (num_tokens - 1) // 64 * 64),
            num_held_tokens=min(hit.num_held_tokens, num_tokens // 64 * 64),
        )
        for node_id, hit in hits.items()
    }
