"""A TCP channel: control frames on one connection, puts on the lanes beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import attrs

from prfaas.errors import (
    ChannelBroken,
    ChannelClosed,
    ConfigError,
    RemoteProtocolError,
    TransportError,
)
from prfaas.seams.transport import Channel, Delivery, Hello, Memory, Span, WindowRef
from prfaas.transport.inbox import Inbox, fresh
from prfaas.transport.tcp.config import TcpConfig
from prfaas.transport.tcp.incoming import IncomingPuts
from prfaas.transport.tcp.lanes import Lane, LaneThreads
from prfaas.transport.tcp.outgoing import OutgoingPuts
from prfaas.transport.views import SpanViews
from prfaas.transport.windows import WindowTable, check_bounds
from prfaas.wire.busy import BusyMeter
from prfaas.wire.frames import (
    MAX_CONTROL_BYTES,
    FrameDecoder,
    Kind,
    encode_frame,
    encode_header,
)

_READ_BYTES = 256 << 10
_MAX_INBOX_BYTES = 2 * MAX_CONTROL_BYTES


@attrs.frozen(kw_only=True)
class Opened:
    """What a handshake leaves behind: everything that a channel is made of.

    Attributes:
        local, peer: the two greetings, compared.
        reader, writer: the control connection.
        outgoing, incoming: lanes for our puts and for the peer's.
        rtt_s: round trip of the handshake.
    """

    local: Hello
    peer: Hello
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    outgoing: Sequence[Lane]
    incoming: Sequence[Lane]
    rtt_s: float


class TcpChannel(Channel):
    """See `Channel`. Made by `TcpTransport`; belongs to the event loop it was made in."""

    def __init__(
        self, opened: Opened, config: TcpConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._local = opened.local
        self._peer = opened.peer
        self._reader = opened.reader
        self._writer = opened.writer
        self._config = config
        self._error: TransportError | None = None
        self._inbox = Inbox(_MAX_INBOX_BYTES)
        self._windows = WindowTable()
        self._threads = LaneThreads(asyncio.get_running_loop(), self._break)
        self._outgoing = OutgoingPuts(
            opened.outgoing,
            self._threads,
            config=config,
            meter=BusyMeter(base_rtt_s=opened.rtt_s),
            clock=clock,
            on_failure=self._break,
        )
        self._incoming = IncomingPuts(opened.incoming, self._threads, self._windows)
        self._reading = asyncio.create_task(self._read())

    def __repr__(self) -> str:
        state = "open" if self._error is None else type(self._error).__name__
        return f"<TcpChannel to {self._peer.node_id!r} {state}, {self._outgoing!r}>"

    @property
    def local(self) -> Hello:
        return self._local

    @property
    def peer(self) -> Hello:
        return self._peer

    async def send(self, frame: bytes) -> None:
        self._require_open()
        if len(frame) > MAX_CONTROL_BYTES:
            raise ConfigError(
                f"control frame has {len(frame)} bytes, the limit is {MAX_CONTROL_BYTES}; "
                "put large data into a window"
            )
        self._writer.writelines((encode_header(Kind.CONTROL, len(frame)), frame))
        try:
            await self._writer.drain()
        except OSError as error:
            self._break(error)
        self._require_open()

    async def receive(self) -> bytes:
        return await self._inbox.get()

    def expose(self, memory: Memory, spans: Sequence[Span]) -> WindowRef:
        self._require_open()
        return self._windows.expose(SpanViews(memory, spans, writable=True))

    async def withdraw(self, window: WindowRef) -> int:
        idle = asyncio.Event()
        closed = self._windows.withdraw(window.token, lambda: self._threads.post(idle.set))
        limit_s = self._config.stall_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await idle.wait()
        except TimeoutError:
            self._break(TimeoutError(f"the peer did not finish a put within {limit_s} s"))
            await idle.wait()
        return 0 if closed is None else closed.landed_bytes

    async def put(
        self, window: WindowRef, offset: int, memory: Memory, spans: Sequence[Span]
    ) -> None:
        self._require_open()
        views = SpanViews(memory, spans, writable=False)
        check_bounds(window, offset, views.num_bytes)
        await self._outgoing.put(window.token, offset, views)

    def take_deliveries(self) -> tuple[Delivery, ...]:
        return self._outgoing.take_deliveries()

    def take_resent(self) -> tuple[int, int]:
        return self._outgoing.take_resent()

    async def aclose(self) -> None:
        if self._error is None:
            self._close("closed")
            try:
                await self._say_bye()
            finally:
                self._release()
        await self.ended()

    def abort(self) -> None:
        self._close("aborted")
        self._release()

    async def ended(self) -> None:
        """Returns when the channel has ended, by whichever side, and nothing of it is left."""
        await asyncio.wait([self._reading])
        await self._threads.ended()
        with suppress(OSError):  # how the connection ended has been reported already
            await self._writer.wait_closed()

    def _close(self, how: str) -> None:
        self._error = ChannelClosed(f"channel to {self._peer.node_id} was {how} on this side")
        self._inbox.end(self._error, discard=True)

    def _break(self, error: Exception) -> None:
        if self._error is None:
            self._error = ChannelBroken(
                f"channel to {self._peer.node_id} broke: {str(error) or type(error).__name__}; "
                "connect again"
            )
            self._error.__cause__ = error
            self._inbox.end(self._error, discard=False)
        self._release()

    def _release(self) -> None:
        assert self._error is not None
        self._outgoing.close(self._error)
        self._incoming.close()
        self._writer.transport.abort()

    async def _say_bye(self) -> None:
        """Waits until the peer has read every frame: it closes its side when it reads the BYE.

        Closing first would make the system discard what the peer has not read yet.
        """
        with suppress(OSError):  # a peer that is gone or stuck misses the rest of its frames
            async with asyncio.timeout(self._config.stall_timeout_s):
                self._writer.write(encode_frame(Kind.BYE))
                await self._writer.drain()
                self._writer.write_eof()
                await asyncio.wait([self._reading])

    def _require_open(self) -> None:
        if self._error is not None:
            raise fresh(self._error)

    async def _read(self) -> None:
        """Moves control frames into the inbox until the connection ends."""
        decoder = FrameDecoder((Kind.CONTROL, Kind.BYE))
        try:
            while data := await self._reader.read(_READ_BYTES):
                for frame in decoder.feed(data):
                    if frame.kind is Kind.BYE:
                        self._break(ConnectionError("the peer closed it"))
                        return
                    self._inbox.push(frame.body)
                await self._inbox.wait_room()
            raise ConnectionResetError("the peer vanished")
        except (OSError, RemoteProtocolError) as error:
            self._break(error)
