"""The decode job: takes an entry from a prefill node, installs it, and decodes from it."""

from __future__ import annotations

from collections.abc import Container
from functools import partial

from prfaas.core import RequestId, TransferId
from prfaas.errors import TransportError
from prfaas.runtime.job import Job, OnOver
from prfaas.runtime.line import Line
from prfaas.runtime.messages import Expect, Expecting, plain_text
from prfaas.runtime.node import Node
from prfaas.runtime.stream import TokenStream
from prfaas.runtime.transfers import TransferLoop
from prfaas.seams import EntryMemory, WindowRef
from prfaas.transfer import (
    Cancel,
    CloseWindow,
    Command,
    Done,
    EndCode,
    Ended,
    EntryLayout,
    Installed,
    InstallEntry,
    Offer,
    OpenWindow,
    PeerLost,
    ReceiverControl,
    ReleaseEntry,
    Renew,
    Send,
    TransferState,
    TransferTerms,
    WindowOpened,
    place,
)
from prfaas.transfer import Message as TransferMessage


class DecodeJob(Job):
    """Reserves blocks, exposes them to the prefill node, and decodes once everything has landed.

    Blocks are given back to the cache right after installation: the engine has its own copy then,
    and complete blocks stay behind as prefix entries.
    """

    stage = "decode"

    def __init__(self, node: Node, work: Expect, gateway: Line, on_over: OnOver) -> None:
        super().__init__(node, work, gateway, on_over)
        self._prefill_node = work.prefill_node
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
        self._held_tokens = self.reservation.num_reused_tokens
        self._memory: EntryMemory = node.pool.entry(self.reservation)
        self._layout = EntryLayout(node.spec, self._num_shipped, self._held_tokens)
        self._line: Line | None = None
        self._window: WindowRef | None = None
        self._landed_bytes: int | None = None
        self._done: Done | None = None
        self._num_replayed = 0
        self._stream = TokenStream(self)
        terms = TransferTerms(
            transfer_id=TransferId(self.key),
            request_id=RequestId(work.request_id),
            spec=node.spec,
            num_tokens=self._num_shipped,
            until_s=self.until_s,
        )
        self._transfer = TransferLoop(
            ReceiverControl(terms, node.clock(), start_token=self._held_tokens),
            self._execute,
            self._transfer_ended,
            clock=node.clock,
            tasks=node.tasks,
        )
        self.reply(
            Expecting(
                request_id=work.request_id, attempt=work.attempt, held_tokens=self._held_tokens
            )
        )

    @property
    def peer_line(self) -> Line | None:
        return self._line

    def feed(self, line: Line, message: TransferMessage) -> bool:
        if self._line is None and isinstance(message, Offer):
            self._line = line
        if self._line is not line:
            return False
        if self._done is None and isinstance(message, Done):
            self._done = message
        self._transfer.feed(message)
        return True

    async def prefill_segment(self) -> None:
        """Replays the last prompt token where the handoff leaves it to the decode node."""
        self.node.schedule.remove(self.key)
        last = self.tokens[self._num_shipped :]
        result = await self.in_engine(
            partial(self.node.engine.prefill, self.key, last, self._num_shipped, None, None, None)
        )
        if result is not None:
            self._num_replayed = len(last)
            self._stream.tell(result)
            self._decode_from(result.token)

    async def decode_step(self) -> None:
        await self._stream.step()
        self._finish_if_complete()

    def tick(self, moving: Container[Line]) -> None:
        # A busy engine may keep a landed entry waiting for longer than the sender's lease.
        if self._transfer.state is TransferState.COMPLETE and self._line is not None:
            self._transfer.say(self._line, Renew(transfer_id=TransferId(self.key)))

    def peer_lost(self, reason: str) -> None:
        self._transfer.feed(PeerLost(reason))

    def _end(self, reason: str, code: EndCode) -> None:
        if self._transfer.is_over:
            self.release()
        else:
            self._transfer.feed(Cancel(code, reason))

    async def _execute(self, command: Command) -> None:
        match command:
            case Send(message):
                if self._line is not None:  # else nobody has offered, and nobody waits
                    self._transfer.say(self._line, message)
            case OpenWindow():
                self._open_window()
            case CloseWindow():
                await self._close_window()
            case InstallEntry():
                await self._install()
            case ReleaseEntry():
                self.release()

    def _open_window(self) -> None:
        assert self._line is not None
        where = place(
            self._layout,
            self.node.geometry,
            self.reservation.block_tables,
            self.reservation.tail_slots,
        )
        try:
            self._window = self._line.channel.expose(self.node.memory, where.spans_all())
        except TransportError as error:
            self.peer_lost(str(error))
        else:
            self._transfer.feed(WindowOpened(self._window))

    async def _close_window(self) -> None:
        if self._line is not None and self._window is not None:
            window, self._window = self._window, None
            self._landed_bytes = await self._line.channel.withdraw(window)

    async def _install(self) -> None:
        node = self.node
        if self._received_bytes < self._layout.num_bytes:
            reason = (
                f"{self._prefill_node} said that the entry is complete, but "
                f"{self._received_bytes} of {self._layout.num_bytes} bytes landed"
            )
            self.fail(reason, at_fault=self._prefill_node)
            self.cancel(reason, EndCode.PROTOCOL)
            return
        try:
            installed = await self.in_engine(self._open)
        except Exception as error:
            self.fail_step(error)
            self.cancel(plain_text(error), EndCode.FAILED)
            return
        if installed is None:
            return
        node.cache.commit(self.key, self._hashes, self._num_shipped, node.clock())
        node.cache.release(self.key)
        node.counters["received_bytes"] += self._received_bytes
        self._transfer.feed(Installed())

    def _open(self) -> bool:
        """In the engine's thread."""
        if self.node.landing_hook is not None:
            self.node.landing_hook(self._layout, self._memory, self.reservation)
        self.node.engine.open(
            self.key, self._num_shipped, self._memory, self.reservation.tail_slots
        )
        return True

    @property
    def _received_bytes(self) -> int:
        """What landed here, or what the sender says where the fabric does not tell."""
        if self._landed_bytes is not None:
            return self._landed_bytes
        return 0 if self._done is None else self._done.sent_bytes

    def _transfer_ended(self, ended: Ended) -> None:
        if ended.error is not None:
            is_theirs = ended.by_peer or ended.code is EndCode.EXPIRED
            # What they call off they have given back; this may be heard before they say so.
            self.fail(
                str(ended.error),
                at_fault=self._prefill_node if is_theirs else "",
                busy=ended.by_peer and ended.code is EndCode.CANCELLED,
            )
            self.release()
            return
        if self.is_cancelled:  # too late for the transfer to hear of it
            self.release()
            return
        first_token = None if self._done is None else self._done.first_token
        if first_token is not None:
            self._decode_from(first_token)
        else:
            self.schedule_prefill()

    def _decode_from(self, token: int) -> None:
        self._stream.start(token)
        if not self._finish_if_complete():
            self.schedule_decode()

    def _finish_if_complete(self) -> bool:
        if self._stream.is_complete and self.is_wanted:
            self._stream.finish(
                received_bytes=self._received_bytes,
                expected_bytes=self._layout.num_bytes,
                held_tokens=self._held_tokens,
                decode_prefilled_tokens=self._num_replayed,
            )
        return self._stream.is_complete
