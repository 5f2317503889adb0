"""One request at the gateway: its attempts, what each node said, and the record of it all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import attrs

from prfaas.core import ClusterId, ClusterKind, Handoff, NodeId, Request
from prfaas.errors import PrfaasError, TransportError
from prfaas.runtime.messages import (
    Cancel,
    Expect,
    Expecting,
    Failed,
    Finished,
    Prefilled,
    Generate,
    Message,
    Prefill,
    Sent,
    Token,
    encode,
    pack_tokens,
)
from prfaas.seams import Channel, RequestOutcome, RoutingDecision
from prfaas.spec import ModelSpec

SENT_GRACE_S = 0.5
"""How long a finished request waits for the prefill node's own measurements."""


class AttemptFailed(PrfaasError):
    """One attempt ended without an answer.

    Attributes:
        retryable: another attempt may succeed.
        at_fault: a node to avoid next time, None if no node is to blame.
    """

    def __init__(self, reason: str, *, retryable: bool, at_fault: NodeId | None) -> None:
        super().__init__(reason)
        self.retryable = retryable
        self.at_fault = at_fault


@attrs.frozen
class NodeLost:
    """Local event: the channel to a worker ended."""

    node_id: NodeId
    reason: str


@attrs.frozen(kw_only=True)
class WorkerLink:
    """The gateway's side of one worker."""

    node_id: NodeId
    cluster_id: ClusterId
    kind: ClusterKind
    epoch: int
    channel: Channel
    address: str
    peer_addresses: dict[ClusterId, str]

    def address_for(self, peer: WorkerLink) -> str:
        """Where ``peer`` dials this worker."""
        return self.peer_addresses.get(peer.cluster_id, self.address)


@attrs.frozen(kw_only=True)
class Generation:
    """What a request produced.

    Attributes:
        tokens: generated token ids.
        logits: fp32 logits of every step, if asked for.
        record: one flat row of measurements, in the words of the report.
    """

    tokens: tuple[int, ...]
    logits: tuple[bytes, ...] = attrs.field(repr=False)
    record: dict[str, str | int | float | bool | None]


@attrs.define
class _Run:
    """What the nodes said about the current attempt."""

    first: Prefilled | None = None
    first_s: float | None = None
    sent: Sent | None = None
    finished: Finished | None = None
    tokens: dict[int, tuple[int, bytes]] = attrs.field(factory=dict)


class Attempt:
    """Runs the attempts of one request, one after the other."""

    def __init__(
        self,
        request: Request,
        spec: ModelSpec,
        handoff: Handoff,
        on_phase: Callable[[str, str], Awaitable[None]] | None,
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self.number = 0
        self.phase = "queued"
        self.excluded: set[NodeId] = set()
        self.inbox: asyncio.Queue[Message | NodeLost] = asyncio.Queue()
        self._spec = spec
        self._handoff = handoff
        self._on_phase = on_phase
        self._clock = clock
        self._arrived_s = clock()
        self._run = _Run()
        self._links: list[WorkerLink] = []

    def expects(self, node_id: NodeId, message: Message) -> bool:
        """Whether a message belongs to the attempt that runs now and to a node of it."""
        return getattr(message, "attempt", None) == self.number and any(
            link.node_id == node_id for link in self._links
        )

    async def run(
        self, decision: RoutingDecision, prefill: WorkerLink, decode: WorkerLink
    ) -> Generation:
        """One attempt. Raises AttemptFailed."""
        self._run = _Run()
        ships = prefill is not decode and self._num_shipped > 0
        self._links = [decode, prefill] if ships else [decode]
        if not ships:
            await self._say(decode, Generate(**self._work()))
            await self._enter("prefill")
        else:
            await self._say(decode, Expect(**self._work(), prefill_node=prefill.node_id))
            await self._next_of(Expecting)
            await self._say(
                prefill,
                Prefill(
                    **self._work(),
                    decode_node=decode.node_id,
                    decode_address=decode.address_for(prefill),
                ),
            )
            await self._enter("prefill")
        await self._until_finished()
        self._links = []
        return self._generation(decision)

    async def next(self) -> None:
        """Tells the nodes of this attempt to forget it, and counts on."""
        await self.cancel_everywhere()
        self.number += 1
        self.inbox = asyncio.Queue()
        await self._enter("queued")

    async def cancel_everywhere(self) -> None:
        """Idempotent; nodes that are done or gone do not mind."""
        links, self._links = self._links, []
        for link in links:
            cancel = Cancel(
                request_id=self.request.request_id,
                attempt=self.number,
                reason="the gateway gave this attempt up",
            )
            try:
                await link.channel.send(encode(cancel))
            except TransportError:
                continue  # a lost worker has forgotten everything already

    def outcome(self, decision: RoutingDecision, *, ok: bool) -> RequestOutcome:
        """What the router learns of this attempt."""
        first, sent, finished = self._run.first, self._run.sent, self._run.finished
        return RequestOutcome(
            decision=decision,
            ok=ok,
            cached_tokens=first.cached_tokens if first else 0,
            queue_s=first.queue_s if first else 0.0,
            prefill_s=first.prefill_s if first else 0.0,
            transfer_s=sent.transfer_s if sent else 0.0,
            decode_wait_s=finished.decode_wait_s if finished else 0.0,
            ttft_s=self._ttft_s or 0.0,
            received_bytes=finished.received_bytes if finished else 0,
        )

    @property
    def _ttft_s(self) -> float | None:
        first_s = self._run.first_s
        return None if first_s is None else first_s - self._arrived_s

    def _work(self) -> dict[str, object]:
        request = self.request
        return {
            "request_id": request.request_id,
            "attempt": self.number,
            "tokens": pack_tokens(request.tokens),
            "max_new_tokens": request.max_new_tokens,
            "tenant": request.tenant,
            "return_logits": request.return_logits,
            "deadline_s": max(0.001, request.deadline_s - (self._clock() - self._arrived_s)),
        }

    @property
    def _num_shipped(self) -> int:
        """Tokens that the shipped cache covers."""
        return self._handoff.num_tokens(self.request.num_tokens)

    async def _until_finished(self) -> None:
        run = self._run
        while run.finished is None:
            await self._take(await self.inbox.get())
        is_local = len(self._links) == 1
        try:
            async with asyncio.timeout(SENT_GRACE_S):
                while run.sent is None and not is_local:
                    await self._take(await self.inbox.get())
        except (TimeoutError, AttemptFailed):
            run.sent = None  # the answer is complete; only the prefill node's timing is missing
        missing = set(range(self.request.max_new_tokens)) - set(run.tokens)
        if missing:
            raise AttemptFailed(
                f"request {self.request.request_id!r} finished without tokens {sorted(missing)}",
                retryable=True,
                at_fault=self._links[0].node_id,
            )

    async def _next_of(self, kind: type) -> None:
        while not isinstance(message := await self.inbox.get(), kind):
            await self._take(message)

    async def _take(self, message: Message | NodeLost) -> None:
        run = self._run
        if isinstance(message, NodeLost):
            prefill_is_done = run.sent is not None and message.node_id != self._links[0].node_id
            if any(link.node_id == message.node_id for link in self._links) and not prefill_is_done:
                raise AttemptFailed(message.reason, retryable=True, at_fault=message.node_id)
        elif isinstance(message, Failed):
            at_fault = NodeId(message.at_fault) if message.at_fault else None
            raise AttemptFailed(
                f"{message.stage} of request {message.request_id!r} failed: {message.reason}",
                retryable=message.retryable,
                at_fault=at_fault,
            )
        elif isinstance(message, Prefilled):
            run.first = message
            if message.token is not None:
                await self._take_token(0, message.token, message.logits)
        elif isinstance(message, Sent):
            run.sent = message
        elif isinstance(message, Token):
            await self._take_token(message.index, message.token, message.logits)
        elif isinstance(message, Finished):
            run.finished = message
            await self._enter("done")

    async def _take_token(self, index: int, token: int, logits: bytes) -> None:
        self._run.tokens[index] = (token, logits)
        if index == 0:
            self._run.first_s = self._clock()
            await self._enter("decode" if len(self._links) == 1 else "transfer")
        elif index == 1:
            await self._enter("decode")

    async def _say(self, link: WorkerLink, message: Message) -> None:
        try:
            await link.channel.send(encode(message))
        except TransportError as error:
            raise AttemptFailed(str(error), retryable=True, at_fault=link.node_id) from error

    async def _enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            if self._on_phase is not None:
                await self._on_phase(self.request.request_id, phase)

    def _generation(self, decision: RoutingDecision) -> Generation:
        tokens = [self._run.tokens[i] for i in range(self.request.max_new_tokens)]
        return Generation(
            tokens=tuple(token for token, _ in tokens),
            logits=tuple(logits for _, logits in tokens if self.request.return_logits),
            record=self._record(decision),
        )

    def _record(self, decision: RoutingDecision) -> dict[str, str | int | float | bool | None]:
        first, sent, finished = self._run.first, self._run.sent, self._run.finished
        assert finished is not None
        assert first is not None
        # A prompt that the decode node had to compute itself was not offloaded, whatever was decided.
        shipped = decision.prefill_node != decision.decode_node and self._num_shipped > 0
        offloaded = decision.offloaded and shipped and finished.decode_prefilled_tokens <= 1
        return {
            "request_id": self.request.request_id,
            "num_tokens": self.request.num_tokens,
            "new_tokens": self.request.max_new_tokens,
            "reason": decision.reason.value,
            "offloaded": offloaded,
            "prefill_node": decision.prefill_node,
            "decode_node": decision.decode_node,
            "attempts": self.number + 1,
            "cached_tokens": first.cached_tokens,
            "prefilled_tokens": first.prefilled_tokens,
            "held_tokens": finished.held_tokens,
            "received_bytes": finished.received_bytes,
            "expected_bytes": finished.expected_bytes,
            "kv_bytes": self._spec.kv_bytes(self._num_shipped),
            "decode_prefilled_tokens": finished.decode_prefilled_tokens,
            "routed_tokens": decision.routed_tokens,
            "threshold_tokens": decision.threshold_tokens,
            "predicted_ttft_s": decision.predicted_ttft_s,
            "queue_s": max(0.0, (self._ttft_s or 0.0) - first.prefill_s),
            "prefill_s": first.prefill_s,
            "transfer_s": sent.transfer_s if sent else None,
            "decode_wait_s": finished.decode_wait_s,
            "ttft_s": self._ttft_s,
            "total_s": self._clock() - self._arrived_s,
            "arrived_s": self._arrived_s,
        }
