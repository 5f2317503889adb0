"""The paper's router: decode node first, then local or remote prefill by the uncached length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TypeVar

import attrs

from prfaas.core import ClusterKind
from prfaas.errors import CapacityError
from prfaas.policy.threshold import ThresholdController
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
from prfaas.spec import ModelSpec

_T = TypeVar("_T")


@attrs.frozen
class _Candidate:
    """A node that may prefill, with what it would have to compute."""

    node: NodeView
    hit: NodeHit
    uncached_tokens: int

    @property
    def backlog_tokens(self) -> int:
        """Tokens that the node computes until this prompt is done."""
        return self.node.queued_tokens + self.uncached_tokens


class ThresholdRouter(Router):
    """Length-based threshold routing, arXiv 2604.15039, sections 3.4.2 and 3.4.3.

    The caches of the clusters are judged apart (the paper's rule for scarce bandwidth): l is N less
    the best usable hit among the local prefill nodes that may take the request, and l > t goes to
    PRFAAS. That is where the choice of the cluster ends; inside it the node with the fewest tokens
    to compute until this prompt is done wins, its queue and the prompt's uncached part together, so
    a cache attracts only as far as it saves more than its node's queue costs. Ties are spread.

    A request falls back to the other side when its own has no node, and says so in its reason.

    Args:
        spec: gives the bytes of a prediction.
        controller: owns t; the router gives it every request's length and the time.
    """

    def __init__(self, spec: ModelSpec, controller: ThresholdController) -> None:
        self._spec = spec
        self._controller = controller

    def __repr__(self) -> str:
        return f"<ThresholdRouter {self._spec.name}, {self._controller!r}>"

    @property
    def threshold_tokens(self) -> int:
        return self._controller.threshold_tokens

    def route(
        self, request: RoutedRequest, view: ClusterView, now: float, rng: Random
    ) -> RoutingDecision:
        nodes = [node for node in view.nodes() if node.node_id not in request.excluded]
        remote_nodes = [
            node for node in nodes if node.kind is ClusterKind.PRFAAS and node.role.prefills
        ]
        decode, held = _choose_decode(request, view, nodes, bool(remote_nodes), rng)
        threshold_tokens = self._controller.update(view, now)
        local = _candidates(
            request,
            view,
            (n for n in nodes if n.cluster_id == decode.cluster_id and n.role.prefills),
        )
        routed_tokens = min((c.uncached_tokens for c in local), default=request.num_tokens)
        is_long = routed_tokens > threshold_tokens
        offloaded = bool(remote_nodes) if is_long else not local
        candidates = _candidates(request, view, remote_nodes) if offloaded else local
        chosen = _spread(candidates, [c.backlog_tokens for c in candidates], rng)
        predicted_bytes = 0
        if chosen.node.node_id != decode.node_id:
            predicted_bytes = self._spec.kv_bytes_delta(request.num_tokens, held.num_held_tokens)
        return RoutingDecision(
            request_id=request.request_id,
            decode_node=decode.node_id,
            prefill_node=chosen.node.node_id,
            offloaded=offloaded,
            reason=_reason(is_long=is_long, offloaded=offloaded),
            cached_tokens=chosen.hit.num_cached_tokens,
            uncached_tokens=chosen.uncached_tokens,
            routed_tokens=routed_tokens,
            held_tokens=held.num_held_tokens,
            threshold_tokens=threshold_tokens,
            predicted_bytes=predicted_bytes,
            predicted_ttft_s=_predicted_ttft_s(
                chosen, predicted_bytes if offloaded else 0, view.link_bps()
            ),
            view_version=view.version,
        )

    def observe(self, outcome: RequestOutcome, now: float) -> None:
        self._controller.observe(outcome.decision.routed_tokens)


def _choose_decode(
    request: RoutedRequest,
    view: ClusterView,
    nodes: Sequence[NodeView],
    has_remote: bool,
    rng: Random,
) -> tuple[NodeView, NodeHit]:
    """The decode node with the fewest requests, then with the most rows of this prompt."""
    decoders = [node for node in nodes if node.kind is ClusterKind.PD and node.role.decodes]
    if not decoders:
        raise _no_room(request, view, nodes, "decode")
    if not has_remote:
        prefilling = {
            node.cluster_id for node in nodes if node.kind is ClusterKind.PD and node.role.prefills
        }
        decoders = [node for node in decoders if node.cluster_id in prefilling]
        if not decoders:
            raise _no_room(request, view, nodes, "prefill")
    fewest = min(node.num_active for node in decoders)
    idlest = [node for node in decoders if node.num_active == fewest]
    hits = [view.hit(node.node_id, request) for node in idlest]
    return _spread(list(zip(idlest, hits, strict=True)), [-h.num_held_tokens for h in hits], rng)


def _candidates(
    request: RoutedRequest, view: ClusterView, nodes: Iterable[NodeView]
) -> list[_Candidate]:
    hits = ((node, view.hit(node.node_id, request)) for node in nodes)
    return [_Candidate(node, hit, request.num_tokens - hit.num_cached_tokens) for node, hit in hits]


def _spread(items: Sequence[_T], scores: Sequence[int], rng: Random) -> _T:
    """The item with the least score, at random among equals."""
    least = min(scores)
    equals = [item for item, score in zip(items, scores, strict=True) if score == least]
    return equals[0] if len(equals) == 1 else rng.choice(equals)


def _reason(*, is_long: bool, offloaded: bool) -> RouteReason:
    if is_long:
        return RouteReason.LONG if offloaded else RouteReason.REMOTE_DOWN
    return RouteReason.LOCAL_DOWN if offloaded else RouteReason.SHORT


def _predicted_ttft_s(
    chosen: _Candidate, crossing_bytes: int, link_bps: float | None
) -> float | None:
    """Queue, then the slower of prefill and transfer, which overlap layer by layer (Eq. 3).

    None as long as a rate that it needs has not been measured. Inside a PD cluster the fabric
    never binds (Eq. 4), so only ``crossing_bytes`` between clusters take time.
    """
    rate = chosen.node.prefill_tokens_per_s
    if not rate or (crossing_bytes and not link_bps):
        return None
    transfer_s = 8 * crossing_bytes / link_bps if link_bps else 0.0
    return chosen.node.queued_tokens / rate + max(chosen.uncached_tokens / rate, transfer_s)


def _no_room(
    request: RoutedRequest, view: ClusterView, nodes: Sequence[NodeView], what: str
) -> CapacityError:
    num_up = len(view.nodes())
    return CapacityError(
        f"no node can {what} request {request.request_id!r}: {num_up} nodes are up, "
        f"{num_up - len(nodes)} of them excluded after failures, and none of the other "
        f"{len(nodes)} has a role that can {what} it; bring up or convert a PD node, then retry"
    )
