"""A node that may prefill a request, with what the request would cost there."""

from __future__ import annotations

import attrs

from prfaas.policy.prefix import Prefix
from prfaas.policy.survey import Survey
from prfaas.seams import Candidate, NodeView, RouteReason, RoutingDecision
from prfaas.spec import ModelSpec


@attrs.frozen
class Place:
    """A prefill node, seen from one request.

    Attributes:
        candidate: the node and its own hit.
        uncached_tokens: what it would have to compute.
        prefix: a prefix that goes there first; then the uncached tokens are those behind it.
    """

    candidate: Candidate
    uncached_tokens: int
    prefix: Prefix | None = None

    @property
    def node(self) -> NodeView:
        return self.candidate.node

    @property
    def backlog_tokens(self) -> int:
        """Tokens that the node computes until this prompt is done."""
        return self.candidate.node.queued_tokens + self.uncached_tokens


def shipped_bytes(spec: ModelSpec, survey: Survey, node: NodeView) -> int:
    """Bytes that cross to the decode node after a prefill at ``node``: rows that it lacks, and the
    states; none if it is that node."""
    decode = survey.decode
    if node.node_id == decode.node.node_id:
        return 0
    return spec.kv_bytes_delta(survey.request.num_tokens, decode.hit.num_held_tokens)


def decision(
    survey: Survey,
    place: Place,
    *,
    offloaded: bool,
    reason: RouteReason,
    routed_tokens: int,
    threshold_tokens: int,
    predicted_bytes: int,
    predicted_ttft_s: float | None,
) -> RoutingDecision:
    """The record of a choice."""
    prefix = place.prefix
    return RoutingDecision(
        request_id=survey.request.request_id,
        decode_node=survey.decode.node.node_id,
        prefill_node=place.node.node_id,
        offloaded=offloaded,
        reason=reason,
        cached_tokens=survey.request.num_tokens - place.uncached_tokens,
        uncached_tokens=place.uncached_tokens,
        routed_tokens=routed_tokens,
        held_tokens=survey.decode.hit.num_held_tokens,
        threshold_tokens=threshold_tokens,
        predicted_bytes=predicted_bytes,
        predicted_ttft_s=predicted_ttft_s,
        view_version=survey.view.version,
        prefix_node=None if prefix is None else prefix.source,
        prefix_tokens=0 if prefix is None else prefix.num_tokens,
        prefix_bytes=0 if prefix is None else prefix.num_bytes,
    )
