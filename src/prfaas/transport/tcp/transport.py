"""Listening and dialling."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from prfaas.errors import (
    AddressError,
    ConfigError,
    ConnectError,
    ListenError,
    RemoteProtocolError,
)
from prfaas.seams.transport import Channel, Hello, Listener, OnChannel, Transport
from prfaas.transport.address import Address, is_loopback, parse
from prfaas.transport.tcp.channel import Opened, TcpChannel
from prfaas.transport.tcp.config import TcpConfig
from prfaas.transport.tcp.lanes import Lane
from prfaas.transport.tcp.listener import TcpListener
from prfaas.transport.tcp.sockets import (
    SocketAddress,
    dial,
    read_frame,
    resolve,
    set_congestion,
)
from prfaas.wire.frames import Direction, Kind, encode_frame, encode_join
from prfaas.wire.handshake import (
    Greeting,
    compare,
    decode_greeting,
    decode_refusal,
    encode_greeting,
)

_BACKLOG = 256


class TcpTransport(Transport):
    """Plain TCP: one control connection and several data connections per channel.

    Nothing is encrypted or authenticated, hence only the loopback is listened on unless the
    configuration says otherwise.

    Args:
        config: settings; the defaults suit a long link.
        clock: monotonic seconds, for link-rate samples.
    """

    def __init__(
        self, config: TcpConfig | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config or TcpConfig()
        self._clock = clock

    def __repr__(self) -> str:
        return f"<TcpTransport {self._config!r}>"

    async def listen(self, address: str, hello: Hello, on_channel: OnChannel) -> Listener:
        """See `Transport.listen`.

        Raises: AddressError, ListenError; ConfigError for an address that other hosts can reach,
        unless ``allow_remote`` is set.
        """
        wanted = _parse(address)
        config = self._config
        try:
            family, name = (await resolve(wanted, passive=True))[0]
        except OSError as error:
            raise ListenError(f"cannot listen on {wanted}: {error}; check the host name") from error
        if not config.allow_remote and not is_loopback(name[0]):
            raise ConfigError(
                f"{wanted} can be reached from other hosts, and nothing on the wire is encrypted "
                "or authenticated; listen on 127.0.0.1, or set allow_remote=True if all who can "
                "reach it are trusted"
            )
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.setblocking(False)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            set_congestion(server, config.congestion)  # accepted connections inherit it
            server.bind(name)
            server.listen(_BACKLOG)
        except OSError as error:
            server.close()
            raise ListenError(
                f"cannot listen on {wanted}: {error.strerror or error}; "
                "choose another port, or port 0 for a free one"
            ) from error
        except BaseException:
            server.close()
            raise
        bound = server.getsockname()
        real = Address(wanted.scheme, config.advertise_host or bound[0], bound[1])
        return TcpListener(server, str(real), hello, on_channel, config=config, clock=self._clock)

    async def connect(self, address: str, hello: Hello) -> Channel:
        """See `Transport.connect`. Connections are fresh each time; nothing is pooled."""
        wanted = _parse(address).require_port()
        allowed = self._config.allowed_hosts
        if allowed is not None and wanted.host not in allowed:
            raise AddressError(
                f"address {wanted} names a host that may not be dialled; add it to allowed_hosts"
            )
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                return await _Dialling(wanted, hello, self._config, self._clock).run()
        except TimeoutError as error:
            raise ConnectError(
                f"{wanted} did not answer within {self._config.connect_timeout_s} s; "
                "check the address and the network, or raise connect_timeout_s"
            ) from error
        except (OSError, RemoteProtocolError) as error:
            raise ConnectError(
                f"cannot connect to {wanted}: {error}; check that a prfaas node listens there"
            ) from error


class _Dialling:
    """One attempt to open a channel; closes what it has opened if it fails."""

    def __init__(
        self, address: Address, hello: Hello, config: TcpConfig, clock: Callable[[], float]
    ) -> None:
        self._address = address
        self._hello = hello
        self._config = config
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []

    async def run(self) -> TcpChannel:
        """Raises: OSError, RemoteProtocolError, PeerMismatch."""
        try:
            sock, family = await self._dial_any()
            start_s = self._clock()
            greeting = await self._greet(sock)
            rtt_s = self._clock() - start_s
            lanes = await self._join_all(family, sock.getpeername(), greeting)
            reader, writer = await asyncio.open_connection(sock=sock)
        except BaseException:
            for failed in self._sockets:
                failed.close()
            raise
        opened = Opened(
            local=self._hello,
            peer=greeting.hello,
            reader=reader,
            writer=writer,
            outgoing=[Lane(lane) for lane in lanes[Direction.TO_LISTENER]],
            incoming=[Lane(lane) for lane in lanes[Direction.TO_DIALLER]],
            rtt_s=rtt_s,
        )
        return TcpChannel(opened, self._config, self._clock)

    async def _dial_any(self) -> tuple[socket.socket, int]:
        """Tries the meanings of the host name in turn."""
        failure: OSError | None = None
        for family, name in await resolve(self._address, passive=False):
            try:
                sock = await dial(family, name, self._config)
            except OSError as error:
                failure = error
                continue
            self._sockets.append(sock)
            return sock, family
        raise failure or OSError("the host name has no address")

    async def _greet(self, sock: socket.socket) -> Greeting:
        wish = Greeting(hello=self._hello, num_connections=self._config.num_connections)
        await self._loop.sock_sendall(sock, encode_frame(Kind.HELLO, encode_greeting(wish)))
        frame = await read_frame(sock, (Kind.WELCOME, Kind.REFUSE))
        if frame.kind is Kind.REFUSE:
            raise decode_refusal(frame.body)
        greeting = decode_greeting(frame.body)
        compare(self._hello, greeting.hello)
        if not 1 <= greeting.num_connections <= self._config.num_connections:
            raise RemoteProtocolError(
                f"peer grants {greeting.num_connections} data connections; "
                f"we asked for {self._config.num_connections}"
            )
        return greeting

    async def _join_all(
        self, family: int, name: SocketAddress, greeting: Greeting
    ) -> dict[Direction, list[socket.socket]]:
        wanted = [d for d in Direction for _ in range(greeting.num_connections)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._join(family, name, greeting.token, direction))
                    for direction in wanted
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others say the same
        lanes: dict[Direction, list[socket.socket]] = {direction: [] for direction in Direction}
        for direction, task in zip(wanted, tasks, strict=True):
            lanes[direction].append(task.result())
        return lanes

    async def _join(
        self, family: int, name: SocketAddress, token: bytes, direction: Direction
    ) -> socket.socket:
        sock = await dial(family, name, self._config)
        self._sockets.append(sock)
        set_congestion(sock, self._config.congestion)
        await self._loop.sock_sendall(sock, encode_join(token, direction))
        await read_frame(sock, (Kind.WELCOME,))
        return sock


def _parse(address: str) -> Address:
    parsed = parse(address)
    if parsed.scheme != "tcp":
        raise AddressError(
            f"address {address!r} is not for the tcp transport; write tcp://host:port"
        )
    return parsed
