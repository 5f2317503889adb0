"""One listening port: a first frame tells a new channel from a lane of one that is being opened."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import weakref
from collections.abc import Callable

import attrs

from prfaas.errors import PeerMismatch, RemoteProtocolError, TransportError
from prfaas.seams.transport import Hello, Listener, OnChannel
from prfaas.transport.tcp.channel import Opened, TcpChannel
from prfaas.transport.tcp.config import TcpConfig
from prfaas.transport.tcp.lanes import Lane
from prfaas.transport.tcp.sockets import read_frame, tune
from prfaas.wire.frames import TOKEN_BYTES, Direction, Frame, Kind, decode_join, encode_frame
from prfaas.wire.handshake import (
    Greeting,
    compare,
    decode_greeting,
    encode_greeting,
    encode_refusal,
)

_log = logging.getLogger(__name__)
_ACCEPT_PAUSE_S = 0.05


@attrs.define(eq=False)
class _Opening:
    """A channel whose lanes are still joining."""

    num_connections: int
    complete: asyncio.Future[None]
    lanes: dict[Direction, list[socket.socket]] = attrs.field(
        factory=lambda: {direction: [] for direction in Direction}
    )

    def close(self) -> None:
        for sockets in self.lanes.values():
            for sock in sockets:
                sock.close()


class TcpListener(Listener):
    """See `Listener`. Made by `TcpTransport`.

    Attributes:
        num_accepted: channels handed to ``on_channel``.
        num_rejected: connections that were closed because they did not shake hands in order.
    """

    def __init__(
        self,
        server: socket.socket,
        address: str,
        hello: Hello,
        on_channel: OnChannel,
        *,
        config: TcpConfig,
        clock: Callable[[], float],
    ) -> None:
        self._server = server
        self._address = address
        self._hello = hello
        self._on_channel = on_channel
        self._config = config
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._openings: dict[bytes, _Opening] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._channels: weakref.WeakSet[TcpChannel] = weakref.WeakSet()
        self.num_accepted = 0
        self.num_rejected = 0
        self._accepting = asyncio.create_task(self._accept())

    def __repr__(self) -> str:
        return (
            f"<TcpListener {self._address}, {len(self._handshakes)} handshakes, "
            f"{self.num_accepted} accepted, {self.num_rejected} rejected>"
        )

    @property
    def address(self) -> str:
        return self._address

    async def aclose(self) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._server.close()
        tasks = (self._handshakes | self._handlers) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        channels = list(self._channels)
        for channel in channels:
            channel.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.ended()

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._server)
            except OSError as error:  # out of descriptors, or the peer is gone already
                _log.warning("cannot accept on %s now: %s", self._address, error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._handshakes) >= self._config.max_handshakes:
                self._reject(sock, "too many handshakes at a time")
                continue
            task = asyncio.create_task(self._shake_hands(sock))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            tune(sock, self._config)
            async with asyncio.timeout(self._config.handshake_timeout_s):
                frame = await read_frame(sock, (Kind.HELLO, Kind.JOIN))
            if frame.kind is Kind.JOIN:
                self._join(sock, frame)
            else:
                await self._open(sock, decode_greeting(frame.body))
        except (OSError, RemoteProtocolError, PeerMismatch) as error:
            self._reject(sock, error)
        except BaseException:
            sock.close()
            raise

    def _reject(self, sock: socket.socket, reason: object) -> None:
        self.num_rejected += 1
        _log.info("closed a connection to %s: %s", self._address, reason)
        sock.close()

    def _join(self, sock: socket.socket, frame: Frame) -> None:
        token, direction = decode_join(frame.body)
        opening = self._openings.get(token)
        if opening is None:
            raise RemoteProtocolError("peer joined a channel that is not being opened")
        sockets = opening.lanes[direction]
        if len(sockets) >= opening.num_connections:
            raise RemoteProtocolError(f"peer joined more than {opening.num_connections} lanes")
        sockets.append(sock)
        joined = all(len(s) == opening.num_connections for s in opening.lanes.values())
        if joined and not opening.complete.done():
            opening.complete.set_result(None)

    async def _open(self, sock: socket.socket, greeting: Greeting) -> None:
        """Answers a HELLO, waits for its lanes, and starts the channel."""
        async with asyncio.timeout(self._config.handshake_timeout_s):
            try:
                compare(self._hello, greeting.hello)
            except PeerMismatch as mismatch:
                refusal = encode_frame(Kind.REFUSE, encode_refusal(mismatch))
                await self._loop.sock_sendall(sock, refusal)
                raise
            num_connections = min(greeting.num_connections, self._config.num_connections)
            if not num_connections:
                raise RemoteProtocolError("peer wants a channel without data connections")
            opening = _Opening(num_connections, self._loop.create_future())
            try:
                rtt_s = await self._gather_lanes(sock, opening)
                reader, writer = await asyncio.open_connection(sock=sock)
            except BaseException:
                opening.close()
                raise
        opened = Opened(
            local=self._hello,
            peer=greeting.hello,
            reader=reader,
            writer=writer,
            outgoing=[Lane(s) for s in opening.lanes[Direction.TO_DIALLER]],
            incoming=[Lane(s) for s in opening.lanes[Direction.TO_LISTENER]],
            rtt_s=rtt_s,
        )
        self._start(TcpChannel(opened, self._config, self._clock))

    async def _gather_lanes(self, sock: socket.socket, opening: _Opening) -> float:
        """Returns a round trip's seconds."""
        token = secrets.token_bytes(TOKEN_BYTES)
        welcome = Greeting(hello=self._hello, num_connections=opening.num_connections, token=token)
        self._openings[token] = opening
        start_s = self._clock()
        try:
            body = encode_greeting(welcome)
            await self._loop.sock_sendall(sock, encode_frame(Kind.WELCOME, body))
            await opening.complete
        finally:
            del self._openings[token]
        rtt_s = (self._clock() - start_s) / 2  # the peer dialled, then joined
        for sockets in opening.lanes.values():
            for lane in sockets:
                await self._loop.sock_sendall(lane, encode_frame(Kind.WELCOME))
        return rtt_s

    def _start(self, channel: TcpChannel) -> None:
        self.num_accepted += 1
        self._channels.add(channel)
        task = asyncio.create_task(self._serve(channel))
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)

    async def _serve(self, channel: TcpChannel) -> None:
        try:
            await self._on_channel(channel)
        except TransportError as error:
            _log.info("%r ended: %s", channel, error)
            channel.abort()
        except Exception:
            _log.exception("the handler of %r failed", channel)
            channel.abort()
