"""The prefill job: computes a prompt by segments and sends its cache as layers become ready."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial

from prfaas.cache import checkpoint_positions
from prfaas.core import RequestId, TransferId
from prfaas.errors import PrfaasError
from prfaas.policy.schedule import segment_ends
from prfaas.runtime.job import Job, OnOver
from prfaas.runtime.line import Line
from prfaas.runtime.messages import Generate, Prefill, Prefilled, Sent, plain_text
from prfaas.runtime.node import Node
from prfaas.runtime.outgoing import OutgoingEntry
from prfaas.runtime.peers import PeerLines
from prfaas.runtime.stream import TokenStream
from prfaas.runtime.tasks import report
from prfaas.seams import EntryMemory, StepResult
from prfaas.transfer import EndCode, Ended, SenderControl, TransferTerms
from prfaas.transfer import Message as TransferMessage


class PrefillJob(Job):
    """Prefills a prompt; then either ships its cache (`Prefill`) or decodes here (`Generate`)."""

    stage = "prefill"

    def __init__(
        self, node: Node, work: Prefill | Generate, gateway: Line, on_over: OnOver
    ) -> None:
        super().__init__(node, work, gateway, on_over)
        num_prompt = len(self.tokens)
        self._stop = (
            node.config.handoff.num_tokens(num_prompt) if isinstance(work, Prefill) else num_prompt
        )
        self._hashes = node.hashes(self.tokens[: self._stop], work.tenant)
        match = node.cache.match(self._hashes, max_tokens=num_prompt - 1)
        self.reservation = node.cache.reserve(
            self.key,
            self._stop,
            match,
            now=node.clock(),
            checkpoints=checkpoint_positions(self._stop, match, node.geometry.block_size),
            lease_until_s=self.until_s if isinstance(work, Prefill) else None,
        )
        self._memory: EntryMemory = node.pool.entry(self.reservation)
        self._position = self._start = self.reservation.num_reused_tokens
        self._ends = segment_ends(
            self._start,
            self._stop,
            node.engine.segment_tokens,
            self.reservation.checkpoint_slots,
        )
        self._admitted_s = node.clock()
        self._started_s: float | None = None
        self._prefilled_s: float | None = None
        self._token: int | None = None
        self._outgoing: OutgoingEntry | None = None
        self._stream = TokenStream(self)
        self.schedule_prefill()

    async def dial(self, peers: PeerLines, work: Prefill) -> None:
        """Offers the entry to the decode node while the prompt waits and computes."""
        try:
            line = await peers.get(work.decode_address)
            if self.is_wanted:
                self._outgoing = self._offer(line)
        except Exception as error:
            if not isinstance(error, PrfaasError):
                report(f"{self!r} could not be offered", error)
            self.fail(plain_text(error), at_fault=self.node.config.node_id)
            self.release()

    @property
    def is_begun(self) -> bool:
        return self._started_s is not None

    @property
    def peer_line(self) -> Line | None:
        return None if self._outgoing is None else self._outgoing.line

    def feed(self, line: Line, message: TransferMessage) -> bool:
        if self._outgoing is None or self._outgoing.line is not line:
            return False
        self._outgoing.feed(message)
        return True

    async def prefill_segment(self) -> None:
        if self._started_s is None:
            self._started_s = self.node.clock()
            if await self.in_engine(self._open) is None:
                return
        result: StepResult | None = None
        if self._position < self._stop:
            result = await self.in_engine(partial(self._run_segment, self._ends[0]))
            if result is None:
                return
            self._position = self._ends.pop(0)
        if self._position == self._stop:
            self._prefill_done(result)

    async def decode_step(self) -> None:
        await self._stream.step()
        if self._stream.is_complete and self.is_wanted:
            self._stream.finish()

    def tick(self, moving: Container[Line]) -> None:
        outgoing = self._outgoing
        if outgoing is not None and (self._prefilled_s is None or outgoing.line in moving):
            outgoing.progress()

    def peer_lost(self, reason: str) -> None:
        if self._outgoing is not None:
            self._outgoing.peer_lost(reason)

    def _end(self, reason: str, code: EndCode) -> None:
        if self._outgoing is not None:
            self._outgoing.cancel(reason, code)
        else:
            self.release()

    def _offer(self, line: Line) -> OutgoingEntry:
        node, reservation = self.node, self.reservation
        terms = TransferTerms(
            transfer_id=TransferId(self.key),
            request_id=RequestId(self.work.request_id),
            spec=node.spec,
            num_tokens=self._stop,
            until_s=self.until_s,
        )
        machine = SenderControl(terms, node.clock(), lease_s=node.config.lease_s)
        # Where nothing is left to compute, the state to ship is the one that was resumed from.
        is_whole_hit = self._start == self._stop
        outgoing = OutgoingEntry(
            node,
            line,
            machine,
            reservation,
            slots=reservation.resume_slots if is_whole_hit else reservation.tail_slots,
            release=self.release,
            on_ended=self._transfer_ended,
        )
        outgoing.rows_ready(self._position)
        if self._prefilled_s is not None:
            outgoing.finish(self._token)
        return outgoing

    def _open(self) -> bool:
        """In the engine's thread."""
        self.node.engine.open(self.key, self._start, self._memory, self.reservation.resume_slots)
        return True

    def _run_segment(self, end: int) -> StepResult:
        """In the engine's thread."""
        reservation, is_last = self.reservation, end == self._stop
        slots = reservation.tail_slots if is_last else reservation.checkpoint_slots.get(end)
        return self.node.engine.prefill(
            self.key,
            self.tokens[self._position : end],
            self._position,
            self._memory,
            slots,
            self._on_layer(end),
        )

    def _on_layer(self, end: int) -> Callable[[int], None] | None:
        outgoing, is_last = self._outgoing, end == self._stop
        if outgoing is None:
            return None
        loop = outgoing.loop

        def on_layer(layer_index: int) -> None:
            loop.call_soon_threadsafe(outgoing.layer_ready, layer_index, end, is_last)

        return on_layer

    def _prefill_done(self, result: StepResult | None) -> None:
        node, work = self.node, self.work
        node.schedule.remove(self.key)
        now = node.clock()
        assert self._started_s is not None
        self._prefilled_s = now
        node.cache.commit(self.key, self._hashes, self._stop, now)
        node.counters["prefilled_tokens"] += self._stop - self._start
        # Only logits after the whole prompt give a token; a shorter entry leaves it to the decoder.
        has_token = result is not None and self._stop == len(self.tokens)
        token = self._token = result.token if result is not None and has_token else None
        self.reply(
            Prefilled(
                request_id=work.request_id,
                attempt=work.attempt,
                token=token,
                logits=result.logits if result and has_token and work.return_logits else b"",
                cached_tokens=self._start,
                prefilled_tokens=self._stop - self._start,
                queue_s=self._started_s - self._admitted_s,
                prefill_s=now - self._started_s,
            )
        )
        if self._outgoing is not None:
            self._outgoing.finish(token)
        elif isinstance(work, Generate):
            assert token is not None
            self._stream.start(token)
            if self._stream.is_complete:
                self._stream.finish()
            else:
                self.schedule_decode()

    def _who_failed(self, ended: Ended) -> str:
        """A way to the decode node that fails is ours: from another node there may be a better
        one, and a decode node that is down has told the gateway so by its silence."""
        if ended.code in (EndCode.PEER_LOST, EndCode.EXPIRED):
            return self.node.config.node_id
        assert isinstance(self.work, Prefill)
        return self.work.decode_node if ended.by_peer else ""

    def _transfer_ended(self, ended: Ended) -> None:
        if ended.error is not None:
            self.fail(str(ended.error), at_fault=self._who_failed(ended))
            return
        assert self._outgoing is not None
        assert self._prefilled_s is not None
        self.reply(
            Sent(
                request_id=self.work.request_id,
                attempt=self.work.attempt,
                sent_bytes=self._outgoing.sent_bytes,
                transfer_s=self.node.clock() - self._prefilled_s,
            )
        )
