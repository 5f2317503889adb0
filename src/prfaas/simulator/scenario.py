"""What is simulated: nodes, the link, and what goes wrong when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TypeAlias

import attrs

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError
from prfaas.spec import ModelSpec

PrefillCost: TypeAlias = Callable[[int, int], float]
"""(new tokens, cached tokens) -> seconds; `prfaas.capacity.PrefillTime.prefill_s` is one."""


@attrs.frozen(kw_only=True)
class SimulatedNode:
    """One node and how fast it is.

    Attributes:
        node_id, cluster_id, kind, role: who it is.
        prefill: (new tokens, cached tokens) -> seconds of the whole prompt, alone on the node.
        decode_step_s: seconds of one step of a batch: a constant, or a function of its size.
        num_slots: requests that it decodes together; None for no limit.
        max_active: requests that it admits at a time; None for no limit.
        pool_bytes: size of its cache; None for none: then nothing is hashed and nothing hits.
        block_size: tokens per block of that cache; None for one granule.
        segment_tokens: prompt tokens between two decode rounds while it does both.
    """

    node_id: NodeId
    cluster_id: ClusterId
    kind: ClusterKind
    role: Role
    prefill: PrefillCost
    decode_step_s: float | Callable[[int], float] = 0.025
    num_slots: int | None = 20
    max_active: int | None = None
    pool_bytes: int | None = None
    block_size: int | None = None
    segment_tokens: int = 2048

    def __attrs_post_init__(self) -> None:
        if self.kind is ClusterKind.PRFAAS and self.role is not Role.PREFILL:
            raise ConfigError(
                f"PRFAAS node {self.node_id!r} has role {self.role.value}; such nodes only prefill"
            )
        for name in ("num_slots", "max_active", "pool_bytes", "block_size", "segment_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of node {self.node_id!r} is {value}; it is at least 1")
        if not 0 < self.step_s(1) < math.inf:
            raise ConfigError(
                f"decode_step_s of node {self.node_id!r} gives {self.step_s(1)} s for one request; "
                "a step takes some time"
            )

    def step_s(self, batch: int) -> float:
        """Seconds of one decode step of so many requests."""
        step_s = self.decode_step_s
        return step_s(batch) if callable(step_s) else step_s


@attrs.frozen(kw_only=True)
class SimulatedLink:
    """The link between PRFAAS and PD clusters; both directions have the same bandwidth.

    Attributes:
        schedule: (from second, bits/s), ascending from second 0; 0 bits/s is an outage.
        rtt_s: added once to each transfer.
        setup_s: handshake of a transfer, added once.
        pipelined: rows leave while the prompt is computed, and only the state and the last layer's
            rows after it; else the whole entry leaves after it, as in the paper's TTFT, T + S/B.
    """

    schedule: tuple[tuple[float, float], ...] = attrs.field()
    rtt_s: float = 0.0
    setup_s: float = 0.0
    pipelined: bool = False

    @schedule.validator
    def _check_schedule(self, _: object, schedule: tuple[tuple[float, float], ...]) -> None:
        times = [from_s for from_s, _ in schedule]
        if not schedule or times[0] != 0 or any(a >= b for a, b in pairwise(times)):
            raise ConfigError(f"schedule starts at {times}; it needs ascending seconds from 0")
        if any(not 0 <= bps < math.inf for _, bps in schedule):
            raise ConfigError(f"schedule is {schedule}; bandwidths are finite and at least 0")

    def __attrs_post_init__(self) -> None:
        if not (0 <= self.rtt_s < math.inf and 0 <= self.setup_s < math.inf):
            raise ConfigError(
                f"rtt_s is {self.rtt_s} and setup_s {self.setup_s}; both are finite and at least 0"
            )

    @property
    def latency_s(self) -> float:
        """What each transfer takes besides its bytes."""
        return self.rtt_s + self.setup_s


@attrs.frozen(kw_only=True)
class Failure:
    """A node that crashes.

    Attributes:
        at_s: when.
        node_id: which.
        for_s: seconds until it is up again, with an empty cache; None for never.
    """

    at_s: float
    node_id: NodeId
    for_s: float | None = None


def _nodes(values: Iterable[SimulatedNode]) -> tuple[SimulatedNode, ...]:
    return tuple(values)


def _failures(values: Iterable[Failure]) -> tuple[Failure, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True)
class Scenario:
    """Clusters, and how the gateway in front of them behaves.

    Attributes:
        spec: the model.
        nodes: at least one.
        link: between PRFAAS and PD clusters; needed if there are both kinds.
        fabric_setup_s: fixed time of a prefix that goes from node to node inside a cluster.
        failures: crashes.
        timeout_s: a client gives up so long after its arrival; None for never.
        max_waiting: requests that wait at the gateway for a node; more are rejected; None: no
            limit.
        max_attempts: a request fails with its so many-th failed attempt; busy refusals do not
            count.
        retry_s, max_retry_s: pause before a new attempt; it doubles with every busy refusal.
        control_period_s: period of link estimate, threshold, node loads and plan.
        event_delay_s: how long a change of a cache takes to reach the gateway.
        keep_decisions: the result has every routing decision.
    """

    spec: ModelSpec
    nodes: tuple[SimulatedNode, ...] = attrs.field(converter=_nodes)
    link: SimulatedLink | None = None
    fabric_setup_s: float = 0.05
    failures: tuple[Failure, ...] = attrs.field(default=(), converter=_failures)
    timeout_s: float | None = None
    max_waiting: int | None = None
    max_attempts: int = 4
    retry_s: float = 0.05
    max_retry_s: float = 1.0
    control_period_s: float = 1.0
    event_delay_s: float = 0.0
    keep_decisions: bool = False

    def __attrs_post_init__(self) -> None:
        node_ids = {node.node_id for node in self.nodes}
        if not node_ids or len(node_ids) != len(self.nodes):
            raise ConfigError(f"{len(self.nodes)} nodes have {len(node_ids)} names; one each")
        if self.link is None and len({node.kind for node in self.nodes}) > 1:
            raise ConfigError("there are PRFAAS and PD clusters and no link; add a SimulatedLink")
        for failure in self.failures:
            lasts = failure.for_s is None or failure.for_s > 0
            if failure.node_id not in node_ids or failure.at_s < 0 or not lasts:
                raise ConfigError(f"{failure} names no node, or no time; there are {node_ids}")
        if self.max_attempts < 1 or not 0 < self.retry_s <= self.max_retry_s < math.inf:
            raise ConfigError(
                f"max_attempts is {self.max_attempts}, retry_s {self.retry_s}, max_retry_s "
                f"{self.max_retry_s}; they need max_attempts >= 1, 0 < retry_s <= max_retry_s"
            )
        if not 0 < self.control_period_s < math.inf or not 0 <= self.event_delay_s < math.inf:
            raise ConfigError(
                f"control_period_s is {self.control_period_s} and event_delay_s "
                f"{self.event_delay_s}; the first is above 0, the second at least 0, both finite"
            )
        if not 0 <= self.fabric_setup_s < math.inf:
            raise ConfigError(
                f"fabric_setup_s is {self.fabric_setup_s}; it is finite and at least 0"
            )
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it is finite and above 0, or None")
