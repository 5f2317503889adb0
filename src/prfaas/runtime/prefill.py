"""The prefill job: computes a prompt segment by segment and sends its cache as layers become ready."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prfaas.cache import checkpoint_positions
from prfaas.core import RequestId, TransferId
from prfaas.runtime.job import Job, Reply, TokenStream
from prfaas.runtime.messages import Generate, Prefill, Prefilled, Sent
from prfaas.runtime.node import Node
from prfaas.runtime.outgoing import OutgoingEntry
from prfaas.seams import Channel, DecodeResult, EntryMemory
from prfaas.transfer import Ended, EndCode, SenderControl, TransferTerms


class PrefillJob(Job):
    """Prefills a prompt; then either ships its cache (`Prefill`) or decodes here (`Generate`)."""

    stage = "prefill"

    def __init__(
        self, node: Node, work: Prefill | Generate, reply: Reply, on_over: Callable[[Job], None]
    ) -> None:
        super().__init__(node, work, reply, on_over)
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
        self._ends = self._segment_ends()
        self._admitted_s = node.clock()
        self._started_s: float | None = None
        self._prefilled_s: float | None = None
        self._token: int | None = None
        self._outgoing: OutgoingEntry | None = None
        self._stream = TokenStream(self)
        node.schedule.add_prefill(self.key)
        node.wake()

    def send_over(self, channel: Channel) -> None:
        """Offers the entry to the decode node while the prompt waits and computes."""
        assert self.reservation is not None
        terms = TransferTerms(
            transfer_id=TransferId(self.key),
            request_id=RequestId(self.work.request_id),
            spec=self.node.spec,
            num_tokens=self._stop,
            until_s=self.until_s,
        )
        machine = SenderControl(terms, self.node.clock(), lease_s=self.node.config.lease_s)
        # Where nothing is left to compute, the state to ship is the one that was resumed from.
        is_whole_hit = self._start == self._stop
        self._outgoing = OutgoingEntry(
            self.node,
            channel,
            machine,
            self.reservation,
            self.reservation.resume_slots if is_whole_hit else self.reservation.tail_slots,
            self.release,
            self._transfer_ended,
        )
        self._outgoing.rows_ready(self._position)
        if self._prefilled_s is not None:
            self._outgoing.finish(self._token)

    @property
    def outgoing(self) -> OutgoingEntry | None:
        return self._outgoing

    async def prefill_segment(self) -> None:
        node = self.node
        if self._started_s is None:
            self._started_s = node.clock()
            if await self.in_engine(self._open) is None:
                return
        result: DecodeResult | None = None
        if self._position < self._stop:
            result = await self.in_engine(partial(self._run_segment, self._ends[0]))
            if result is None:
                return
            self._position = self._ends.pop(0)
        if self._position == self._stop:
            await self._prefill_done(result)

    async def decode_step(self) -> None:
        if await self._stream.step():
            await self.reply(self._stream.finished())
            await self.release()

    async def tick(self) -> None:
        if self._outgoing is not None:
            self._outgoing.progress()

    async def cancel(self, reason: str) -> None:
        if self._outgoing is not None:
            self._outgoing.cancel(reason)
        else:
            await self.release()

    def peer_lost(self, reason: str) -> None:
        if self._outgoing is not None:
            self._outgoing.peer_lost(reason)

    def _segment_ends(self) -> list[int]:
        step = self.node.engine.segment_tokens
        first = self._start - self._start % step + step
        ends = {*range(first, self._stop, step), self._stop}
        assert self.reservation is not None
        ends.update(p for p in self.reservation.checkpoint_slots if p > self._start)
        return sorted(end for end in ends if self._start < end <= self._stop)

    def _open(self) -> DecodeResult:
        assert self.reservation is not None
        self.node.engine.open(self.key, self._start, self._memory, self.reservation.resume_slots)
        return DecodeResult(token=0, logits=b"")

    def _run_segment(self, end: int) -> DecodeResult:
        """In the engine's thread."""
        assert self.reservation is not None
        is_last = end == self._stop
        slots = self.reservation.tail_slots if is_last else None
        if not is_last:
            slots = self.reservation.checkpoint_slots.get(end)
        on_layer = None
        if self._outgoing is not None:
            loop, outgoing = self._outgoing.loop, self._outgoing

            def on_layer(layer_index: int) -> None:
                loop.call_soon_threadsafe(outgoing.layer_ready, layer_index, end, is_last)

        return self.node.engine.prefill(
            self.key,
            self.tokens[self._position : end],
            self._position,
            self._memory,
            slots,
            on_layer,
        )

    async def _prefill_done(self, result: DecodeResult | None) -> None:
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
        await self.reply(
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
        if isinstance(work, Prefill):
            if self._outgoing is not None:
                self._outgoing.finish(token)
        elif token is not None:
            await self._decode_here(token)

    async def _decode_here(self, token: int) -> None:
        if self._stream.start(token):
            await self.reply(self._stream.finished())
            await self.release()
        else:
            self.node.schedule.add_decode(self.key)
            self.node.wake()

    async def _transfer_ended(self, ended: Ended) -> None:
        if ended.error is None and self._prefilled_s is not None:
            assert self._outgoing is not None
            await self.reply(
                Sent(
                    request_id=self.work.request_id,
                    attempt=self.work.attempt,
                    sent_bytes=self._outgoing.sent_bytes,
                    transfer_s=self.node.clock() - self._prefilled_s,
                )
            )
        elif ended.error is not None and ended.code is not EndCode.CANCELLED:
            await self.fail(str(ended.error))
