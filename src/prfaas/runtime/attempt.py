"""One request at the gateway: its attempts, what each node said, and the record of it all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import attrs

from prfaas.core import Handoff, NodeId, Request
from prfaas.errors import PrfaasError, TransportError
from prfaas.runtime.links import WorkerLink
from prfaas.runtime.messages import (
    Cancel,
    Expect,
    Expecting,
    Failed,
    Finished,
    Generate,
    Message,
    Prefill,
    Prefilled,
    Said,
    Sent,
    Token,
    prompt_fields,
)
from prfaas.seams import RequestOutcome, RoutingDecision
from prfaas.spec import ModelSpec

OnPhase = Callable[[str, str], None]
"""Called with a request's id and the phase that it entered; must not block."""
Record: TypeAlias = dict[str, str | int | float | bool | None]
SENT_GRACE_S = 0.5
"""How long a finished request waits for the prefill node's own measurements."""
MIN_DEADLINE_S = 0.001


class AttemptFailed(PrfaasError):
    """One attempt ended without an answer.

    Attributes:
        retryable: another attempt may succeed.
        at_fault: a node to avoid next time, None if no node is to blame.
        busy: nothing was begun; it does not count as a failure.
    """

    def __init__(
        self,
        reason: str,
        *,
        retryable: bool = True,
        at_fault: NodeId | None = None,
        busy: bool = False,
    ) -> None:
        super().__init__(reason)
        self.retryable = retryable
        self.at_fault = at_fault
        self.busy = busy


@attrs.frozen(eq=False)
class NodeLost:
    """Local event: the connection to a worker ended."""

    link: WorkerLink
    reason: str


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
    record: Record


@attrs.define
class _Run:
    """What the nodes said about the current attempt."""

    first: Prefilled | None = None
    first_s: float | None = None
    sent: Sent | None = None
    finished: Finished | None = None
    tokens: dict[int, tuple[int, bytes]] = attrs.field(factory=dict)


class Attempt:
    """Runs the attempts of one request, one after the other.

    Raises:
        RequestError: no message can carry the request.
    """

    def __init__(
        self,
        request: Request,
        spec: ModelSpec,
        handoff: Handoff,
        on_phase: OnPhase | None,
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self.number = 0
        self.phase = "queued"
        self.excluded: set[NodeId] = set()
        self._spec = spec
        self._handoff = handoff
        self._on_phase = on_phase
        self._clock = clock
        self._arrived_s = clock()
        self._fields = prompt_fields(request)
        self._inbox: asyncio.Queue[Said | NodeLost] = asyncio.Queue()
        self._run = _Run()
        self._links: tuple[WorkerLink, ...] = ()

    def hear(self, link: WorkerLink, message: Said) -> bool:
        """Takes what a worker says; False if it is not part of the attempt that runs now."""
        if message.attempt != self.number or all(other is not link for other in self._links):
            return False
        self._inbox.put_nowait(message)
        return True

    def lose(self, link: WorkerLink, reason: str) -> None:
        """The connection to a worker ended."""
        self._inbox.put_nowait(NodeLost(link, reason))

    async def run(
        self, decision: RoutingDecision, prefill: WorkerLink, decode: WorkerLink
    ) -> Generation:
        """One attempt. Raises AttemptFailed."""
        self._run = _Run()
        self._inbox = asyncio.Queue()
        ships = prefill is not decode and self._num_shipped > 0
        self._links = (decode, prefill) if ships else (decode,)
        work = {**self._fields, "attempt": self.number}
        if ships:
            self._say(
                decode,
                Expect(**work, deadline_s=self._left_s, prefill_node=prefill.node_id),
            )
            while not isinstance(message := await self._inbox.get(), Expecting):
                self._take(message)
            self._say(
                prefill,
                Prefill(
                    **work,
                    deadline_s=self._left_s,
                    decode_node=decode.node_id,
                    decode_address=decode.address_for(prefill),
                ),
            )
        else:
            self._say(decode, Generate(**work, deadline_s=self._left_s))
        self._enter("prefill")
        await self._until_finished()
        self._links = ()
        return self._generation(decision)

    def next(self) -> None:
        """Tells the nodes of this attempt to forget it, and counts on."""
        self.give_up()
        self.number += 1
        self._enter("queued")

    def give_up(self) -> None:
        """Tells the nodes of this attempt to forget it. Idempotent; those that are done or gone do
        not mind."""
        links, self._links = self._links, ()
        cancel = Cancel(
            request_id=self.request.request_id,
            attempt=self.number,
            reason="the gateway gave this attempt up",
        )
        for link in links:
            with suppress(TransportError):  # a lost worker has forgotten everything already
                link.line.post(cancel)

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

    @property
    def _left_s(self) -> float:
        return max(MIN_DEADLINE_S, self._arrived_s + self.request.deadline_s - self._clock())

    @property
    def _num_shipped(self) -> int:
        """Tokens that the shipped cache covers."""
        return self._handoff.num_tokens(self.request.num_tokens)

    async def _until_finished(self) -> None:
        run = self._run
        # The two nodes speak on connections of their own: the last token may overtake the first.
        while run.finished is None or run.first is None:
            self._take(await self._inbox.get())
        # The answer is complete; at most the prefill node's timing is missing.
        with suppress(TimeoutError, AttemptFailed):
            async with asyncio.timeout(SENT_GRACE_S):
                while run.sent is None and len(self._links) > 1:
                    self._take(await self._inbox.get())
        missing = set(range(self.request.max_new_tokens)) - set(run.tokens)
        if missing:
            raise AttemptFailed(
                f"request {self.request.request_id!r} finished without tokens {sorted(missing)}",
                at_fault=self._links[0].node_id,
            )
        self._enter("done")

    def _take(self, message: Said | NodeLost) -> None:
        run = self._run
        match message:
            case NodeLost():
                self._take_loss(message)
            case Failed():
                raise AttemptFailed(
                    f"{message.stage} of request {message.request_id!r} failed: {message.reason}",
                    retryable=message.retryable,
                    at_fault=NodeId(message.at_fault) if message.at_fault else None,
                    busy=message.busy,
                )
            case Prefilled():
                run.first = message
                if message.token is not None:
                    self._take_token(0, message.token, message.logits)
            case Sent():
                run.sent = message
            case Token():
                self._take_token(message.index, message.token, message.logits)
            case Finished():
                run.finished = message

    def _take_loss(self, lost: NodeLost) -> None:
        decode, *prefill = self._links
        is_needed = lost.link is decode or (lost.link in prefill and self._run.sent is None)
        if is_needed:
            raise AttemptFailed(lost.reason, at_fault=lost.link.node_id)

    def _take_token(self, index: int, token: int, logits: bytes) -> None:
        run = self._run
        run.tokens[index] = (token, logits)
        if index == 0:
            run.first_s = self._clock()
        if index or len(self._links) == 1:
            self._enter("decode")
        elif len(run.tokens) == 1:
            self._enter("transfer")

    def _say(self, link: WorkerLink, message: Message) -> None:
        try:
            link.line.post(message)
        except TransportError as error:
            raise AttemptFailed(str(error), at_fault=link.node_id) from error

    def _enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            if self._on_phase is not None:
                self._on_phase(self.request.request_id, phase)

    def _generation(self, decision: RoutingDecision) -> Generation:
        tokens = [self._run.tokens[i] for i in range(self.request.max_new_tokens)]
        return Generation(
            tokens=tuple(token for token, _ in tokens),
            logits=tuple(logits for _, logits in tokens if self.request.return_logits),
            record=self._record(decision),
        )

    def _record(self, decision: RoutingDecision) -> Record:
        first, sent, finished = self._run.first, self._run.sent, self._run.finished
        assert finished is not None
        assert first is not None
        # A prompt that the decode node had to compute was not offloaded, whatever was decided.
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
