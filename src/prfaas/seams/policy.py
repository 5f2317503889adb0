"""The Router and RoleBalancer seams, and the values they exchange. Pure and synchronous."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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


@attrs.frozen(kw_only=True)
class NodeView:
    """One node as a policy sees it. Read-only.

    Attributes:
        num_active: requests that occupy it: until prefilled at their prefill node, until finished
            at their decode node.
        queued_tokens: uncached prompt tokens admitted there and not yet prefilled.
        prefill_tokens_per_s: measured prefill rate; None before the first measurement.
        decode_step_s: measured time of one decode step; None before the first.
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


@attrs.frozen(kw_only=True)
class NodeHit:
    """What a node's cache can serve of a prompt (tokens); see `PrefixMatch`."""

    num_cached_tokens: int = 0
    num_held_tokens: int = 0


class ClusterView(Protocol):
    """The load ledger as policies see it: live, versioned, never rebuilt per request."""

    @property
    def version(self) -> int:
        """Grows with every change."""
        ...

    def nodes(self) -> Sequence[NodeView]:
        """Nodes that are up."""
        ...

    def hit(self, node_id: NodeId, request: RoutedRequest) -> NodeHit:
        """Predicted hit of ``request`` in that node's cache."""
        ...

    def link_bps(self) -> float | None:
        """Measured rate of the link from PRFAAS to PD, bits/s; None before the first sample."""
        ...


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


@attrs.frozen(kw_only=True)
class Plan:
    """The one published plan. The short-term controller moves t only inside its band.

    Attributes:
        epoch: grows with every plan.
        roles: role of every node; never without a prefilling and a decoding node in a PD cluster
            that still has nodes.
        threshold_band: least and greatest t, tokens.
    """

    epoch: int
    roles: Mapping[NodeId, Role]
    threshold_band: tuple[int, int] = attrs.field()

    @threshold_band.validator
    def _check_band(self, _: object, band: tuple[int, int]) -> None:
        if not 0 <= band[0] <= band[1]:
            raise ConfigError(f"threshold_band is {band}; it needs 0 <= low <= high")


@attrs.frozen(kw_only=True)
class NodeUp:
    """A node serves in ``role``; ``epoch`` grows with every start of it."""

    node_id: NodeId
    cluster_id: ClusterId
    kind: ClusterKind
    role: Role
    epoch: int


@attrs.frozen(kw_only=True)
class NodeDown:
    """The node's life of that epoch, and all earlier ones, are over."""

    node_id: NodeId
    epoch: int


@attrs.frozen(kw_only=True)
class RoleChanged:
    """A change that a plan asked for has ended, one way or the other."""

    node_id: NodeId
    plan_epoch: int
    ok: bool


BalancerEvent = NodeUp | NodeDown | RoleChanged


class RoleBalancer(ABC):
    """Keeps the split of prefill and decode nodes. Events in, one plan out. Pure."""

    @abstractmethod
    def observe(self, event: BalancerEvent, now: float) -> None:
        """Takes in one event. A kind that this balancer has no use for changes nothing."""

    @abstractmethod
    def plan(self, now: float) -> Plan:
        """The plan that should hold now. The same plan (same epoch) until something changes."""
