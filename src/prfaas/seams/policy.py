"""The Router seam and the values it exchanges. Pure and synchronous."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Protocol

import attrs

from prfaas.core import BlockHash, ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.errors import ConfigError


@attrs.frozen(kw_only=True)
class RoutedRequest:
    """What a router needs to know of a request.

    Attributes:
        request_id: name.
        num_tokens: prompt length N.
        granule_hashes: chained hashes of the prompt's complete granules (tenant salt included).
        excluded: nodes that already failed this request.
    """

    request_id: RequestId
    num_tokens: int = attrs.field()
    granule_hashes: Sequence[BlockHash] = ()
    excluded: frozenset[NodeId] = frozenset()

    @num_tokens.validator
    def _check_num_tokens(self, _: object, value: int) -> None:
        if type(value) is not int or value < 1:
            raise ConfigError(f"num_tokens is {value!r}; a prompt has at least 1 token")


class RouteReason(enum.Enum):
    """Why a request prefills where it does."""

    SHORT = "short"  # uncached tokens <= t
    LONG = "long"  # uncached tokens > t
    REMOTE_DOWN = "remote_down"  # longer than t, but no PRFAAS node can take it
    LOCAL_DOWN = "local_down"  # at most t, but no PD node can prefill
    REMOTE_FULL = "remote_full"  # longer than t, but every PRFAAS node is at its limit
    LINK_DOWN = "link_down"  # longer than t, but the link carries nothing
    CHEAPER_LOCAL = "cheaper_local"  # a router without t found the PD cluster cheaper
    CHEAPER_REMOTE = "cheaper_remote"  # and here the PRFAAS cluster


@attrs.frozen(kw_only=True)
class NodeView:
    """One node as a policy sees it. Read-only.

    Attributes:
        num_active: requests that occupy it: until prefilled at their prefill node, until finished
            at their decode node.
        queued_tokens: uncached prompt tokens admitted there and not yet prefilled.
        prefill_tokens_per_s: measured prefill rate; None before the first measurement.
        decode_step_s: measured time of one decode step; None before the first.
        is_draining: it still works off its earlier role, and takes nothing new until it is done.
        max_active: requests that it admits at a time; None if it does not say.
    """

    node_id: NodeId
    cluster_id: ClusterId
    kind: ClusterKind
    role: Role
    epoch: int
    num_active: int
    queued_tokens: int
    prefill_tokens_per_s: float | None
    decode_step_s: float | None
    is_draining: bool = False
    max_active: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether it would refuse a request."""
        return self.max_active is not None and self.num_active >= self.max_active

    def takes(self, stage: Role) -> bool:
        """Whether new work of a stage, PREFILL or DECODE, may be sent to it."""
        does = self.role.prefills if stage is Role.PREFILL else self.role.decodes
        return does and not self.is_draining


@attrs.frozen(kw_only=True)
class NodeHit:
    """What a node's cache can serve of a prompt (tokens); see `PrefixMatch`."""

    num_cached_tokens: int = 0
    num_held_tokens: int = 0


@attrs.frozen(kw_only=True)
class Candidate:
    """A node that may take a request, with what its cache is predicted to serve of it."""

    node: NodeView
    hit: NodeHit


@attrs.frozen(kw_only=True)
class ClusterLoad:
    """One cluster as a policy sees it. Draining nodes count in no stage.

    Attributes:
        num_prefill, num_decode: nodes that take new work of that stage; a MIXED node counts in
            both.
        queued_tokens: sum over its nodes.
        num_active: sum over its nodes.
    """

    cluster_id: ClusterId
    kind: ClusterKind
    num_prefill: int
    num_decode: int
    queued_tokens: int
    num_active: int


class ClusterView(Protocol):
    """The load ledger as policies see it: live, versioned, never rebuilt per request.

    The methods with a body are derived from the others, in the plainest way; a ledger of many
    nodes answers them faster.
    """

    @property
    def version(self) -> int:
        """Grows with every change."""
        ...

    def nodes(self) -> Sequence[NodeView]:
        """Nodes that are up. Asking for all of them costs time for each: not per request."""
        ...

    def hit(self, node_id: NodeId, request: RoutedRequest) -> NodeHit:
        """Predicted hit of ``request`` in that node's cache."""
        ...

    def link_bps(self) -> float | None:
        """Measured rate of the link from PRFAAS to PD, bits/s; None before the first sample."""
        ...

    def link_backlog_bytes(self) -> int:
        """Bytes of admitted offloaded requests that have not landed yet."""
        return 0

    def link_loss(self) -> float | None:
        """Share of recent packets that were sent again, 0 to 1; None if nobody measures it."""
        return None

    def clusters(self) -> Sequence[ClusterLoad]:
        """Clusters that have nodes, in the order in which they came."""
        by_cluster: dict[ClusterId, list[NodeView]] = {}
        for node in self.nodes():
            by_cluster.setdefault(node.cluster_id, []).append(node)
        return [
            ClusterLoad(
                cluster_id=cluster_id,
                kind=nodes[0].kind,
                num_prefill=sum(node.takes(Role.PREFILL) for node in nodes),
                num_decode=sum(node.takes(Role.DECODE) for node in nodes),
                queued_tokens=sum(node.queued_tokens for node in nodes),
                num_active=sum(node.num_active for node in nodes),
            )
            for cluster_id, nodes in by_cluster.items()
        ]

    def candidates(
        self, request: RoutedRequest, cluster_id: ClusterId, stage: Role, rng: Random
    ) -> Sequence[Candidate]:
        """Nodes of a cluster worth considering for one stage of a request.

        For every hit that occurs among the nodes that take work of the stage (`NodeView.takes`)
        and are not excluded by the request, at least one node that has this hit and the least load
        of all that have it: `queued_tokens` for PREFILL, `num_active` for DECODE; full nodes come
        after all others. Where several are equal, any of them may be left out, at random by
        ``rng``. In no particular order.
        """
        return [
            Candidate(node=node, hit=self.hit(node.node_id, request))
            for node in self.nodes()
            if node.cluster_id == cluster_id
            and node.takes(stage)
            and node.node_id not in request.excluded
        ]


@attrs.frozen(kw_only=True)
class RoutingDecision:
    """Where a request goes, with everything that is needed to replay the decision.

    Attributes:
        decode_node, prefill_node: chosen nodes (the same one when a MIXED node does both).
        offloaded: the prefill node belongs to a PRFAAS cluster.
        cached_tokens: predicted usable hit at the prefill node.
        uncached_tokens: N - cached_tokens: what that node will have to compute.
        routed_tokens: the uncached length that was compared with t.
        held_tokens: token rows that the decode node already has (they need not travel).
        threshold_tokens: t at that moment.
        predicted_bytes: bytes that will cross to the decode node.
        predicted_ttft_s: None while rates are unmeasured.
        view_version: version of the view that was read.
        prefix_node: a node whose cached prefix goes to the prefill node first; None for none.
        prefix_tokens: length of that prefix; then it is part of `cached_tokens`.
        prefix_bytes: what has to cross for it.
    """

    request_id: RequestId
    decode_node: NodeId
    prefill_node: NodeId
    offloaded: bool
    reason: RouteReason
    cached_tokens: int
    uncached_tokens: int
    routed_tokens: int
    held_tokens: int
    threshold_tokens: int
    predicted_bytes: int
    predicted_ttft_s: float | None
    view_version: int
    prefix_node: NodeId | None = None
    prefix_tokens: int = 0
    prefix_bytes: int = 0


@attrs.frozen(kw_only=True)
class RequestOutcome:
    """What became of a decision; every request reports exactly one, failures included."""

    decision: RoutingDecision
    ok: bool
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_wait_s: float = 0.0
    ttft_s: float = 0.0
    received_bytes: int = 0


class Router(ABC):
    """Chooses nodes for a request. Pure: same arguments and history, same decision."""

    @property
    @abstractmethod
    def threshold_tokens(self) -> int:
        """t: requests with more uncached tokens than this prefill remotely."""

    @abstractmethod
    def route(
        self, request: RoutedRequest, view: ClusterView, now: float, rng: Random
    ) -> RoutingDecision:
        """Decides. The decode node first, then the uncached length, then the prefill node.

        Raises: CapacityError when no node can decode, or none can prefill.
        """

    @abstractmethod
    def observe(self, outcome: RequestOutcome, now: float) -> None:
        """Learns from a finished or failed request."""
