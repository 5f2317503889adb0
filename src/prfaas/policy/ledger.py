"""What policies see of the clusters: nodes, their load, their rates; kept by events, in place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from random import Random

from prfaas.core import BlockHash, ClusterId, GroupId, NodeId, RequestId, Role
from prfaas.errors import LocalProtocolError
from prfaas.policy.flight import Flight
from prfaas.policy.global_index import GlobalPrefixIndex, HitLevel
from prfaas.policy.link import LinkEstimator
from prfaas.policy.node_account import NodeAccount
from prfaas.policy.node_register import NodeRegister
from prfaas.seams import (
    CacheEvent,
    Candidate,
    ClusterLoad,
    ClusterView,
    Delivery,
    NodeDown,
    NodeHit,
    NodeLoad,
    NodeUp,
    NodeView,
    RoutedRequest,
    RoutingDecision,
)
from prfaas.spec import ModelSpec

_KEEP = 0.8
"""Share of the past that each new sample of the link's loss leaves standing."""


class LoadLedger(ClusterView):
    """Live `ClusterView`, changed by events only; ``version`` grows by one with every change.

    A request counts at its decode node from `admit` to `finished`, at its prefill node from `admit`
    to `prefilled`, and on the link from `admit` to `transferred`. Whatever way it ends, `finished`
    (idempotent) takes the rest of it back. A node that goes down takes its requests with it. Events
    of an earlier life of a node, and measurements that measure nothing, change nothing.

    Nothing is summed up or sorted per request: clusters keep their sums and the order of their
    nodes, and the index answers for all nodes at once.

    ``now``, where an event takes it, is the time for the averages of `loads`; without it, or if it
    runs backwards, the event counts as of the latest time that was told.

    Args:
        index: answers `hit`; the ledger adds and drops its nodes.
        link: estimates the rate of the link from PRFAAS to PD.
    """

    def __init__(self, index: GlobalPrefixIndex, link: LinkEstimator) -> None:
        self._index = index
        self._link = link
        self._link_bps: float | None = None
        self._version = 0
        self._link_loss: float | None = None
        self._link_backlog_bytes = 0
        self._nodes = NodeRegister()
        self._epochs: dict[NodeId, int] = {}
        self._flights: dict[RequestId, Flight] = {}
        self._now: float | None = None
        self._asked: tuple[RoutedRequest, int] | None = None
        self._levels: Sequence[HitLevel] = ()

    @classmethod
    def for_spec(cls, spec: ModelSpec) -> LoadLedger:
        """A ledger of nodes that serve this model, with an estimator of default settings."""
        index = GlobalPrefixIndex(spec.groups, granule_tokens=spec.granule_tokens)
        return cls(index, LinkEstimator())

    def __repr__(self) -> str:
        return (
            f"<LoadLedger v{self._version}: {len(self._nodes)} nodes, "
            f"{len(self._flights)} in flight, {self._nodes.queued_tokens} tokens queued, "
            f"link {self._link_bps}>"
        )

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_in_flight(self) -> int:
        """Requests admitted and not finished."""
        return len(self._flights)

    def nodes(self) -> Sequence[NodeView]:
        """Nodes that are up, in the order they came. Costs time for each: not per request."""
        return [node.view() for node in self._nodes]

    def clusters(self) -> Sequence[ClusterLoad]:
        return self._nodes.clusters()

    def candidates(
        self, request: RoutedRequest, cluster_id: ClusterId, stage: Role, rng: Random
    ) -> Sequence[Candidate]:
        """See `ClusterView`: one node for every different hit, drawn among those of least load."""
        levels = self._levels_of(request)
        return self._nodes.candidates(cluster_id, stage, levels, request.excluded, rng)

    def hit(self, node_id: NodeId, request: RoutedRequest) -> NodeHit:
        return self._index.hit(node_id, request.granule_hashes, request.num_tokens)

    def link_bps(self) -> float | None:
        return self._link_bps

    def link_backlog_bytes(self) -> int:
        return self._link_backlog_bytes

    def link_loss(self) -> float | None:
        return self._link_loss

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
        self._nodes.put(NodeAccount(event, self._index.position(event.node_id), self._now))
        self._epochs[event.node_id] = event.epoch
        self._version += 1
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
        self._nodes.drop(node)
        self._version += 1
        return lost

    def role_changed(self, node_id: NodeId, role: Role) -> None:
        """Records that a node now serves in ``role``.

        Raises:
            LocalProtocolError: the node is not up.
        """
        node = self._up(node_id)
        if node.up.role is not role:
            node.serve(role, is_draining=node.is_draining)
            self._touch(node)

    def draining(self, node_id: NodeId, is_draining: bool) -> None:
        """Records that a node takes nothing new for now, or takes work again.

        Raises:
            LocalProtocolError: the node is not up.
        """
        node = self._up(node_id)
        if node.is_draining is not is_draining:
            node.serve(node.up.role, is_draining=is_draining)
            self._touch(node)

    def admit(self, decision: RoutingDecision, now: float | None = None) -> None:
        """Accounts for a request that is sent off as ``decision`` says.

        Raises:
            LocalProtocolError: it is in flight already, or a node of it is not up.
        """
        request_id = decision.request_id
        if request_id in self._flights:
            raise LocalProtocolError(
                f"request {request_id!r} is in flight already; report it finished before it is "
                "admitted again"
            )
        decode, prefill = self._up(decision.decode_node), self._up(decision.prefill_node)
        now = self._tell(now)
        flight = self._flights[request_id] = Flight(decision)
        source = None if decision.prefix_node is None else self._nodes.get(decision.prefix_node)
        if source is not None and source.up.cluster_id == prefill.up.cluster_id:
            flight.land_prefix()  # the fabric of the cluster carries it, not the link
        self._link_backlog_bytes += flight.link_bytes
        decode.active.add(request_id)
        prefill.active.add(request_id)
        prefill.queue(decision.uncached_tokens, now)
        self._nodes.count(prefill)
        if decode is not prefill:
            self._nodes.count(decode)
        self._version += 1

    def prefilled(self, request_id: RequestId, now: float | None = None) -> None:
        """The prompt is computed and the prefill node done with it. Idempotent.

        From here on the request outlives its prefill node; a transfer that does not is reported by
        the transfer itself.
        """
        flight = self._flights.get(request_id)
        if flight is None or flight.is_prefilled:
            return
        now = self._tell(now)
        self._release_prefill(flight)
        self._nodes[flight.decision.decode_node].count_decoding(1, now)
        self._version += 1

    def transferred(self, request_id: RequestId, now: float | None = None) -> None:
        """The cache of an offloaded request has landed. Idempotent."""
        self._tell(now)
        flight = self._flights.get(request_id)
        landed_bytes = flight.land() if flight is not None else 0
        if landed_bytes:
            self._link_backlog_bytes -= landed_bytes
            self._version += 1

    def finished(self, request_id: RequestId, now: float | None = None) -> None:
        """The request ended: success, error, cancel or timeout. Idempotent."""
        flight = self._flights.get(request_id)
        if flight is not None:
            self._tell(now)
            self._release(flight)
            self._version += 1

    def observe_prefill(self, node_id: NodeId, num_tokens: int, seconds: float) -> None:
        """Records that the node computed ``num_tokens`` uncached tokens in ``seconds``."""
        node = self._nodes.get(node_id)
        if node is not None and _measures(num_tokens) and _measures(seconds):
            node.observe_prefill(num_tokens, seconds)
            self._version += 1

    def observe_decode(self, node_id: NodeId, num_steps: int, seconds: float) -> None:
        """Records that the node ran ``num_steps`` decode steps in ``seconds``."""
        node = self._nodes.get(node_id)
        if node is not None and _measures(num_steps) and _measures(seconds):
            node.observe_decode(num_steps, seconds)
            self._version += 1

    def observe_link(self, deliveries: Iterable[Delivery], now: float) -> None:
        """Takes in what crossed the link; call it with nothing too, so that silence is noticed."""
        for delivery in deliveries:
            self._link.observe(delivery)
        rate = self._link.rate_bps(now)
        if rate != self._link_bps:
            self._link_bps = rate
            self._version += 1

    def observe_loss(self, share: float) -> None:
        """Records the share of packets that were lately sent again; smoothed like a rate."""
        if 0 <= share <= 1:
            before = share if self._link_loss is None else self._link_loss
            self._link_loss = _KEEP * before + (1 - _KEEP) * share
            self._version += 1

    def loads(self, now: float) -> tuple[NodeLoad, ...]:
        """What each node did since the last call, and what it has to do now.

        Before a time was told the period has no length: then a node's prefill share is 0, and its
        decode share that of this instant. A node that has, or tells, no slots and decodes all the
        same counts as busy. A node counts as prefilling while it has a prompt to compute.
        """
        told = self._tell(now)
        return tuple(node.take_load(now if told is None else told) for node in self._nodes)

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
        active: dict[NodeId, set[RequestId]] = {node.up.node_id: set() for node in self._nodes}
        queued, decoding = dict.fromkeys(active, 0), dict.fromkeys(active, 0)
        for request_id, flight in self._flights.items():
            decision = flight.decision
            active[decision.decode_node].add(request_id)
            decoding[decision.decode_node] += flight.is_prefilled
            if not flight.is_prefilled:
                active[decision.prefill_node].add(request_id)
                queued[decision.prefill_node] += decision.uncached_tokens
        for node in self._nodes:
            node_id = node.up.node_id
            assert node.active == active[node_id], f"{node_id}: active {node.active}"
            assert node.queued_tokens == queued[node_id], f"{node_id}: {node.queued_tokens} queued"
            assert node.num_decoding == decoding[node_id], f"{node_id}: {node.num_decoding}"
            assert node.position == self._index.position(node_id)
        backlog_bytes = sum(flight.link_bytes for flight in self._flights.values())
        assert self._link_backlog_bytes == backlog_bytes
        self._nodes.check()
        self._index.check()
        self._link.check()

    def _tell(self, now: float | None) -> float | None:
        """Takes in the time; returns the latest that was told."""
        if now is not None:
            if self._now is None:
                for node in self._nodes:
                    node.begin(now)
                self._now = now
            elif now > self._now:
                self._now = now
        return self._now

    def _levels_of(self, request: RoutedRequest) -> Sequence[HitLevel]:
        """Hits of all nodes. A router asks several times per request, so the last are kept."""
        asked, version = self._asked, self._index.version
        if asked is None or asked[0] is not request or asked[1] != version:
            self._levels = self._index.levels(request.granule_hashes, request.num_tokens)
            self._asked = request, version
        return self._levels

    def _touch(self, node: NodeAccount) -> None:
        self._nodes.refresh(node)
        self._version += 1

    def _up(self, node_id: NodeId) -> NodeAccount:
        node = self._nodes.get(node_id)
        if node is None:
            raise LocalProtocolError(
                f"node {node_id!r} is not up ({len(self._nodes)} nodes are); route again"
            )
        return node

    def _release_prefill(self, flight: Flight) -> None:
        decision = flight.decision
        flight.is_prefilled = True
        self._link_backlog_bytes -= flight.land_prefix()
        node = self._nodes[decision.prefill_node]
        node.queue(-decision.uncached_tokens, self._now)
        if decision.prefill_node != decision.decode_node:
            node.active.discard(decision.request_id)
        self._nodes.count(node)

    def _release(self, flight: Flight) -> None:
        decision = flight.decision
        node = self._nodes[decision.decode_node]
        if flight.is_prefilled:
            node.count_decoding(-1, self._now)
        else:
            self._release_prefill(flight)
        self._link_backlog_bytes -= flight.land()
        node.active.discard(decision.request_id)
        self._nodes.count(node)
        del self._flights[decision.request_id]

    def _release_all(self, node: NodeAccount) -> tuple[RequestId, ...]:
        lost = tuple(request_id for request_id in self._flights if request_id in node.active)
        for request_id in lost:
            self._release(self._flights[request_id])
        return lost


def _measures(value: float) -> bool:
    return 0 < value < math.inf
