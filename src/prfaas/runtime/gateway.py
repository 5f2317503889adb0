"""The gateway: turns each routing decision into work, and feeds what came of it back.

It decides nothing by itself: the router chooses nodes, the balancer roles, the ledger keeps the
counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random

import attrs

from prfaas.core import BlockHash, ClusterId, ClusterKind, GroupId, NodeId, Request, Role
from prfaas.errors import (
    CapacityError,
    ChannelClosed,
    ConfigError,
    DeadlineExceeded,
    PrfaasError,
    RemoteProtocolError,
    RequestError,
    TransportError,
)
from prfaas.hashing import hash_granules, root_hash
from prfaas.policy import LoadLedger, ThresholdController
from prfaas.runtime.attempt import Attempt, AttemptFailed, Generation, OnPhase, Said
from prfaas.runtime.links import WorkerLink, register
from prfaas.runtime.messages import (
    AskSnapshot,
    AskStatus,
    CacheChanged,
    CacheSnapshot,
    Finished,
    Message,
    Prefilled,
    Rates,
    RoleSet,
    SetRole,
    Status,
    decode,
)
from prfaas.runtime.tasks import Tasks, report
from prfaas.seams import (
    CacheEvent,
    Delivery,
    Hello,
    NodeDown,
    RoleBalancer,
    RoleChanged,
    RoutedRequest,
    Router,
    RoutingDecision,
    Transport,
)
from prfaas.spec import ModelSpec


@attrs.frozen(kw_only=True)
class GatewayConfig:
    """How the gateway behaves when things go wrong.

    Attributes:
        max_attempts: a request fails with its so many-th failed attempt. A refusal by a busy node
            does not count: such a request waits its turn until its deadline.
        retry_s, max_retry_s: pause before a new attempt; it doubles with every busy refusal.
        register_s: a worker must introduce itself within this time.
        tick_s: period of link estimate and threshold.
    """

    max_attempts: int = 4
    retry_s: float = 0.05
    max_retry_s: float = 1.0
    register_s: float = 10.0
    tick_s: float = 0.1


class Gateway:
    """Front of the clusters, in one asyncio loop.

    Args:
        spec: the model; workers of another one are refused in the handshake.
        router, ledger, balancer: the policy; the ledger is the view that the router reads.
        transport: dials workers.
        hello: what the gateway declares to workers.
        controller: the router's threshold controller, if it has one, moved on every tick.
        config: what happens when things go wrong.
        rng: breaks ties between equal nodes.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        router: Router,
        ledger: LoadLedger,
        balancer: RoleBalancer,
        transport: Transport,
        hello: Hello,
        controller: ThresholdController | None = None,
        config: GatewayConfig | None = None,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._router = router
        self._ledger = ledger
        self._balancer = balancer
        self._transport = transport
        self._hello = hello
        self._controller = controller
        self._config = config or GatewayConfig()
        self._rng = rng or Random(0)
        self._clock = clock
        self._links: dict[NodeId, WorkerLink] = {}
        self._attempts: dict[str, Attempt] = {}
        self._tasks = Tasks()
        self._changed = asyncio.Event()
        self._statuses: dict[NodeId, asyncio.Future[Status]] = {}
        self._resyncing: set[NodeId] = set()
        self._is_closed = False
        self.num_retries = 0
        self.num_late_messages = 0

    def __repr__(self) -> str:
        return (
            f"<Gateway {len(self._links)} workers, {self.num_active} requests, "
            f"{self.num_retries} retries>"
        )

    @property
    def threshold_tokens(self) -> int:
        return self._router.threshold_tokens

    @property
    def link_bps(self) -> float | None:
        return self._ledger.link_bps()

    @property
    def num_active(self) -> int:
        return len(self._attempts)

    def start(self) -> None:
        """Starts the tick. Call it inside the loop."""
        self._tasks.spawn(self._tick())

    async def add_worker(
        self, address: str, *, peer_addresses: Mapping[ClusterId, str] | None = None
    ) -> NodeId:
        """Connects to a worker and takes it into service; also one that was restarted.

        Args:
            address: where the gateway reaches it.
            peer_addresses: where prefill nodes of each cluster reach it; ``address`` by default.

        Raises:
            AddressError, ConnectError, PeerMismatch, ChannelBroken: as the transport does.
            RemoteProtocolError: it does not introduce itself in time.
            ConfigError: its name is in use by another node or by a later life of this one, or the
                policy cannot take it.
        """
        link = await register(
            self._transport,
            self._hello,
            address,
            peer_addresses=peer_addresses or {},
            timeout_s=self._config.register_s,
        )
        try:
            self._enlist(link)
        except PrfaasError:
            link.line.abort()
            raise
        return link.node_id

    async def generate(self, request: Request, on_phase: OnPhase | None = None) -> Generation:
        """Runs one request to its end, over as many nodes as it takes.

        Raises:
            RequestError: a request of this id is running already, or it cannot be sent.
            DeadlineExceeded: its time ran out; all nodes were told to forget it.
            ChannelClosed: the gateway was closed.
            PrfaasError: the last attempt's failure.
        """
        if request.request_id in self._attempts:
            raise RequestError(f"request {request.request_id!r} is running already; use a new id")
        attempt = Attempt(request, self._spec, self._hello.handoff, on_phase, self._clock)
        self._attempts[request.request_id] = attempt
        failures: list[str] = []
        try:
            async with asyncio.timeout(request.deadline_s):
                return await self._attempt_until_done(attempt, failures)
        except TimeoutError as error:
            last = f"; last failure: {failures[-1]}" if failures else ""
            raise DeadlineExceeded(
                f"request {request.request_id!r} did not finish within {request.deadline_s} s "
                f"(attempt {attempt.number + 1}, {attempt.phase}{last}); allow more time or add "
                "nodes"
            ) from error
        finally:
            attempt.give_up()
            del self._attempts[request.request_id]

    async def statuses(self, timeout_s: float = 5.0) -> tuple[Status, ...]:
        """Asks every worker for its counts; those that do not answer in time are left out."""
        asked = []
        for node_id, link in self._links.items():
            with suppress(TransportError):
                link.line.post(AskStatus())
                answer = asyncio.get_running_loop().create_future()
                asked.append(self._statuses.setdefault(node_id, answer))
        if asked:
            await asyncio.wait(asked, timeout=timeout_s)
        answers = [f.result() for f in asked if f.done() and not f.cancelled()]
        return tuple(sorted(answers, key=lambda status: status.node_id))

    async def aclose(self) -> None:
        """Ends running requests and disconnects from the workers. Idempotent."""
        self._is_closed = True
        links = tuple(self._links.values())
        for link in links:
            self._forget(link, "the gateway closes")
        self._changed.set()
        await asyncio.gather(*(link.line.aclose() for link in links))
        await self._tasks.aclose()

    async def _attempt_until_done(self, attempt: Attempt, failures: list[str]) -> Generation:
        request, config = attempt.request, self._config
        root = root_hash(self._spec.fingerprint(), request.tenant.encode())
        hashes = hash_granules(root, request.tokens, self._spec.granule_tokens)
        num_failed, pause_s = 0, config.retry_s
        while True:
            decision = await self._route(attempt, hashes)
            self._ledger.admit(decision)
            ok = False
            try:
                prefill = self._links[decision.prefill_node]
                decode_link = self._links[decision.decode_node]
                generation = await attempt.run(decision, prefill, decode_link)
                ok = True
                return generation
            except AttemptFailed as failure:
                num_failed += not failure.busy
                if not failure.retryable or num_failed >= config.max_attempts:
                    raise
                failures.append(str(failure))
                if failure.at_fault is not None:
                    attempt.excluded.add(failure.at_fault)
                pause_s = min(2 * pause_s, config.max_retry_s) if failure.busy else config.retry_s
            finally:
                self._ledger.finished(request.request_id)
                self._router.observe(attempt.outcome(decision, ok=ok), self._clock())
            self.num_retries += 1
            attempt.next()
            await asyncio.sleep(pause_s)

    async def _route(self, attempt: Attempt, hashes: tuple[BlockHash, ...]) -> RoutingDecision:
        """Waits for a node if there is none: a lost role may be filled by another node soon."""
        while True:
            if self._is_closed:
                raise ChannelClosed(
                    f"the gateway was closed before request {attempt.request.request_id!r} ended"
                )
            routed = RoutedRequest(
                request_id=attempt.request.request_id,
                num_tokens=attempt.request.num_tokens,
                granule_hashes=hashes,
                excluded=frozenset(attempt.excluded),
            )
            try:
                return self._router.route(routed, self._ledger, self._clock(), self._rng)
            except CapacityError:
                if attempt.excluded:
                    # Nodes that failed once may be all that is left.
                    attempt.excluded.clear()
                else:
                    self._changed.clear()
                    await self._changed.wait()

    def _enlist(self, link: WorkerLink) -> None:
        node = link.node
        if self._is_closed:
            raise ChannelClosed(f"the gateway was closed before {node.node_id!r} was added")
        old = self._links.get(node.node_id)
        if old is not None:
            if node.epoch <= old.node.epoch:
                raise ConfigError(
                    f"node {node.node_id!r} is connected already, at {old.address} with epoch "
                    f"{old.node.epoch} (this one: {link.address}, {node.epoch}); give each worker "
                    "a name of its own and a higher epoch with every start"
                )
            self._lose(old, f"{node.node_id} was started again")
        self._ledger.node_up(node, block_size=link.block_size // self._spec.granule_tokens)
        if all(view.node_id != node.node_id for view in self._ledger.nodes()):
            raise ConfigError(
                f"node {node.node_id!r} came with epoch {node.epoch}, a later one was seen; start "
                "it with a higher epoch"
            )
        try:
            self._balancer.observe(node, self._clock())
        except PrfaasError:
            self._ledger.node_down(NodeDown(node_id=node.node_id, epoch=node.epoch))
            raise
        self._links[node.node_id] = link
        self._tasks.spawn(self._read(link))
        self._apply_plan()

    async def _read(self, link: WorkerLink) -> None:
        try:
            while True:
                self._dispatch(link, decode(await link.line.channel.receive()))
        except (TransportError, RemoteProtocolError) as error:
            self._lose(link, str(error))
        except Exception as error:
            # Whatever it was: a worker that nobody listens to must not look alive.
            report(f"a message of {link.node_id} could not be taken in", error)
            self._lose(link, str(error))

    def _dispatch(self, link: WorkerLink, message: Message) -> None:
        match message:
            case CacheChanged():
                self._take_events(link, message)
            case CacheSnapshot():
                self._resyncing.discard(link.node_id)
                stored = {
                    GroupId(group_id): [BlockHash(h) for h in hashes]
                    for group_id, hashes in message.stored.items()
                }
                self._ledger.resync(link.node_id, link.node.epoch, message.sequence, stored)
            case Rates():
                if link.node.kind is ClusterKind.PRFAAS:
                    now = self._clock()
                    deliveries = (
                        Delivery(num_bytes=n, start_s=now - start, end_s=now - end)
                        for n, start, end in message.deliveries
                    )
                    self._ledger.observe_link(deliveries, now)
            case RoleSet():
                self._take_role(link, message)
            case Status():
                future = self._statuses.pop(link.node_id, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case _ if isinstance(message, Said):
                self._deliver(link, message)
            case _:
                raise RemoteProtocolError(
                    f"a gateway takes no {type(message).__name__} from a worker"
                )

    def _take_events(self, link: WorkerLink, message: CacheChanged) -> None:
        for body in message.events:
            event = CacheEvent(
                sequence=body.sequence,
                group_id=GroupId(body.group_id),
                stored=tuple(BlockHash(h) for h in body.stored),
                removed=tuple(BlockHash(h) for h in body.removed),
            )
            self._ledger.cache_event(link.node_id, link.node.epoch, event)
        if self._ledger.needs_resync(link.node_id) and link.node_id not in self._resyncing:
            self._resyncing.add(link.node_id)
            with suppress(TransportError):  # then its reader is about to lose it
                link.line.post(AskSnapshot())

    def _take_role(self, link: WorkerLink, message: RoleSet) -> None:
        try:
            role = Role(message.role)
        except ValueError as error:
            raise RemoteProtocolError(f"unknown role {message.role!r}") from error
        self._ledger.role_changed(link.node_id, role)
        now = self._clock()
        ok = self._balancer.plan(now).roles.get(link.node_id, role) is role
        self._balancer.observe(
            RoleChanged(node_id=link.node_id, plan_epoch=message.plan_epoch, ok=ok), now
        )
        self._changed.set()

    def _deliver(self, link: WorkerLink, message: Said) -> None:
        attempt = self._attempts.get(message.request_id)
        if attempt is None or not attempt.hear(link, message):
            self.num_late_messages += 1
        elif isinstance(message, Prefilled):
            self._ledger.prefilled(attempt.request.request_id)
            self._ledger.observe_prefill(link.node_id, message.prefilled_tokens, message.prefill_s)
        elif isinstance(message, Finished):
            self._ledger.observe_decode(link.node_id, 1, message.decode_step_s)

    def _lose(self, link: WorkerLink, reason: str) -> None:
        link.line.abort()
        self._forget(link, reason)

    def _forget(self, link: WorkerLink, reason: str) -> None:
        """Takes a worker out of service, once. Requests on it are tried elsewhere."""
        if self._links.get(link.node_id) is not link:
            return
        del self._links[link.node_id]
        self._resyncing.discard(link.node_id)
        status = self._statuses.pop(link.node_id, None)
        if status is not None:
            status.cancel()
        down = NodeDown(node_id=link.node_id, epoch=link.node.epoch)
        self._ledger.node_down(down)
        self._balancer.observe(down, self._clock())
        for attempt in self._attempts.values():
            attempt.lose(link, reason)
        self._apply_plan()

    def _apply_plan(self) -> None:
        plan = self._balancer.plan(self._clock())
        if self._controller is not None:
            self._controller.set_band(plan.threshold_band)
        for view in tuple(self._ledger.nodes()):
            wanted = plan.roles.get(view.node_id, view.role)
            link = self._links.get(view.node_id)
            if wanted is not view.role and link is not None:
                with suppress(TransportError):  # then its reader is about to lose it
                    link.line.post(SetRole(role=wanted.value, plan_epoch=plan.epoch))
                # Work that is sent after this finds the new role in force.
                self._ledger.role_changed(view.node_id, wanted)
        self._changed.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.tick_s)
            now = self._clock()
            self._ledger.observe_link((), now)
            if self._controller is not None:
                self._controller.update(self._ledger, now)
