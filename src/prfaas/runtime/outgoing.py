"""The shell of one outgoing entry: puts what is ready, in the order the plan gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from prfaas.core import BlockId, GroupId
from prfaas.errors import ChannelBroken, ChannelClosed, IntegrityError
from prfaas.runtime.line import Line
from prfaas.runtime.messages import plain_text
from prfaas.runtime.node import Node
from prfaas.runtime.transfers import OnEnded, TransferLoop
from prfaas.seams import Reservation, WindowRef
from prfaas.transfer import (
    Cancel,
    Command,
    DataSender,
    EndCode,
    EntryLayout,
    EntryPlace,
    Message,
    PeerLost,
    Progress,
    PutRange,
    RankDone,
    ReleaseEntry,
    Send,
    SenderControl,
    StartSending,
    StopSending,
    place,
)

CHUNK_BYTES = 4 << 20
MAX_PUT_FAILURES = 3


class OutgoingEntry:
    """Sends one reservation's entry, with the state in ``slots``, while it is still being computed.

    Readiness is told in layers and tokens; it may run ahead of the receiver's answer, which names
    the window and the rows that need not travel.
    """

    def __init__(
        self,
        node: Node,
        line: Line,
        machine: SenderControl,
        reservation: Reservation,
        *,
        slots: Mapping[GroupId, BlockId],
        release: Callable[[], None],
        on_ended: OnEnded,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.line = line
        self._node = node
        self._reservation = reservation
        self._slots = slots
        self._release = release
        self._rows_ready: dict[int, int] = {}
        self._states_ready: set[int] = set()
        self._is_finished = False
        self._first_token: int | None = None
        self._data: DataSender | None = None
        self._place: EntryPlace | None = None
        self._window: WindowRef | None = None
        self._puts: set[asyncio.Task[None]] = set()
        self._rank_done = False
        self._is_stopped = False
        self._transfer = TransferLoop(
            machine, self._execute, on_ended, clock=node.clock, tasks=node.tasks
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes acknowledged by the receiver."""
        return 0 if self._data is None else self._data.sent_bytes

    def feed(self, message: Message) -> None:
        """A message of the receiver."""
        self._transfer.feed(message)

    def cancel(self, reason: str, code: EndCode) -> None:
        """Gives the transfer up; the release follows."""
        self._transfer.feed(Cancel(code, reason))

    def peer_lost(self, reason: str) -> None:
        self._transfer.feed(PeerLost(reason))

    def progress(self) -> None:
        """Work goes on, even if no byte moves yet."""
        self._transfer.feed(Progress())

    def rows_ready(self, num_tokens: int) -> None:
        """Rows of the first ``num_tokens`` tokens are in the pool, in every layer."""
        for group in self._node.spec.groups:
            if group.is_token_kind:
                for layer_index in group.layer_indices:
                    self._rows_ready[layer_index] = num_tokens

    def layer_ready(self, layer_index: int, num_tokens: int, is_last: bool) -> None:
        """One layer finished a segment that ends at ``num_tokens``."""
        if layer_index in self._rows_ready:
            self._rows_ready[layer_index] = num_tokens
        elif is_last:
            self._states_ready.add(layer_index)
        self._declare(layer_index)
        self._pump()

    def finish(self, first_token: int | None) -> None:
        """The whole entry is in the pool."""
        self._first_token = first_token
        self._is_finished = True
        if self._data is not None:
            self._data.finish()
        self._pump()

    def _declare(self, layer_index: int) -> None:
        if self._data is None or self._place is None:
            return
        layout = self._place.layout
        stop = self._rows_ready.get(layer_index)
        if stop is not None and stop > layout.start_token:
            self._data.ready(*layout.rows_range(layer_index, layout.start_token, stop))
        elif layer_index in self._states_ready:
            self._data.ready(*layout.state_range(layer_index))

    def _pump(self) -> None:
        if self._data is None or self._is_stopped:
            return
        for put in self._data.next_puts():
            task = self._node.tasks.spawn(self._put(put))
            self._puts.add(task)
            task.add_done_callback(self._puts.discard)
        if self._is_finished and self._data.is_complete and not self._rank_done:
            self._rank_done = True
            self._transfer.feed(
                RankDone(sent_bytes=self._data.sent_bytes, first_token=self._first_token)
            )

    async def _put(self, put: PutRange) -> None:
        assert self._data is not None
        assert self._place is not None
        assert self._window is not None
        try:
            spans = self._place.spans(put.offset, put.num_bytes)
            await self.line.channel.put(self._window, put.offset, self._node.memory, spans)
        except (ChannelBroken, ChannelClosed) as error:
            self.peer_lost(str(error))
            return
        except Exception as error:
            self._node.counters["puts_failed"] += 1
            self._data.failed(put.put_id)
            # Damaged bytes may arrive whole the next time; nothing else gets better.
            is_hopeless = self._data.num_failed > MAX_PUT_FAILURES
            if is_hopeless or not isinstance(error, IntegrityError):
                self._transfer.feed(Cancel(EndCode.FAILED, plain_text(error)))
                return
        else:
            self._data.acked(put.put_id)
            self._node.counters["sent_bytes"] += put.num_bytes
            self._transfer.feed(Progress())
        self._pump()

    async def _execute(self, command: Command) -> None:
        match command:
            case Send(message):
                self._transfer.say(self.line, message)
            case StartSending():
                self._start(command.window, command.start_token)
            case StopSending():
                await self._stop()
            case ReleaseEntry():
                self._release()

    def _start(self, window: WindowRef, start_token: int) -> None:
        reservation = self._reservation
        layout = EntryLayout(self._node.spec, reservation.num_tokens, start_token)
        self._place = place(layout, self._node.geometry, reservation.block_tables, self._slots)
        self._window = window
        put_bytes = self._node.config.put_bytes
        self._data = DataSender(
            layout.num_bytes,
            chunk_bytes=max(put_bytes, CHUNK_BYTES),
            min_put_bytes=put_bytes,
        )
        for layer_index in (*self._rows_ready, *self._states_ready):
            self._declare(layer_index)
        if self._is_finished:
            self._data.finish()
        self._pump()

    async def _stop(self) -> None:
        self._is_stopped = True
        for task in tuple(self._puts):
            task.cancel()
        await asyncio.gather(*self._puts, return_exceptions=True)
