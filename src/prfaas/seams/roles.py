"""The RoleBalancer seam: events of the clusters in, one published plan out. Pure."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeAlias

import attrs

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError


@attrs.frozen(kw_only=True)
class Plan:
    """The one published plan. The short-term controller moves t only inside its band.

    Attributes:
        epoch: grows with every plan.
        roles: role of every node; never without a prefilling and a decoding node in a PD cluster
            that still has nodes.
        threshold_band: least and greatest t, tokens.
        prefill_budgets: for MIXED nodes, prompt tokens computed per decode step while requests
            decode; a node that is not named shares its time as its engine does by itself.
    """

    epoch: int
    roles: Mapping[NodeId, Role]
    threshold_band: tuple[int, int] = attrs.field()
    prefill_budgets: Mapping[NodeId, int] = attrs.field(factory=dict)

    @threshold_band.validator
    def _check_band(self, _: object, band: tuple[int, int]) -> None:
        if not 0 <= band[0] <= band[1]:
            raise ConfigError(f"threshold_band is {band}; it needs 0 <= low <= high")

    @prefill_budgets.validator
    def _check_budgets(self, _: object, budgets: Mapping[NodeId, int]) -> None:
        for node_id, tokens in budgets.items():
            if self.roles.get(node_id) is not Role.MIXED or type(tokens) is not int or tokens < 1:
                raise ConfigError(
                    f"prefill_budgets gives node {node_id!r} {tokens!r} tokens per step; a budget "
                    "is a whole number of at least 1, for a node whose planned role is MIXED"
                )


@attrs.frozen(kw_only=True)
class NodeUp:
    """A node serves in ``role``; ``epoch`` grows with every start of it.

    ``max_active`` is the number of requests that it admits at a time, ``num_slots`` that of those
    that it decodes together; None if it does not say.
    """

    node_id: NodeId
    cluster_id: ClusterId
    kind: ClusterKind
    role: Role
    epoch: int
    max_active: int | None = None
    num_slots: int | None = None


@attrs.frozen(kw_only=True)
class NodeDown:
    """The node's life of that epoch, and all earlier ones, are over."""

    node_id: NodeId
    epoch: int


class ChangePhase(enum.Enum):
    """How far a change of role is.

    STARTED: the node takes no new work of its old role. DONE: it has none left, and serves in the
    new one. FAILED: it could not, and serves in its old role.
    """

    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


@attrs.frozen(kw_only=True)
class RoleChanged:
    """A change of role that a plan asked for has come to ``phase``.

    ``plan_epoch`` names the change: it is the epoch of the plan that asked for it first.
    """

    node_id: NodeId
    plan_epoch: int
    role: Role
    phase: ChangePhase


@attrs.frozen(kw_only=True)
class NodeLoad:
    """What one node did in the last control period.

    Attributes:
        prefill_busy: share of the period in which it computed prompts.
        decode_busy: mean share of its decode slots that were taken.
        queued_tokens: uncached prompt tokens that wait there or are being computed, now.
        num_waiting: requests that are ready to decode there and have no slot, now.
    """

    node_id: NodeId
    epoch: int
    prefill_busy: float
    decode_busy: float
    queued_tokens: int
    num_waiting: int


@attrs.frozen(kw_only=True)
class Arrived:
    """A request arrived; its uncached length was compared with t."""

    routed_tokens: int


@attrs.frozen(kw_only=True)
class Served:
    """A request ended after ``output_tokens`` decode steps of ``step_s`` on average."""

    output_tokens: int
    step_s: float


@attrs.frozen(kw_only=True)
class LinkRate:
    """The measured rate of the link changed."""

    link_bps: float | None


BalancerEvent: TypeAlias = NodeUp | NodeDown | RoleChanged | NodeLoad | Arrived | Served | LinkRate


class RoleBalancer(ABC):
    """Keeps the split of prefill and decode nodes. Events in, one plan out. Pure."""

    @abstractmethod
    def observe(self, event: BalancerEvent, now: float) -> None:
        """Takes in one event. A kind that this balancer has no use for changes nothing."""

    @abstractmethod
    def plan(self, now: float) -> Plan:
        """The plan that should hold now. The same plan (same epoch) until something changes."""
