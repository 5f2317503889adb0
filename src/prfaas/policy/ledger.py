"""What policies see of the clusters: nodes, their load, their rates; kept by events, in place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

from prfaas.core import BlockHash, GroupId, NodeId, RequestId, Role
from prfaas.errors import LocalProtocolError
from prfaas.policy.global_index import GlobalPrefixIndex
from prfaas.policy.link import LinkEstimator
from prfaas.seams import (
    CacheEvent,
    ClusterView,
    Delivery,
    NodeDown,
    NodeHit,
    NodeUp,
    NodeView,
    RoutedRequest,
    RoutingDecision,
)
from prfaas.spec import ModelSpec

_KEEP = 0.8
"""Share of the past that each new rate sample leaves standing (EWMA with weight 0.2)."""


class _Rate:
    """Work over time, both decaying alike: long samples weigh more than short ones."""

    __slots__ = ("_seconds", "_work")

    def __init__(self) -> None:
        self._work = 0.0
        self._seconds = 0.0

    def observe(self, work: float, seconds: float) -> None:
        self._work = _KEEP * self._work + work
        self._seconds = _KEEP * self._seconds + seconds

    @property
    def work_per_s(self) -> float | None:
        return self._work / self._seconds if self._seconds > 0 else None

    @property
    def s_per_work(self) -> float | None:
        return self._seconds / self._work if self._work > 0 else None


class _Node:
    """The live account of one node."""

    __slots__ = ("active", "decode", "prefill", "queued_tokens", "up")

    def __init__(self, up: NodeUp) -> None:
        self.up = up
        self.active: set[RequestId] = set()
        self.queued_tokens = 0
        self.prefill = _Rate()
        self.decode = _Rate()

    def view(self) -> NodeView:
        return NodeView(
            node_id=self.up.node_id,
            cluster_id=self.up.cluster_id,
            kind=self.up.kind,
            role=self.up.role,
            epoch=self.up.epoch,
            num_active=len(self.active),
            queued_tokens=self.queued_tokens,
            prefill_tokens_per_s=self.prefill.work_per_s,
            decode_step_s=self.decode.s_per_work,
        )


class _InFlight:
    """One admitted request: what it still weighs, and where."""

    __slots__ = ("decision", "is_prefilled")

    def __init__(self, decision: RoutingDecision) -> None:
        self.decision = decision
        self.is_prefilled = False


class LoadLedger(ClusterView):
    """Live `ClusterView`, changed by events only; ``version`` grows by one with every change.

    A request counts at its decode node from `admit` to `finished`, and at its prefill node from
    `admit` to `prefilled`. Whatever way it ends, `finished` (idempotent) takes the rest of it back.
    A node that goes down takes its requests with it. Events of an earlier life of a node, and
    measurements that measure nothing, change nothing.

    Args:
        index: answers `hit`; the ledger adds and drops its nodes.
        link: estimates the rate of the link from PRFAAS to PD.
    """

    def __init__(self, index: GlobalPrefixIndex, link: LinkEstimator) -> None:
        self._index = index
        self._link = link
        self._link_bps: float | None = None
        self._version = 0
        self._nodes: dict[NodeId, _Node] = {}
        self._epochs: dict[NodeId, int] = {}
        self._in_flight: dict[RequestId, _InFlight] = {}
        self._views: list[NodeView] = []
        self._positions: dict[NodeId, int] = {}
        self._changed: set[NodeId] = set()

    @classmethod
    def for_spec(cls, spec: ModelSpec) -> LoadLedger:
        """A ledger of nodes that serve this model, with an estimator of default settings."""
        index = GlobalPrefixIndex(spec.groups, granule_tokens=spec.granule_tokens)
        return cls(index, LinkEstimator())

    def __repr__(self) -> str:
        queued = sum(node.queued_tokens for node in self._nodes.values())
        return (
            f"<LoadLedger v{self._version}: {len(self._nodes)} nodes, "
            f"{len(self._in_flight)} in flight, {queued} tokens queued, link {self._link_bps}>"
        )

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_in_flight(self) -> int:
        """Requests admitted and not finished."""
        return len(self._in_flight)

    def nodes(self) -> Sequence[NodeView]:
        """Nodes that are up, in the order they came. The list is live: read it, do not keep it."""
        for node_id in self._changed:
            self._views[self._positions[node_id]] = self._nodes[node_id].view()
        self._changed.clear()
        return self._views

    def hit(self, node_id: NodeId, request: RoutedRequest) -> NodeHit:
        return self._index.hit(node_id, request.granule_hashes, request.num_tokens)

    def link_bps(self) -> float | None:
        return self._link_bps

    def node_up(self, event: NodeUp, *, block_size: int = 1) -> tuple[RequestId, ...]:
        """Takes in a node that came up, or came back as a new epoch.

        Repeating the epoch that is up changes nothing, so a node may announce itself again.

        Args:
            event: the node.
            block_size: granules per block of its pool.

        Returns:
            Requests that were in flight at its earlier life; they are no longer accounted for.
        """
        if event.epoch < self._epochs.get(event.node_id, event.epoch):
            return ()
        known = self._nodes.get(event.node_id)
        if known is not None and known.up.epoch == event.epoch:
            return ()
        self._index.add(event.node_id, event.epoch, block_size=block_size)
        lost = () if known is None else self._release_all(known)
        node = _Node(event)
        self._nodes[event.node_id] = node
        self._epochs[event.node_id] = event.epoch
        if known is None:
            self._positions[event.node_id] = len(self._views)
            self._views.append(node.view())
        self._touch(event.node_id)
        return lost

    def node_down(self, event: NodeDown) -> tuple[RequestId, ...]:
        """Removes a node with its cache, load and rates.

        Returns:
            Requests that were in flight there; they are no longer accounted for anywhere.
        """
        node = self._nodes.get(event.node_id)
        if node is None or event.epoch < node.up.epoch:
            return ()
        lost = self._release_all(node)
        self._index.drop(event.node_id)
        del self._nodes[event.node_id]
        self._changed.discard(event.node_id)
        del self._views[self._positions.pop(event.node_id)]
        self._positions = {view.node_id: i for i, view in enumerate(self._views)}
        self._version += 1
        return lost

    def role_changed(self, node_id: NodeId, role: Role) -> None:
        """Records that a node now serves in ``role``.

        Raises:
            LocalProtocolError: the node is not up.
        """
        node = self._up(node_id)
        if node.up.role is not role:
            node.up = attrs.evolve(node.up, role=role)
            self._touch(node_id)

    def admit(self, decision: RoutingDecision) -> None:
        """Accounts for a request that is sent off as ``decision`` says.

        Raises:
            LocalProtocolError: it is in flight already, or a node of it is not up.
        """
        request_id = decision.request_id
        if request_id in self._in_flight:
            raise LocalProtocolError(
                f"request {request_id!r} is in flight already; report it finished before it is "
                "admitted again"
            )
        decode, prefill = self._up(decision.decode_node), self._up(decision.prefill_node)
        self._in_flight[request_id] = _InFlight(decision)
        decode.active.add(request_id)
        prefill.active.add(request_id)
        prefill.queued_tokens += decision.uncached_tokens
        self._touch(decision.decode_node, decision.prefill_node)

    def prefilled(self, request_id: RequestId) -> None:
        """The prompt is computed and the prefill node done with it. Idempotent.

        From here on the request outlives its prefill node; a transfer that does not is reported by
        the transfer itself.
        """
        flight = self._in_flight.get(request_id)
        if flight is None or flight.is_prefilled:
            return
        self._release_prefill(flight)
        self._touch(flight.decision.prefill_node)

    def finished(self, request_id: RequestId) -> None:
        """The request ended: success, error, cancel or timeout. Idempotent."""
        flight = self._in_flight.get(request_id)
        if flight is not None:
            self._release(flight)
            self._version += 1

    def observe_prefill(self, node_id: NodeId, num_tokens: int, seconds: float) -> None:
        """Records that the node computed ``num_tokens`` uncached tokens in ``seconds``."""
        node = self._nodes.get(node_id)
        if node is not None and _measures(num_tokens) and _measures(seconds):
            node.prefill.observe(num_tokens, seconds)
            self._touch(node_id)

    def observe_decode(self, node_id: NodeId, num_steps: int, seconds: float) -> None:
        """Records that the node ran ``num_steps`` decode steps in ``seconds``."""
        node = self._nodes.get(node_id)
        if node is not None and _measures(num_steps) and _measures(seconds):
            node.decode.observe(num_steps, seconds)
            self._touch(node_id)

    def observe_link(self, deliveries: Iterable[Delivery], now: float) -> None:
        """Takes in what crossed the link; call it with nothing too, so that silence is noticed."""
        for delivery in deliveries:
            self._link.observe(delivery)
        rate = self._link.rate_bps(now)
        if rate != self._link_bps:
            self._link_bps = rate
            self._version += 1

    def cache_event(self, node_id: NodeId, epoch: int, event: CacheEvent) -> None:
        """Forwards a cache event to the index. Raises as `GlobalPrefixIndex.apply` does."""
        if self._index.apply(node_id, epoch, event):
            self._version += 1

    def needs_resync(self, node_id: NodeId) -> bool:
        """Whether cache events of the node were lost, so that it must send a snapshot."""
        return self._index.needs_resync(node_id)

    def resync(
        self,
        node_id: NodeId,
        epoch: int,
        sequence: int,
        snapshot: Mapping[GroupId, Sequence[BlockHash]],
    ) -> bool:
        """Forwards a snapshot to the index. Returns and raises as `GlobalPrefixIndex.resync`."""
        is_taken = self._index.resync(node_id, epoch, sequence, snapshot)
        self._version += is_taken
        return is_taken

    def check(self) -> None:
        """Asserts that every count is the sum of what is in flight."""
        active: dict[NodeId, set[RequestId]] = {node_id: set() for node_id in self._nodes}
        queued = dict.fromkeys(self._nodes, 0)
        for request_id, flight in self._in_flight.items():
            active[flight.decision.decode_node].add(request_id)
            if not flight.is_prefilled:
                active[flight.decision.prefill_node].add(request_id)
                queued[flight.decision.prefill_node] += flight.decision.uncached_tokens
        for node_id, node in self._nodes.items():
            assert node.active == active[node_id], f"{node_id}: active {node.active}"
            assert node.queued_tokens == queued[node_id], f"{node_id}: {node.queued_tokens} queued"
        views = [node.view() for node in self._nodes.values()]
        assert sorted(views, key=lambda v: v.node_id) == sorted(
            self.nodes(), key=lambda v: v.node_id
        ), "a cached view is old"
        self._index.check()
        self._link.check()

    def _touch(self, *node_ids: NodeId) -> None:
        self._changed.update(node_ids)
        self._version += 1

    def _up(self, node_id: NodeId) -> _Node:
        node = self._nodes.get(node_id)
        if node is None:
            raise LocalProtocolError(
                f"node {node_id!r} is not up ({len(self._nodes)} nodes are); route again"
            )
        return node

    def _release_prefill(self, flight: _InFlight) -> None:
        decision = flight.decision
        flight.is_prefilled = True
        node = self._nodes[decision.prefill_node]
        node.queued_tokens -= decision.uncached_tokens
        if decision.prefill_node != decision.decode_node:
            node.active.discard(decision.request_id)
        self._changed.add(decision.prefill_node)

    def _release(self, flight: _InFlight) -> None:
        decision = flight.decision
        if not flight.is_prefilled:
            self._release_prefill(flight)
        self._nodes[decision.decode_node].active.discard(decision.request_id)
        self._changed.add(decision.decode_node)
        del self._in_flight[decision.request_id]

    def _release_all(self, node: _Node) -> tuple[RequestId, ...]:
        lost = tuple(request_id for request_id in self._in_flight if request_id in node.active)
        for request_id in lost:
            self._release(self._in_flight[request_id])
        return lost


def _measures(value: float) -> bool:
    return 0 < value < math.inf
