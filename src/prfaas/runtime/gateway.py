"""The gateway: turns each routing decision into work, and feeds what came of it back.

It decides nothing by itself: the router chooses nodes, the balancer roles, the ledger keeps the
counts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random

import attrs

from prfaas.core import BlockHash, ClusterId, NodeId, Request
from prfaas.errors import CapacityError, ChannelClosed, ConfigError, DeadlineExceeded, RequestError
from prfaas.hashing import hash_granules, root_hash
from prfaas.policy import LoadLedger, ThresholdController
from prfaas.runtime.attempt import Attempt, AttemptFailed, Generation, OnPhase
from prfaas.runtime.fleet import Fleet
from prfaas.runtime.links import WorkerLink
from prfaas.runtime.messages import Finished, Prefilled, Said, Sent, Status
from prfaas.runtime.tasks import Tasks
from prfaas.seams import (
    Arrived,
    Hello,
    LinkRate,
    RoleBalancer,
    RoutedRequest,
    Router,
    RoutingDecision,
    Served,
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
        silence_s: a worker that says nothing for so long, although it is asked, is given up.
        tick_s: period of link estimate and threshold.
        control_s: period of the loads that the balancer is told.
    """

    max_attempts: int = 4
    retry_s: float = 0.05
    max_retry_s: float = 1.0
    register_s: float = 10.0
    silence_s: float = 30.0
    tick_s: float = 0.1
    control_s: float = 1.0

    def __attrs_post_init__(self) -> None:
        if self.max_attempts < 1 or not 0 <= self.retry_s <= self.max_retry_s:
            raise ConfigError(
                f"max_attempts is {self.max_attempts}, retry_s {self.retry_s}, max_retry_s "
                f"{self.max_retry_s}; they need max_attempts >= 1 and 0 <= retry_s <= max_retry_s"
            )
        for name in ("register_s", "silence_s", "tick_s", "control_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a number above 0")


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
        self._hello = hello
        self._controller = controller
        self._config = config or GatewayConfig()
        self._rng = rng or Random(0)
        self._clock = clock
        self._attempts: dict[str, Attempt] = {}
        self._tasks = Tasks()
        self._fleet = Fleet(
            spec=spec,
            ledger=ledger,
            balancer=balancer,
            controller=controller,
            transport=transport,
            hello=hello,
            register_s=self._config.register_s,
            max_silent_ticks=math.ceil(self._config.silence_s / self._config.tick_s),
            clock=clock,
            on_said=self._hear,
            on_lost=self._lose,
        )
        self.num_retries = 0
        self.num_late_messages = 0

    def __repr__(self) -> str:
        return f"<Gateway {self._fleet!r}, {self.num_active} requests, {self.num_retries} retries>"

    @property
    def workers(self) -> frozenset[NodeId]:
        """Workers in service."""
        return frozenset(self._fleet.links)

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
        return await self._fleet.add(address, peer_addresses or {})

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
        return await self._fleet.statuses(timeout_s)

    async def aclose(self) -> None:
        """Ends running requests and disconnects from the workers. Idempotent."""
        await self._fleet.aclose()
        await self._tasks.aclose()

    async def _attempt_until_done(self, attempt: Attempt, failures: list[str]) -> Generation:
        request, config = attempt.request, self._config
        root = root_hash(self._spec.fingerprint(), request.tenant.encode())
        hashes = hash_granules(root, request.tokens, self._spec.granule_tokens)
        num_failed, pause_s = 0, config.retry_s
        while True:
            decision = await self._route(attempt, hashes)
            if attempt.number == 0:
                self._fleet.observe(Arrived(routed_tokens=decision.routed_tokens))
            self._ledger.admit(decision, self._clock())
            ok = False
            try:
                prefill = self._fleet.links[decision.prefill_node]
                decode_link = self._fleet.links[decision.decode_node]
                generation = await attempt.run(decision, prefill, decode_link)
                ok = True
                return generation
            except AttemptFailed as failure:
                num_failed += not failure.busy
                if not failure.retryable or num_failed >= config.max_attempts:
                    raise AttemptFailed(
                        f"request {request.request_id!r} is given up, failures: {num_failed}, the "
                        f"last one: {failure}"
                    ) from failure
                failures.append(str(failure))
                if failure.at_fault is not None:
                    attempt.excluded.add(failure.at_fault)
                pause_s = min(2 * pause_s, config.max_retry_s) if failure.busy else config.retry_s
            finally:
                self._ledger.finished(request.request_id, self._clock())
                self._router.observe(attempt.outcome(decision, ok=ok), self._clock())
            self.num_retries += 1
            attempt.next()
            await asyncio.sleep(pause_s)

    async def _route(self, attempt: Attempt, hashes: tuple[BlockHash, ...]) -> RoutingDecision:
        """Waits for a node if there is none: a lost role may be filled by another node soon."""
        while True:
            if self._fleet.is_closed:
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
                    # Not every end of a shortage is told: a node may have room again, or the
                    # link may be back.
                    self._fleet.changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._config.max_retry_s):
                            await self._fleet.changed.wait()

    def _hear(self, link: WorkerLink, message: Said) -> None:
        attempt = self._attempts.get(message.request_id)
        if attempt is None or not attempt.hear(link, message):
            self.num_late_messages += 1
            return
        request, now = attempt.request, self._clock()
        match message:
            case Prefilled():
                self._ledger.prefilled(request.request_id, now)
                self._ledger.observe_prefill(
                    link.node_id, message.prefilled_tokens, message.prefill_s
                )
            case Sent():
                self._ledger.transferred(request.request_id, now)
            case Finished():
                step_s = message.decode_step_s
                self._ledger.observe_decode(link.node_id, 1, step_s)
                self._fleet.observe(Served(output_tokens=request.max_new_tokens, step_s=step_s))

    def _lose(self, link: WorkerLink, reason: str) -> None:
        for attempt in self._attempts.values():
            attempt.lose(link, reason)

    async def _tick(self) -> None:
        control_s = self._clock() + self._config.control_s
        while True:
            await asyncio.sleep(self._config.tick_s)
            now = self._clock()
            self._ledger.observe_link((), now)
            if now >= control_s:
                control_s = now + self._config.control_s
                rate = LinkRate(link_bps=self._ledger.link_bps())
                self._fleet.observe(rate, *self._ledger.loads(now))
            self._fleet.tick()
            if self._controller is not None:
                self._controller.update(self._ledger, now)
