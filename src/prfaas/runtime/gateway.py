"""The gateway: turns each routing decision into work, and feeds what came of it back.

It decides nothing by itself: the router chooses nodes, the balancer roles, the ledger keeps the counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from random import Random

import attrs

from prfaas.core import (
    ClusterId,
    ClusterKind,
    GroupId,
    NodeId,
    Request,
    Role,
    BlockHash,
)
from prfaas.errors import (
    CapacityError,
    DeadlineExceeded,
    PrfaasError,
    RemoteProtocolError,
    RequestError,
    TransportError,
)
from prfaas.hashing import hash_granules, root_hash
from prfaas.policy import LoadLedger, ThresholdController
from prfaas.runtime.attempt import Attempt, AttemptFailed, Generation, NodeLost, WorkerLink
from prfaas.runtime.messages import (
    AskStatus,
    AskSnapshot,
    CacheChanged,
    CacheSnapshot,
    Finished,
    Prefilled,
    Message,
    NodeInfo,
    Rates,
    Register,
    RoleSet,
    SetRole,
    Status,
    decode,
    encode,
)
from prfaas.seams import (
    CacheEvent,
    Channel,
    Delivery,
    Hello,
    NodeDown,
    NodeUp,
    RoleBalancer,
    RoleChanged,
    RoutedRequest,
    Router,
    RoutingDecision,
    Transport,
)
from prfaas.spec import ModelSpec

OnPhase = Callable[[str, str], Awaitable[None]]
"""Called with a request's id and the phase that it entered."""


@attrs.frozen(kw_only=True)
class GatewayConfig:
    """How the gateway behaves when things go wrong.

    Attributes:
        max_attempts: nodes are tried so often before a request fails.
        retry_s: pause before a new attempt when no node is to blame, e.g. all were full.
        register_s: a worker must introduce itself within this time.
        tick_s: period of link estimate and threshold.
    """

    max_attempts: int = 4
    retry_s: float = 0.05
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
        self._dense = spec.as_full_attention()
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
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._statuses: dict[NodeId, asyncio.Future[Status]] = {}
        self.num_retries = 0
        self.num_late_messages = 0

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
        self._spawn(self._tick())

    async def add_worker(
        self, address: str, *, peer_addresses: Mapping[ClusterId, str] | None = None
    ) -> NodeId:
        """Connects to a worker and takes it into service.

        Args:
            address: where the gateway reaches it.
            peer_addresses: where prefill nodes of each cluster reach it; ``address`` by default.

        Raises:
            ConnectError, PeerMismatch: as the transport does. RemoteProtocolError if it does not
            introduce itself in time.
        """
        channel = await self._transport.connect(address, self._hello)
        try:
            async with asyncio.timeout(self._config.register_s):
                await channel.send(encode(Register()))
                info = decode(await channel.receive())
        except TimeoutError as error:
            channel.abort()
            raise RemoteProtocolError(
                f"{address} did not introduce itself within {self._config.register_s} s"
            ) from error
        if not isinstance(info, NodeInfo):
            channel.abort()
            raise RemoteProtocolError(f"{address} began with {type(info).__name__}, not NodeInfo")
        event = _node_up(info)
        link = WorkerLink(
            node_id=event.node_id,
            cluster_id=event.cluster_id,
            kind=event.kind,
            epoch=event.epoch,
            channel=channel,
            address=address,
            peer_addresses=dict(peer_addresses or {}),
        )
        self._links[link.node_id] = link
        self._ledger.node_up(event, block_size=info.block_size // self._spec.granule_tokens)
        self._balancer.observe(event, self._clock())
        self._spawn(self._read(link))
        await self._apply_plan()
        return link.node_id

    async def generate(self, request: Request, on_phase: OnPhase | None = None) -> Generation:
        """Runs one request to its end, over as many nodes as it takes.

        Raises:
            RequestError: a request of this id is running already.
            DeadlineExceeded: its time ran out; all nodes were told to forget it.
            PrfaasError: the last attempt's failure.
        """
        if request.request_id in self._attempts:
            raise RequestError(f"request {request.request_id!r} is running already; use a new id")
        attempt = Attempt(request, self._spec, self._hello.handoff, on_phase, self._clock)
        self._attempts[request.request_id] = attempt
        try:
            async with asyncio.timeout(request.deadline_s):
                return await self._attempt_until_done(attempt)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"request {request.request_id!r} did not finish within {request.deadline_s} s "
                f"(attempt {attempt.number + 1}, {attempt.phase}); allow more time or add nodes"
            ) from error
        finally:
            await attempt.cancel_everywhere()
            del self._attempts[request.request_id]

    async def statuses(self, timeout_s: float = 5.0) -> tuple[Status, ...]:
        """Asks every worker for its counts; those that do not answer in time are left out."""
        asked = []
        for node_id, link in tuple(self._links.items()):
            self._statuses[node_id] = asyncio.get_running_loop().create_future()
            try:
                await link.channel.send(encode(AskStatus()))
            except TransportError:
                continue
            asked.append(self._statuses[node_id])
        done, _ = await asyncio.wait(asked, timeout=timeout_s) if asked else (set(), None)
        return tuple(sorted((f.result() for f in done), key=lambda status: status.node_id))

    async def aclose(self) -> None:
        """Ends running requests and disconnects from the workers."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            await link.channel.aclose()
        self._links.clear()

    async def _attempt_until_done(self, attempt: Attempt) -> Generation:
        request = attempt.request
        root = root_hash(self._spec.fingerprint(), request.tenant.encode())
        hashes = hash_granules(root, request.tokens, self._spec.granule_tokens)
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
                self._note_failure(attempt, failure)
            finally:
                self._ledger.finished(request.request_id)
                self._router.observe(attempt.outcome(decision, ok=ok), self._clock())
            await attempt.next()

    def _note_failure(self, attempt: Attempt, failure: AttemptFailed) -> None:
        if not failure.retryable or attempt.number + 1 >= self._config.max_attempts:
            raise failure
        self.num_retries += 1
        if failure.at_fault is not None:
            attempt.excluded.add(failure.at_fault)

    async def _route(self, attempt: Attempt, hashes: tuple[BlockHash, ...]) -> RoutingDecision:
        """Waits for a node if there is none: a lost role may be filled by another node soon."""
        if attempt.number:
            await asyncio.sleep(self._config.retry_s)
        while True:
            routed = RoutedRequest(
                request_id=attempt.request.request_id,
                num_tokens=attempt.request.num_tokens,
                granule_hashes=hashes,
                excluded=frozenset(attempt.excluded),
            )
            try:
                return self._router.route(routed, self._ledger, self._clock(), self._rng)
            except CapacityError:
                self._changed.clear()
                if attempt.excluded:
                    # Nodes that failed once may be all that is left.
                    attempt.excluded.clear()
                await self._changed.wait()

    async def _read(self, link: WorkerLink) -> None:
        try:
            while True:
                await self._dispatch(link, decode(await link.channel.receive()))
        except (TransportError, RemoteProtocolError) as error:
            await self._lose(link, error)

    async def _dispatch(self, link: WorkerLink, message: Message) -> None:
        now = self._clock()
        if isinstance(message, CacheChanged):
            for body in message.events:
                event = CacheEvent(
                    sequence=body.sequence,
                    group_id=GroupId(body.group_id),
                    stored=tuple(BlockHash(h) for h in body.stored),
                    removed=tuple(BlockHash(h) for h in body.removed),
                )
                self._ledger.cache_event(link.node_id, link.epoch, event)
            if self._ledger.needs_resync(link.node_id):
                await link.channel.send(encode(AskSnapshot()))
        elif isinstance(message, CacheSnapshot):
            self._ledger.resync(
                link.node_id,
                link.epoch,
                message.sequence,
                {
                    GroupId(group_id): [BlockHash(h) for h in hashes]
                    for group_id, hashes in message.stored.items()
                },
            )
        elif isinstance(message, Rates):
            if link.kind is ClusterKind.PRFAAS:
                self._ledger.observe_link(
                    (
                        Delivery(num_bytes=n, start_s=now - start, end_s=now - end)
                        for n, start, end in message.deliveries
                    ),
                    now,
                )
        elif isinstance(message, RoleSet):
            self._ledger.role_changed(link.node_id, Role(message.role))
            self._balancer.observe(
                RoleChanged(node_id=link.node_id, plan_epoch=message.plan_epoch, ok=True), now
            )
            self._changed.set()
        elif isinstance(message, Status):
            future = self._statuses.pop(link.node_id, None)
            if future is not None and not future.done():
                future.set_result(message)
        else:
            self._deliver(link, message)

    def _deliver(self, link: WorkerLink, message: Message) -> None:
        request_id = getattr(message, "request_id", "")
        attempt = self._attempts.get(request_id)
        if attempt is None or not attempt.expects(link.node_id, message):
            self.num_late_messages += 1
            return
        if isinstance(message, Prefilled):
            self._ledger.prefilled(attempt.request.request_id)
            if message.prefilled_tokens:
                self._ledger.observe_prefill(
                    link.node_id, message.prefilled_tokens, message.prefill_s
                )
        elif isinstance(message, Finished) and message.decode_step_s > 0:
            self._ledger.observe_decode(link.node_id, 1, message.decode_step_s)
        attempt.inbox.put_nowait(message)

    async def _lose(self, link: WorkerLink, error: PrfaasError) -> None:
        link.channel.abort()
        if self._links.get(link.node_id) is link:
            del self._links[link.node_id]
        down = NodeDown(node_id=link.node_id, epoch=link.epoch)
        self._ledger.node_down(down)
        self._balancer.observe(down, self._clock())
        for attempt in self._attempts.values():
            attempt.inbox.put_nowait(NodeLost(link.node_id, str(error)))
        await self._apply_plan()

    async def _apply_plan(self) -> None:
        plan = self._balancer.plan(self._clock())
        if self._controller is not None:
            self._controller.set_band(plan.threshold_band)
        for view in tuple(self._ledger.nodes()):
            wanted = plan.roles.get(view.node_id, view.role)
            link = self._links.get(view.node_id)
            if wanted is not view.role and link is not None:
                try:
                    await link.channel.send(
                        encode(SetRole(role=wanted.value, plan_epoch=plan.epoch))
                    )
                except TransportError:
                    continue  # its reader is about to report the node as lost
        self._changed.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.tick_s)
            now = self._clock()
            self._ledger.observe_link((), now)
            if self._controller is not None:
                self._controller.update(self._ledger, now)

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.ensure_future(run())
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a gateway task failed", "exception": task.exception(), "task": task}
            )


def _node_up(info: NodeInfo) -> NodeUp:
    try:
        return NodeUp(
            node_id=NodeId(info.node_id),
            cluster_id=ClusterId(info.cluster_id),
            kind=ClusterKind(info.kind),
            role=Role(info.role),
            epoch=info.epoch,
        )
    except ValueError as error:
        raise RemoteProtocolError(f"a worker introduced itself wrongly: {error}") from error

