"""The decode job: takes an entry from a prefill node, installs it, and decodes from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prfaas.core import RequestId, TransferId
from prfaas.errors import PrfaasError, TransportError
from prfaas.runtime.job import Job, Reply, TokenStream
from prfaas.runtime.messages import TRANSFER, Expect, Expecting, Token
from prfaas.runtime.node import Node
from prfaas.runtime.transfers import TransferLoop
from prfaas.seams import Channel, DecodeResult, EntryMemory, WindowRef
from prfaas.transfer import (
    Cancel,
    CloseWindow,
    Command,
    Done,
    Ended,
    EndCode,
    EntryLayout,
    InstallEntry,
    Installed,
    Message,
    OpenWindow,
    PeerLost,
    ReceiverControl,
    ReleaseEntry,
    Send,
    TransferTerms,
    WindowOpened,
    encode,
    place,
)


class DecodeJob(Job):
    """Reserves blocks, exposes them to the prefill node, and decodes once everything has landed.

    Blocks are given back to the cache right after installation: the engine has its own copy then, and
    complete blocks stay behind as prefix entries.
    """

    stage = "decode"

    def __init__(
        self, node: Node, work: Expect, reply: Reply, on_over: Callable[[Job], None]
    ) -> None:
        super().__init__(node, work, reply, on_over)
        self._num_shipped = node.config.handoff.num_tokens(len(self.tokens))
        self._hashes = node.hashes(self.tokens[: self._num_shipped], work.tenant)
        match = node.cache.match(self._hashes, max_tokens=self._num_shipped)
        self.reservation = node.cache.reserve(
            self.key,
            self._num_shipped,
            match,
            now=node.clock(),
            receive=True,
            lease_until_s=self.until_s,
        )
        self.held_tokens = self.reservation.num_reused_tokens
        self.prefill_node = work.prefill_node
        self._memory: EntryMemory = node.pool.entry(self.reservation)
        self._layout = EntryLayout(node.spec, self._num_shipped, self.held_tokens)
        self._channel: Channel | None = None
        self._window: WindowRef | None = None
        self._first_token: int | None = None
        self._received_bytes = 0
        self._num_replayed = 0
        self._is_cancelled = False
        self._stream = TokenStream(self)
        terms = TransferTerms(
            transfer_id=TransferId(self.key),
            request_id=RequestId(work.request_id),
            spec=node.spec,
            num_tokens=self._num_shipped,
            until_s=self.until_s,
        )
        machine = ReceiverControl(terms, node.clock(), start_token=self.held_tokens)
        self._transfer = TransferLoop(machine, self._execute, self._transfer_ended, node.clock)

    async def announce(self) -> None:
        """Tells the gateway that the prefill node may come."""
        await self.reply(
            Expecting(
                request_id=self.work.request_id,
                attempt=self.work.attempt,
                held_tokens=self.held_tokens,
            )
        )

    @property
    def channel(self) -> Channel | None:
        """The prefill node's channel, once it has offered the entry."""
        return self._channel

    def feed(self, channel: Channel, message: Message) -> None:
        """A message of the prefill node."""
        if self._channel is None:
            self._channel = channel
        if isinstance(message, Done):
            self._received_bytes += message.sent_bytes
            if message.first_token is not None:
                self._first_token = message.first_token
        self._transfer.feed(message)

    async def prefill_segment(self) -> None:
        """Replays the last prompt token where the handoff leaves it to the decode node."""
        self.node.schedule.remove(self.key)
        last = self.tokens[self._num_shipped :]
        result = await self.in_engine(
            partial(self.node.engine.prefill, self.key, last, self._num_shipped, None, None, None)
        )
        if result is None:
            return
        self._num_replayed = len(last)
        work = self.work
        await self.reply(
            Token(
                request_id=work.request_id,
                attempt=work.attempt,
                index=0,
                token=result.token,
                logits=result.logits if work.return_logits else b"",
            )
        )
        await self._decode_from(result.token)

    async def decode_step(self) -> None:
        if await self._stream.step():
            await self._finish()

    async def cancel(self, reason: str) -> None:
        self._is_cancelled = True
        self._transfer.feed(Cancel(EndCode.CANCELLED, reason))
        if self._transfer.task.done():
            await self.release()

    def peer_lost(self, reason: str) -> None:
        self._transfer.feed(PeerLost(reason))

    async def _execute(self, command: Command) -> None:
        match command:
            case Send(message):
                await self._send(message)
            case OpenWindow():
                self._open_window()
            case CloseWindow():
                if self._channel is not None and self._window is not None:
                    await self._channel.withdraw(self._window)
            case InstallEntry():
                await self._install()
            case ReleaseEntry():
                await self.release()

    async def _send(self, message: Message) -> None:
        if self._channel is None:
            return  # nobody has offered yet, so nobody waits for an answer
        try:
            await self._channel.send(TRANSFER + encode(message))
        except TransportError as error:
            self.peer_lost(str(error))

    def _open_window(self) -> None:
        assert self._channel is not None
        assert self.reservation is not None
        where = place(
            self._layout,
            self.node.geometry,
            self.reservation.block_tables,
            self.reservation.tail_slots,
        )
        try:
            self._window = self._channel.expose(self.node.memory, where.spans_all())
        except TransportError as error:
            self.peer_lost(str(error))
        else:
            self._transfer.feed(WindowOpened(self._window))

    async def _install(self) -> None:
        try:
            installed = await self.in_engine(self._open)
        except PrfaasError as error:
            self._transfer.feed(Cancel(EndCode.FAILED, str(error)))
            return
        if installed is None:
            return
        node = self.node
        node.cache.commit(self.key, self._hashes, self._num_shipped, node.clock())
        node.cache.release(self.key)
        node.counters["received_bytes"] += self._received_bytes
        self._transfer.feed(Installed())

    def _open(self) -> DecodeResult:
        """In the engine's thread."""
        assert self.reservation is not None
        if self.node.landing_hook is not None:
            self.node.landing_hook(self._layout, self._memory, self.reservation)
        self.node.engine.open(
            self.key, self._num_shipped, self._memory, self.reservation.tail_slots
        )
        return DecodeResult(token=0, logits=b"")

    async def _transfer_ended(self, ended: Ended) -> None:
        if ended.error is not None:
            if ended.code is not EndCode.CANCELLED:
                at_fault = self.prefill_node if ended.code is EndCode.PEER_LOST else ""
                await self.fail(str(ended.error), at_fault=at_fault)
            await self.release()
        elif self._is_cancelled:
            await self.release()
        elif self._first_token is not None:
            await self._decode_from(self._first_token)
        else:
            self.node.schedule.add_prefill(self.key)
            self.node.wake()

    async def _decode_from(self, token: int) -> None:
        if self._stream.start(token):
            await self._finish()
        else:
            self.node.schedule.add_decode(self.key)
            self.node.wake()

    async def _finish(self) -> None:
        await self.reply(
            self._stream.finished(
                received_bytes=self._received_bytes,
                expected_bytes=self._layout.num_bytes,
                held_tokens=self.held_tokens,
                decode_prefilled_tokens=self._num_replayed,
            )
        )
        await self.release()
