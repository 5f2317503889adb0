"""Channels inside one event loop: the reference implementation of the Transport seam.

Slow on purpose in nothing, clever in nothing: frames go through a queue, puts are memory copies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from prfaas.errors import (
    AddressError,
    ChannelBroken,
    ChannelClosed,
    ConfigError,
    ConnectError,
    ListenError,
    TransportError,
)
from prfaas.seams.transport import (
    Channel,
    Delivery,
    Hello,
    Listener,
    Memory,
    OnChannel,
    Span,
    Transport,
    WindowRef,
)
from prfaas.transport.address import split_scheme
from prfaas.transport.inbox import Inbox, fresh
from prfaas.transport.views import SpanViews
from prfaas.transport.windows import WindowTable, check_bounds, put_error
from prfaas.wire.busy import BusyMeter
from prfaas.wire.frames import MAX_CONTROL_BYTES, NackReason
from prfaas.wire.handshake import compare

_CHUNK_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class InProcChannel(Channel):
    """See `Channel`. Made in pairs by `InProcTransport`."""

    def __init__(self, local: Hello, peer: Hello, clock: Callable[[], float]) -> None:
        self._local = local
        self._peer = peer
        self._clock = clock
        self._meter = BusyMeter(base_rtt_s=0.0)
        self._other: InProcChannel | None = None
        self._error: TransportError | None = None
        self._inbox = Inbox(2 * MAX_CONTROL_BYTES)
        self._windows = WindowTable()

    def __repr__(self) -> str:
        state = "open" if self._error is None else type(self._error).__name__
        return f"<InProcChannel to {self._peer.node_id!r} {state}, {self._windows!r}>"

    @classmethod
    def pair(
        cls, dialler: Hello, listener: Hello, clock: Callable[[], float]
    ) -> tuple[InProcChannel, InProcChannel]:
        """The two ends of a channel."""
        near, far = cls(dialler, listener, clock), cls(listener, dialler, clock)
        near._other, far._other = far, near
        return near, far

    @property
    def local(self) -> Hello:
        return self._local

    @property
    def peer(self) -> Hello:
        return self._peer

    async def send(self, frame: bytes) -> None:
        other = self._require_open()
        if len(frame) > MAX_CONTROL_BYTES:
            raise ConfigError(
                f"control frame has {len(frame)} bytes, the limit is {MAX_CONTROL_BYTES}; "
                "put large data into a window"
            )
        other._inbox.push(bytes(frame))
        await other._inbox.wait_room()
        self._require_open()

    async def receive(self) -> bytes:
        return await self._inbox.get()

    def expose(self, memory: Memory, spans: Sequence[Span]) -> WindowRef:
        self._require_open()
        return self._windows.expose(SpanViews(memory, spans, writable=True))

    async def withdraw(self, window: WindowRef) -> int:
        # Nobody writes between two steps of the loop.
        closed = self._windows.withdraw(window.token, lambda: None)
        return 0 if closed is None else closed.landed_bytes

    async def put(
        self, window: WindowRef, offset: int, memory: Memory, spans: Sequence[Span]
    ) -> None:
        other = self._require_open()
        source = SpanViews(memory, spans, writable=False)
        check_bounds(window, offset, source.num_bytes)
        self._meter.queued(source.num_bytes, self._clock())
        start = 0
        try:
            while True:
                await asyncio.sleep(0)
                self._require_open()
                stop = min(start + _CHUNK_BYTES, source.num_bytes)
                other._land(window.token, offset + start, source.cut(start, stop), stop - start)
                self._meter.acknowledged(stop - start, self._clock())
                start = stop
                if start == source.num_bytes:
                    return
        finally:
            self._meter.dropped(source.num_bytes - start)

    def take_deliveries(self) -> tuple[Delivery, ...]:
        return self._meter.take()

    async def aclose(self) -> None:
        self._close("closed")

    def abort(self) -> None:
        self._close("aborted")

    def _close(self, how: str) -> None:
        was_open = self._error is None
        self._error = ChannelClosed(f"channel to {self._peer.node_id} was {how} on this side")
        self._inbox.end(self._error, discard=True)
        if was_open and self._other is not None:
            self._other._break()

    def _break(self) -> None:
        if self._error is None:
            self._error = ChannelBroken(
                f"channel to {self._peer.node_id} broke: the peer closed it; connect again"
            )
            self._inbox.end(self._error, discard=False)

    def _require_open(self) -> InProcChannel:
        if self._error is not None:
            raise fresh(self._error)
        assert self._other is not None
        return self._other

    def _land(self, token: bytes, offset: int, source: list[memoryview], num_bytes: int) -> None:
        found = self._windows.begin(token, offset, num_bytes)
        if isinstance(found, NackReason):
            raise put_error(found, offset, num_bytes)
        window, target = found
        copy_views(target, source)
        self._windows.finish(token, window, landed_bytes=num_bytes)


def copy_views(target: Sequence[memoryview], source: Sequence[memoryview]) -> None:
    """Copies a concatenation of views onto another one of the same length."""
    pending = iter(target)
    into = memoryview(b"")
    for view in source:
        while view:
            into = into or next(pending)
            num_bytes = min(len(into), len(view))
            into[:num_bytes] = view[:num_bytes]
            into, view = into[num_bytes:], view[num_bytes:]


class InProcListener(Listener):
    """See `Listener`. Made by `InProcTransport`."""

    def __init__(
        self, network: dict[str, InProcListener], name: str, hello: Hello, on_channel: OnChannel
    ) -> None:
        self._network = network
        self._name = name
        self._hello = hello
        self._on_channel = on_channel
        self._channels: list[InProcChannel] = []
        self._handlers: set[asyncio.Task[None]] = set()
        network[name] = self

    def __repr__(self) -> str:
        return f"<InProcListener {self.address}, {len(self._channels)} channels>"

    @property
    def address(self) -> str:
        return f"inproc://{self._name}"

    async def aclose(self) -> None:
        if self._network.get(self._name) is self:
            del self._network[self._name]
        for channel in self._channels:
            channel.abort()
        tasks = self._handlers - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def accept(self, hello: Hello, clock: Callable[[], float]) -> InProcChannel:
        """The dialler's end of a new channel. Raises: PeerMismatch."""
        compare(hello, self._hello)
        near, far = InProcChannel.pair(hello, self._hello, clock)
        self._channels = [c for c in self._channels if c._error is None]
        self._channels.append(far)
        task = asyncio.create_task(self._serve(far))
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        return near

    async def _serve(self, channel: InProcChannel) -> None:
        try:
            await self._on_channel(channel)
        except TransportError as error:
            _log.info("%r ended: %s", channel, error)
            channel.abort()
        except Exception:
            _log.exception("the handler of %r failed", channel)
            channel.abort()


_process: dict[str, InProcListener] = {}
"""Names in use in this process, as ports are in use on a host."""


class InProcTransport(Transport):
    """Channels between tasks of one event loop.

    Args:
        network: names to listen and dial in; those of the process if None.
        clock: monotonic seconds, for link-rate samples.
    """

    def __init__(
        self,
        network: dict[str, InProcListener] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._network = _process if network is None else network
        self._clock = clock

    def __repr__(self) -> str:
        return f"<InProcTransport {sorted(self._network)}>"

    async def listen(self, address: str, hello: Hello, on_channel: OnChannel) -> Listener:
        name = _name(address)
        if name in self._network:
            raise ListenError(f"{address} is taken; choose another name")
        return InProcListener(self._network, name, hello, on_channel)

    async def connect(self, address: str, hello: Hello) -> Channel:
        listener = self._network.get(_name(address))
        if listener is None:
            raise ConnectError(
                f"nobody listens on {address}; names in use: {', '.join(sorted(self._network))}"
            )
        return listener.accept(hello, self._clock)


def _name(address: str) -> str:
    scheme, name = split_scheme(address)
    if scheme != "inproc" or not name:
        raise AddressError(f"address {address!r} is not of the form inproc://name")
    return name
