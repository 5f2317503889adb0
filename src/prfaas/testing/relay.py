"""The link between two clusters: a TCP relay which forwards bytes no faster than a set rate.

The relay knows nothing of what it carries. Every connection over every route shares two lanes, one
for each direction. A lane works like a serial line: it carries one quantum after the other, a
quantum arrives when its last bit would have, and connections with bytes to send take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import struct
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import attrs

SOCKET_BUFFER_BYTES = 256 * 1024  # small, or the kernel would hide megabytes of the link's queue
QUANTUM_S = 0.002  # what one turn may take of the line, so that small frames wait for little
QUANTUM_BYTES = (1024, 64 * 1024)
CATCH_UP_S = 0.02  # time of a busy line that a late wake-up may make up for
TIMER_GRAIN_S = 0.0005  # shorter waits are left to the next turn, which knows what is owed
INTERVAL_S = 0.1
MAX_INTERVALS = 36_000
LISTEN_HOST = "127.0.0.1"

UP, DOWN = 0, 1


@attrs.frozen(kw_only=True)
class Route:
    """Connections to ``listen_port`` (0: any free one) of loopback are carried to the target."""

    target_host: str
    target_port: int
    listen_port: int = 0


@attrs.frozen(kw_only=True)
class RelayConfig:
    """What a relay process needs to start: see ``Relay``."""

    routes: tuple[Route, ...] = attrs.field(converter=tuple)
    rate_bps: float
    delay_s: float = 0.0


class Lane:
    """One direction of the link: bytes pass one quantum at a time, in order of asking."""

    def __init__(self, rate_bps: float) -> None:
        self.rate_bps = rate_bps
        self.num_bytes = 0
        self._free_s = -math.inf
        self._num_waiting = 0

    @property
    def quantum_bytes(self) -> int:
        least, most = QUANTUM_BYTES
        return max(least, min(most, int(self.rate_bps / 8 * QUANTUM_S)))

    async def carry(self, num_bytes: int, *, backlogged: bool) -> None:
        """Return when the last of ``num_bytes`` has arrived at the far end of the line.

        ``backlogged`` says that the caller had these bytes waiting while its last quantum passed:
        then the line was never idle, and time lost to a late wake-up is made up for. An idle line
        saves nothing up, so there is no burst.
        """
        now = asyncio.get_running_loop().time()
        busy = backlogged or self._num_waiting > 0
        start_s = max(self._free_s, now - CATCH_UP_S if busy else now)
        self._free_s = start_s + num_bytes * 8 / self.rate_bps
        wait_s = self._free_s - now
        self._num_waiting += 1
        try:
            await asyncio.sleep(wait_s if wait_s > TIMER_GRAIN_S else 0)
        finally:
            self._num_waiting -= 1
        self.num_bytes += num_bytes


class LinkMeter:
    """Bytes per direction in intervals of ``INTERVAL_S``, with the rate that was set.

    Intervals start at whole multiples of their length on the monotonic clock, which all processes
    of a machine share. The oldest are forgotten after ``MAX_INTERVALS``.
    """

    def __init__(self, rate_bps: float, now: float) -> None:
        self.rate_bps = rate_bps
        self._index = math.floor(now / INTERVAL_S)
        self._num_bytes = [0, 0]
        self._done: deque[tuple[float, int, int, float]] = deque(maxlen=MAX_INTERVALS)

    def add(self, direction: int, num_bytes: int, now: float) -> None:
        self._close_until(now)
        self._num_bytes[direction] += num_bytes

    def set_rate(self, rate_bps: float, now: float) -> None:
        self._close_until(now)
        self.rate_bps = rate_bps

    def series(self, now: float) -> list[tuple[float, int, int, float]]:
        """Complete intervals: (start in monotonic seconds, up bytes, down bytes, rate_bps)."""
        self._close_until(now)
        return list(self._done)

    def _close_until(self, now: float) -> None:
        while self._index < math.floor(now / INTERVAL_S):
            up_bytes, down_bytes = self._num_bytes
            self._done.append((self._index * INTERVAL_S, up_bytes, down_bytes, self.rate_bps))
            self._num_bytes = [0, 0]
            self._index += 1


class Relay:
    """A shaped link in this process: ``async with Relay(routes, 200e6) as relay: relay.ports``.

    Args:
        routes: where to listen and what to connect to.
        rate_bps: bits per second of each direction, shared by all connections.
        delay_s: one-way delay that is added to every byte.
    """

    def __init__(self, routes: Sequence[Route], rate_bps: float, *, delay_s: float = 0.0) -> None:
        if not 0 <= delay_s < math.inf:
            raise ValueError(f"delay_s is {delay_s!r}; it must be a number of at least 0")
        self._routes = tuple(routes)
        self._delay_s = delay_s
        self._lanes = (Lane(_rate(rate_bps)), Lane(_rate(rate_bps)))
        self._listeners: list[socket.socket] = []

    @property
    def ports(self) -> list[int]:
        """The bound port of each route."""
        return [listener.getsockname()[1] for listener in self._listeners]

    def set_rate(self, rate_bps: float) -> None:
        """Change both directions from the next quantum on."""
        for lane in self._lanes:
            lane.rate_bps = _rate(rate_bps)
        self._meter.set_rate(rate_bps, self._loop.time())

    def stats(self) -> dict[str, Any]:
        """Bytes carried so far and the series of ``LinkMeter``."""
        return {
            "rate_bps": self._lanes[UP].rate_bps,
            "up_bytes": self._lanes[UP].num_bytes,
            "down_bytes": self._lanes[DOWN].num_bytes,
            "interval_s": INTERVAL_S,
            "series": self._meter.series(self._loop.time()),
        }

    async def __aenter__(self) -> Relay:
        self._loop = asyncio.get_running_loop()
        self._meter = LinkMeter(self._lanes[UP].rate_bps, self._loop.time())
        try:
            for route in self._routes:
                self._listeners.append(_listen(route.listen_port))
        except OSError:
            self._close_listeners()
            raise
        self._main = asyncio.create_task(self._accept_all())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._main.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._main
        self._close_listeners()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _accept_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for route, listener in zip(self._routes, self._listeners, strict=True):
                group.create_task(self._accept(group, route, listener))

    async def _accept(
        self, group: asyncio.TaskGroup, route: Route, listener: socket.socket
    ) -> None:
        while True:
            dialler, _ = await self._loop.sock_accept(listener)
            group.create_task(self._connect(route, dialler))

    async def _connect(self, route: Route, dialler: socket.socket) -> None:
        """One relayed connection, from accept to close."""
        with dialler, _socket() as target:
            for side in (dialler, target):
                side.setblocking(False)
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _reset_on_close(side, True)
            try:
                await self._loop.sock_connect(target, (route.target_host, route.target_port))
                async with asyncio.TaskGroup() as group:
                    self._flow(group, UP, dialler, target)
                    self._flow(group, DOWN, target, dialler)
                for side in (dialler, target):
                    _reset_on_close(side, False)
            except* OSError:
                pass  # one side is gone: closing resets the other

    def _flow(
        self,
        group: asyncio.TaskGroup,
        direction: int,
        source: socket.socket,
        sink: socket.socket,
    ) -> None:
        lane = self._lanes[direction]
        delayed_bytes = lane.rate_bps / 8 * self._delay_s
        num_chunks = 2 + 2 * math.ceil(delayed_bytes / lane.quantum_bytes)
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(num_chunks)
        group.create_task(self._read(direction, source, chunks))
        group.create_task(self._deliver(chunks, sink))

    async def _read(
        self, direction: int, source: socket.socket, chunks: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        lane = self._lanes[direction]
        backlogged = False
        while True:
            try:
                chunk = source.recv(lane.quantum_bytes)
            except BlockingIOError:
                backlogged = False
                chunk = await self._loop.sock_recv(source, lane.quantum_bytes)
            if chunk:
                await lane.carry(len(chunk), backlogged=backlogged)
                self._meter.add(direction, len(chunk), self._loop.time())
            backlogged = not chunks.full()
            await chunks.put((self._loop.time() + self._delay_s, chunk))
            if not chunk:
                return

    async def _deliver(
        self, chunks: asyncio.Queue[tuple[float, bytes]], sink: socket.socket
    ) -> None:
        while True:
            due_s, chunk = await chunks.get()
            if self._delay_s:
                await asyncio.sleep(due_s - self._loop.time())
            if not chunk:
                sink.shutdown(socket.SHUT_WR)
                return
            await self._loop.sock_sendall(sink, chunk)


def relay_process(conn: Connection, config: RelayConfig) -> None:
    """Target of a spawned process: run a relay until ``("stop",)`` or until the pipe closes.

    The first message over ``conn`` is the list of bound ports. Then ``("rate", bps)`` changes the
    rate, and ``("stats",)`` is answered with the dict of ``Relay.stats``. Ctrl-C is left to the
    parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_obey(conn, config))


async def _obey(conn: Connection, config: RelayConfig) -> None:
    async with Relay(config.routes, config.rate_bps, delay_s=config.delay_s) as relay:
        with contextlib.suppress(EOFError, ConnectionError):  # the parent has gone
            conn.send(relay.ports)
            # In threads: a parent that is slow to read its answer must not stall the link.
            while (command := await asyncio.to_thread(conn.recv)) != ("stop",):
                match command:
                    case ("rate", rate_bps):
                        relay.set_rate(rate_bps)
                    case ("stats",):
                        await asyncio.to_thread(conn.send, relay.stats())
                    case _:
                        raise ValueError(f"command {command!r}; known are rate, stats and stop")


def _rate(rate_bps: float) -> float:
    if not 0 < rate_bps < math.inf:
        raise ValueError(f"rate_bps is {rate_bps!r}; it must be a number above 0")
    return rate_bps


def _socket() -> socket.socket:
    """A TCP socket with small buffers; they must be set before it listens or connects."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    return made


def _listen(port: int) -> socket.socket:
    listener = _socket()
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LISTEN_HOST, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _reset_on_close(side: socket.socket, reset: bool) -> None:
    """Whether ``close`` drops what was not sent and resets the connection."""
    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))
