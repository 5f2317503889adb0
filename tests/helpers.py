"""Both sides of a transfer over a scripted link."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import attrs

from pools import HYBRID, Pool, scatter
from prfaas.core import RequestId, TransferId
from prfaas.errors import RemoteProtocolError
from prfaas.seams.transport import WindowRef
from prfaas.spec import (
    ModelSpec,
)
from prfaas.transfer import (
    BytesLanded,
    Cancel,
    CloseWindow,
    Command,
    DataReceiver,
    DataSender,
    EndCode,
    Ended,
    EntryLayout,
    Installed,
    InstallEntry,
    LocalEvent,
    Message,
    OpenWindow,
    PeerLost,
    Progress,
    PutRange,
    RankDone,
    ReceiverControl,
    ReleaseEntry,
    Send,
    SenderControl,
    StartSending,
    StopSending,
    TransferTerms,
    WindowOpened,
    decode,
    encode,
)


@attrs.frozen
class Put:
    """A put on the link. ``landed`` ones have reached the receiver but are not acknowledged yet."""

    rank: int
    range: PutRange
    landed: bool = False


@attrs.frozen
class Piece:
    """Part of the entry that becomes ready at once; a slot-kind layer is one piece."""

    layer_index: int
    first_token: int
    stop_token: int

    def range_in(self, layout: EntryLayout) -> tuple[int, int]:
        if layout.part(self.layer_index).row_bytes is None:
            return layout.state_range(self.layer_index)
        return layout.rows_range(self.layer_index, self.first_token, self.stop_token)


class TransferPair:
    """Both sides of one transfer over a scripted link: nothing moves unless a method moves it.

    The sender's pool holds 0xFF wherever a byte is not ready, so that whatever is sent too early is
    wrong at the receiver; what is released is overwritten. Every command is executed at once, and
    the promises of their order are asserted.
    """

    def __init__(
        self,
        spec: ModelSpec = HYBRID,
        num_tokens: int = 19,
        *,
        start_token: int = 0,
        block_sizes: tuple[int, int] = (4, 8),
        num_senders: int = 1,
        reports_landings: bool = False,
        chunk_bytes: int = 24,
        min_put_bytes: int = 5,
        lease_s: float = 10.0,
        until_s: float = 100.0,
        seed: int = 0,
    ) -> None:
        rng = random.Random(seed)
        self.now = 0.0
        self.terms = TransferTerms(
            transfer_id=TransferId("t/1"),
            request_id=RequestId("request: 1"),
            spec=spec,
            num_tokens=num_tokens,
            until_s=until_s,
        )
        self.start_token = start_token
        self.whole = EntryLayout(spec, num_tokens)
        self.truth = rng.randbytes(self.whole.num_bytes)
        self.sender_pool = Pool(spec, num_tokens, block_sizes[0], 0xFF, rng)
        self.receiver_pool = Pool(spec, num_tokens, block_sizes[1], 0xCC, rng)
        for part in self.whole.parts:
            if part.row_bytes is not None:
                piece = Piece(part.layer_index, 0, start_token)
                self.receiver_pool.write(self.whole, *self._true_piece(piece))

        self.receiver = ReceiverControl(
            self.terms, 0.0, start_token=start_token, reports_landings=reports_landings
        )
        self.sender = SenderControl(self.terms, 0.0, num_senders=num_senders, lease_s=lease_s)
        self.num_senders = num_senders
        self.put_limits = {
            "chunk_bytes": chunk_bytes,
            "min_put_bytes": min_put_bytes,
            "max_inflight_bytes": 3 * chunk_bytes,
        }
        self.reports_landings = reports_landings

        self.to_receiver: deque[bytes] = deque()
        self.to_sender: deque[bytes] = deque()
        self.puts: list[Put] = []
        self.ghosts: list[tuple[int, bytes]] = []
        self.senders: list[DataSender] = []
        self.done_ranks: set[int] = set()
        self.data: DataReceiver | None = None
        self.layout: EntryLayout | None = None
        self.ready: list[Piece] = []
        self.all_ready = False
        self.alive = {"sender": True, "receiver": True}
        self.connected = True
        self.window_open = False
        self.released = {"sender": 0, "receiver": 0}
        self.installed = False
        self.ended: dict[str, Ended] = {}
        self.execute()

    # The shells: execute what the machines ask for.

    def execute(self) -> None:
        for command in self.sender.commands() if self.alive["sender"] else ():
            self._execute_sender(command)
        for command in self.receiver.commands() if self.alive["receiver"] else ():
            self._execute_receiver(command)
        self.sender.check()
        self.receiver.check()

    def _execute_sender(self, command: Command) -> None:
        match command:
            case Send(message) if self.connected:
                self.to_receiver.append(encode(message))
            case StartSending(start_token=start_token, window=window):
                self.layout = EntryLayout(self.terms.spec, self.terms.num_tokens, start_token)
                assert window == WindowRef(b"window", self.layout.num_bytes)
                self.senders = [
                    DataSender(self.layout.num_bytes, share=self._share(rank), **self.put_limits)
                    for rank in range(self.num_senders)
                ]
                for piece in self.ready:
                    self._declare(piece)
                if self.all_ready:
                    self.finish()
            case StopSending():
                self.puts.clear()
                self.senders.clear()
            case ReleaseEntry():
                assert not self.flying(), "freed under a put"
                self.released["sender"] += 1
                self._wipe(self.sender_pool, 0xEE)

    def _execute_receiver(self, command: Command) -> None:
        match command:
            case Send(message) if self.connected:
                self.to_sender.append(encode(message))
            case OpenWindow(num_bytes=num_bytes):
                self.window_open = True
                self.data = DataReceiver(num_bytes)
                self.tell_receiver(WindowOpened(WindowRef(b"window", num_bytes)))
            case CloseWindow():
                self.window_open = False
            case InstallEntry():
                assert not self.window_open
                landed = self.receiver_pool.read(self.whole, 0, self.whole.num_bytes)
                assert landed == self.truth
                self.installed = True
                self.tell_receiver(Installed())
            case ReleaseEntry():
                assert not self.window_open, "blocks released under an open window"
                self.released["receiver"] += 1
                self._wipe(self.receiver_pool, 0xDD)

    def tell_sender(self, happened: Message | LocalEvent) -> None:
        self._tell("sender", self.sender, happened)

    def tell_receiver(self, happened: Message | LocalEvent) -> None:
        self._tell("receiver", self.receiver, happened)

    def _tell(
        self,
        side: str,
        machine: SenderControl | ReceiverControl,
        happened: Message | LocalEvent,
    ) -> None:
        try:
            self._note(side, machine.receive(happened, self.now))
        except RemoteProtocolError as error:
            self._note(side, machine.receive(Cancel(EndCode.PROTOCOL, str(error)), self.now))
        self.execute()

    def _note(self, side: str, events: Sequence[Ended]) -> None:
        for event in events:
            assert side not in self.ended, "two ends"
            self.ended[side] = event

    # What the world does.

    def make_ready(self, piece: Piece) -> None:
        """The engine finishes a piece of the prefill."""
        if self.released["sender"] or not self.alive["sender"]:
            return
        offset, data = self._true_piece(piece)
        self.sender_pool.write(self.whole, offset, data)
        self.ready.append(piece)
        if self.senders:
            self._declare(piece)
        self.tell_sender(Progress())

    def finish(self) -> None:
        """The prefill is over."""
        self.all_ready = True
        for data in self.senders:
            data.finish()

    def start_puts(self) -> None:
        for rank, data in enumerate(self.senders):
            self.puts += [Put(rank, put) for put in data.next_puts()]
            data.check()

    def flying(self) -> list[Put]:
        """Puts that have not reached the receiver."""
        return [put for put in self.puts if not put.landed]

    def land(self, put: Put, *, partly: bool = False) -> None:
        """The bytes of a put reach the receiver, read from the sender's pool only now."""
        assert self.layout is not None
        data = self.sender_pool.read(self.layout, put.range.offset, put.range.num_bytes)
        if partly:
            data = data[: len(data) // 2]
        if not self._arrive(put.range.offset, data):
            self.fail(put)
            self.tell_sender(Cancel(EndCode.FAILED, "put refused"))
        elif partly:
            self.fail(put)
        elif put in self.puts:
            self.puts[self.puts.index(put)] = attrs.evolve(put, landed=True)

    def _arrive(self, offset: int, data: bytes) -> bool:
        if not self.window_open or not self.alive["receiver"]:
            return False
        assert self.data is not None
        self.receiver_pool.write(
            EntryLayout(self.terms.spec, self.terms.num_tokens, self.start_token), offset, data
        )
        num_new = self.data.landed(offset, len(data))
        self.data.check()
        if self.reports_landings:
            self.tell_receiver(BytesLanded(num_bytes=num_new))
        return True

    def haunt(self, put: Put) -> None:
        """The network keeps a copy of a put, to deliver it at any later time."""
        assert self.layout is not None
        data = self.sender_pool.read(self.layout, put.range.offset, put.range.num_bytes)
        self.ghosts.append((put.range.offset, data))

    def land_ghost(self) -> None:
        self._arrive(*self.ghosts.pop(0))

    def acknowledge(self, put: Put) -> None:
        self.puts.remove(put)
        self.senders[put.rank].acked(put.range.put_id)
        self.tell_sender(Progress())
        self.report_ranks()

    def report_ranks(self) -> None:
        for rank, data in enumerate(self.senders):
            if data.is_complete and rank not in self.done_ranks:
                self.done_ranks.add(rank)
                self.tell_sender(RankDone(sender_rank=rank, sent_bytes=data.sent_bytes))

    def fail(self, put: Put) -> None:
        if put in self.puts:
            self.puts.remove(put)
            self.senders[put.rank].failed(put.range.put_id)

    def deliver_to_receiver(self) -> None:
        frame = self.to_receiver.popleft()
        if self.alive["receiver"]:
            self.tell_receiver(decode(frame))

    def deliver_to_sender(self) -> None:
        frame = self.to_sender.popleft()
        if self.alive["sender"]:
            self.tell_sender(decode(frame))

    def kill(self, side: str) -> None:
        """A process dies without a word."""
        self.alive[side] = False
        if side == "sender":
            self.puts.clear()
            self.senders.clear()
        else:
            self.window_open = False

    def disconnect(self) -> None:
        """The channel breaks, and whoever is alive is told."""
        self.connected = False
        self.to_receiver.clear()
        self.to_sender.clear()
        for put in tuple(self.puts):
            self.fail(put)
        for side, tell in (("sender", self.tell_sender), ("receiver", self.tell_receiver)):
            if self.alive[side]:
                tell(PeerLost())

    def wait(self, duration_s: float) -> None:
        """Time passes, and every deadline on the way is served."""
        until = self.now + duration_s
        while self.now < until:
            sides = {"sender": self.sender, "receiver": self.receiver}
            deadlines = [m.next_deadline() for s, m in sides.items() if self.alive[s]]
            self.now = min([until, *(d for d in deadlines if d is not None and d > self.now)])
            for side, machine in sides.items():
                if self.alive[side]:
                    self._note(side, machine.on_deadline(self.now))
            self.execute()

    def pieces(self) -> list[Piece]:
        """The entry in pieces of at most 8 tokens, layer by layer within each."""
        pieces = []
        stops = range(0, self.terms.num_tokens, 8)
        for first in stops:
            stop = min(first + 8, self.terms.num_tokens)
            for part in self.whole.parts:
                if part.row_bytes is not None:
                    pieces.append(Piece(part.layer_index, first, stop))
        states = [part for part in self.whole.parts if part.row_bytes is None]
        return pieces + [Piece(part.layer_index, 0, 0) for part in states]

    def run(self) -> None:
        """Lets everything go well from here."""
        for piece in self.pieces():
            if piece not in self.ready:
                self.make_ready(piece)
        self.finish()
        for _ in range(1000):
            self.report_ranks()
            self.start_puts()
            if self.to_receiver:
                self.deliver_to_receiver()
            elif self.to_sender:
                self.deliver_to_sender()
            elif self.puts:
                put = self.puts[0]
                self.acknowledge(put) if put.landed else self.land(put)
            else:
                return
        raise AssertionError("the transfer does not come to rest")

    def messages(self, frames: deque[bytes]) -> list[Message]:
        return [decode(frame) for frame in frames]

    def _share(self, rank: int) -> list[tuple[int, int]]:
        assert self.layout is not None
        parts = self.layout.parts[rank :: self.num_senders]
        return [(part.offset, part.num_bytes) for part in parts if part.num_bytes]

    def _declare(self, piece: Piece) -> None:
        assert self.layout is not None
        offset, num_bytes = piece.range_in(self.layout)
        if num_bytes:
            part = self.layout.part(piece.layer_index)
            rank = self.layout.parts.index(part) % self.num_senders
            self.senders[rank].ready(offset, num_bytes)

    def _true_piece(self, piece: Piece) -> tuple[int, bytes]:
        offset, num_bytes = piece.range_in(self.whole)
        return offset, self.truth[offset : offset + num_bytes]

    def _wipe(self, pool: Pool, fill: int) -> None:
        spans = pool.place(self.whole).spans_all()
        scatter(pool.memory, spans, bytes([fill]) * self.whole.num_bytes)
