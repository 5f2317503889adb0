"""The workers of a gateway: taking them into service, hearing them, and letting them go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from prfaas.core import BlockHash, ClusterId, ClusterKind, GroupId, NodeId, Role
from prfaas.errors import (
    ChannelClosed,
    ConfigError,
    PrfaasError,
    RemoteProtocolError,
    TransportError,
)
from prfaas.policy import LoadLedger, ThresholdController
from prfaas.runtime.links import WorkerLink, register
from prfaas.runtime.messages import (
    AskSnapshot,
    AskStatus,
    CacheChanged,
    CacheSnapshot,
    Message,
    Rates,
    RoleSet,
    Said,
    SetRole,
    Status,
    decode,
)
from prfaas.runtime.tasks import Tasks, report
from prfaas.seams import (
    BalancerEvent,
    CacheEvent,
    ChangePhase,
    Delivery,
    Hello,
    NodeDown,
    NodeView,
    Plan,
    RoleBalancer,
    RoleChanged,
    Transport,
)
from prfaas.spec import ModelSpec

OnSaid = Callable[[WorkerLink, Said], None]
OnLost = Callable[[WorkerLink, str], None]


class Fleet:
    """Keeps ledger, balancer and roles in step with the workers that are connected.

    Args:
        spec: the model.
        ledger: told of every change.
        balancer: says which role each worker should have.
        controller: gets the band of the balancer's plan, if there is one.
        transport, hello: to dial with.
        register_s: a worker must introduce itself within this time.
        max_silent_ticks: a worker that says nothing for so many, although asked, is given up.
        clock: monotonic seconds.
        on_said: called with what a worker says about a request.
        on_lost: called when a worker is taken out of service, and why.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        ledger: LoadLedger,
        balancer: RoleBalancer,
        controller: ThresholdController | None,
        transport: Transport,
        hello: Hello,
        register_s: float,
        max_silent_ticks: int,
        clock: Callable[[], float],
        on_said: OnSaid,
        on_lost: OnLost,
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._balancer = balancer
        self._controller = controller
        self._transport = transport
        self._hello = hello
        self._register_s = register_s
        self._max_silent_ticks = max_silent_ticks
        self._clock = clock
        self._on_said = on_said
        self._on_lost = on_lost
        self._links: dict[NodeId, WorkerLink] = {}
        self._num_silent_ticks: dict[NodeId, int] = {}
        self._tasks = Tasks()
        self._statuses: dict[NodeId, asyncio.Future[Status]] = {}
        self._resyncing: set[NodeId] = set()
        self._orders: dict[WorkerLink, SetRole] = {}
        self._num_link_changes = 0
        self._applied = (-1, -1)
        self._is_closed = False
        self.changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Fleet {', '.join(sorted(self._links))}>"

    @property
    def links(self) -> Mapping[NodeId, WorkerLink]:
        """Workers in service."""
        return self._links

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def add(self, address: str, peer_addresses: Mapping[ClusterId, str]) -> NodeId:
        """See `Gateway.add_worker`."""
        link = await register(
            self._transport,
            self._hello,
            address,
            peer_addresses=peer_addresses,
            timeout_s=self._register_s,
        )
        try:
            self._enlist(link)
        except PrfaasError:
            link.line.abort()
            raise
        return link.node_id

    async def statuses(self, timeout_s: float) -> tuple[Status, ...]:
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

    def observe(self, *events: BalancerEvent) -> None:
        """Tells the balancer of load."""
        now = self._clock()
        # A change of role is known by the epoch of the plan that asked for it first, so no plan
        # may be missed: the first event brings what time made due, the others may ask for more.
        for batch in (events[:1], events[1:]):
            for event in batch:
                self._balancer.observe(event, now)
            if batch:
                self._apply_plan(now)

    def tick(self) -> None:
        """Puts a new plan into force, and gives up workers whose process stands still, which no
        connection shows.

        Counts calls and not seconds: if it is the gateway that stood still, their answers wait.
        """
        self._apply_plan(self._clock())
        for link in tuple(self._links.values()):
            num_ticks = self._num_silent_ticks[link.node_id] = (
                self._num_silent_ticks[link.node_id] + 1
            )
            if num_ticks > self._max_silent_ticks:
                self._lose(link, f"{link.node_id} said nothing for {num_ticks - 1} ticks")
            elif num_ticks > self._max_silent_ticks // 2:
                with suppress(TransportError):  # then its reader is about to lose it
                    link.line.post(AskStatus())

    async def aclose(self) -> None:
        """Lets all workers go. Idempotent."""
        self._is_closed = True
        links = tuple(self._links.values())
        for link in links:
            self._forget(link, "the gateway closes")
        self.changed.set()
        await asyncio.gather(*(link.line.aclose() for link in links))
        await self._tasks.aclose()

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
        now = self._clock()
        try:
            self._balancer.observe(node, now)
        except PrfaasError:
            self._ledger.node_down(NodeDown(node_id=node.node_id, epoch=node.epoch))
            raise
        self._links[node.node_id] = link
        self._num_link_changes += 1
        self._num_silent_ticks[node.node_id] = 0
        self._tasks.spawn(self._read(link))
        self._apply_plan(now)

    async def _read(self, link: WorkerLink) -> None:
        try:
            while True:
                message = decode(await link.line.receive())
                if self._links.get(link.node_id) is not link:
                    return  # it was let go meanwhile, and may be back in another life
                self._num_silent_ticks[link.node_id] = 0
                self._dispatch(link, message)
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
                    if message.num_packets > 0:
                        self._ledger.observe_loss(message.num_resent / message.num_packets)
            case RoleSet():
                self._take_role(link, message)
            case Status():
                future = self._statuses.pop(link.node_id, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case _ if isinstance(message, Said):
                self._on_said(link, message)
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
            role, phase = Role(message.role), ChangePhase(message.phase)
        except ValueError as error:
            raise RemoteProtocolError(
                f"unknown role {message.role!r} or phase {message.phase!r}"
            ) from error
        self._ledger.role_changed(link.node_id, role)
        self._ledger.draining(link.node_id, phase is ChangePhase.STARTED)
        now = self._clock()
        self._balancer.observe(
            RoleChanged(
                node_id=link.node_id,
                plan_epoch=message.plan_epoch,
                role=role,
                phase=phase,
            ),
            now,
        )
        self._apply_plan(now)
        self.changed.set()

    def _lose(self, link: WorkerLink, reason: str) -> None:
        link.line.abort()
        self._forget(link, reason)

    def _forget(self, link: WorkerLink, reason: str) -> None:
        """Takes a worker out of service, once. Requests on it are tried elsewhere."""
        if self._links.get(link.node_id) is not link:
            return
        del self._links[link.node_id]
        self._orders.pop(link, None)
        self._num_link_changes += 1
        self._resyncing.discard(link.node_id)
        status = self._statuses.pop(link.node_id, None)
        if status is not None:
            status.cancel()
        down = NodeDown(node_id=link.node_id, epoch=link.node.epoch)
        now = self._clock()
        self._ledger.node_down(down)
        self._balancer.observe(down, now)
        self._on_lost(link, reason)
        if not self._is_closed:  # else the others are not short of this one
            self._apply_plan(now)

    def _apply_plan(self, now: float) -> None:
        plan = self._balancer.plan(now)
        if self._applied == (plan.epoch, self._num_link_changes):
            return
        self._applied = (plan.epoch, self._num_link_changes)
        if self._controller is not None:
            self._controller.set_band(plan.threshold_band)
        for view in tuple(self._ledger.nodes()):
            link = self._links.get(view.node_id)
            if link is None:
                continue
            last = self._orders.get(link)
            order = _order(plan, view, last)
            # What was ordered counts, not only what is seen: an answer may be older than that.
            if order == last and order.role == view.role.value:
                continue
            self._orders[link] = order
            with suppress(TransportError):  # then its reader is about to lose it
                link.line.post(order)
            wanted = Role(order.role)
            # Work that is sent after this finds the new role in force. A node that gives up what
            # it did before takes none until it says that it is done with that.
            self._ledger.role_changed(view.node_id, wanted)
            if not _contains(wanted, view.role):
                self._ledger.draining(view.node_id, True)
        self.changed.set()


def _order(plan: Plan, view: NodeView, last: SetRole | None) -> SetRole:
    """What a plan wants of a node, under the epoch of the first plan that wanted this role."""
    role = plan.roles.get(view.node_id, view.role).value
    return SetRole(
        role=role,
        plan_epoch=plan.epoch if last is None or last.role != role else last.plan_epoch,
        prefill_budget=plan.prefill_budgets.get(view.node_id, 0),
    )


def _contains(role: Role, other: Role) -> bool:
    return role is Role.MIXED or role is other
