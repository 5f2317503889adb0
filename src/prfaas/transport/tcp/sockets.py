"""Sockets: options, exact reads, gathering sends, and dialling."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import cast

from prfaas.errors import ConfigError
from prfaas.transport.address import Address
from prfaas.transport.tcp.config import TcpConfig
from prfaas.transport.views import MAX_IOVECS, advance
from prfaas.wire.frames import HEADER_BYTES, MAX_HANDSHAKE_BYTES, Frame, Kind, decode_header

SocketAddress = tuple[str, int] | tuple[str, int, int, int]

_DRAIN_BYTES = 64 << 10
_INT = struct.Struct("i")
_NUM_PROBES = 3
_U32 = struct.Struct("=I")
_TOTAL_RETRANS_AT = 100  # struct tcp_info of linux/tcp.h: tcpi_total_retrans
_DATA_SEGS_OUT_AT = 156  # and tcpi_data_segs_out
_TCP_INFO_BYTES = 160


def tune(sock: socket.socket, config: TcpConfig) -> None:
    """No delay, and notice of a host that has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = max(1, round(config.dead_peer_timeout_s / (_NUM_PROBES + 1)))
    for option, value in (
        ("TCP_KEEPIDLE", every_s),
        ("TCP_KEEPINTVL", every_s),
        ("TCP_KEEPCNT", _NUM_PROBES),
        ("TCP_USER_TIMEOUT", round(config.dead_peer_timeout_s * 1000)),
    ):
        code = getattr(socket, option, None)  # not every system has all of them
        if code is not None:
            sock.setsockopt(socket.IPPROTO_TCP, code, value)


def set_congestion(sock: socket.socket, name: str | None) -> None:
    """Raises: ConfigError if the system does not let us."""
    if name is None:
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except (AttributeError, OSError) as error:
        raise ConfigError(
            f"congestion control {name!r} cannot be set ({error}); load its module and add it to "
            "net.ipv4.tcp_allowed_congestion_control, or leave congestion at None"
        ) from error


async def resolve(address: Address, *, passive: bool) -> list[tuple[int, SocketAddress]]:
    """Address family and socket address of every meaning of a host name. Raises: OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        address.host,
        address.port,
        type=socket.SOCK_STREAM,
        flags=socket.AI_PASSIVE if passive else 0,
    )
    return [(family, cast("SocketAddress", name)) for family, _, _, _, name in found]


async def dial(family: int, name: SocketAddress, config: TcpConfig) -> socket.socket:
    """A connected, non-blocking socket. Raises: OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        tune(sock, config)
        await asyncio.get_running_loop().sock_connect(sock, name)
    except BaseException:
        sock.close()
        raise
    return sock


async def read_frame(sock: socket.socket, accept: Collection[Kind]) -> Frame:
    """One frame of a handshake and not a byte more. Raises: OSError, RemoteProtocolError."""
    header = await _read(sock, HEADER_BYTES)
    kind, num_bytes = decode_header(header, accept, MAX_HANDSHAKE_BYTES)
    return Frame(kind, bytes(await _read(sock, num_bytes)))


async def _read(sock: socket.socket, num_bytes: int) -> bytearray:
    loop = asyncio.get_running_loop()
    data = bytearray(num_bytes)
    view, got = memoryview(data), 0
    while got < num_bytes:
        count = await loop.sock_recv_into(sock, view[got:])
        if not count:
            raise ConnectionResetError("peer closed the connection during the handshake")
        got += count
    return data


def send_views(sock: socket.socket, views: Sequence[memoryview | bytes], num_bytes: int) -> None:
    """Sends at most `MAX_IOVECS` views as one gather, blocking. Raises: OSError."""
    sent = sock.sendmsg(views)
    while sent < num_bytes:
        views = advance([memoryview(view) for view in views], sent)
        num_bytes -= sent
        sent = sock.sendmsg(views)


def receive_views(sock: socket.socket, views: list[memoryview], num_bytes: int) -> None:
    """Fills ``views`` in order, blocking. Raises: OSError, also at the end of the stream."""
    while num_bytes:
        got = sock.recvmsg_into(views[:MAX_IOVECS], 0, socket.MSG_WAITALL)[0]
        if not got:
            raise ConnectionResetError("peer closed the connection inside a put")
        num_bytes -= got
        if num_bytes:
            views = advance(views, got)


def drain(sock: socket.socket, num_bytes: int) -> None:
    """Reads and forgets ``num_bytes``, blocking. Raises: OSError, also at the end of the stream."""
    scratch = memoryview(bytearray(min(num_bytes, _DRAIN_BYTES)))
    while num_bytes:
        got = sock.recv_into(scratch[: min(num_bytes, len(scratch))])
        if not got:
            raise ConnectionResetError("peer closed the connection inside a put")
        num_bytes -= got


def num_readable(sock: socket.socket) -> int:
    """Bytes that have arrived and can be read without waiting. Raises: OSError."""
    (num_bytes,) = _INT.unpack(fcntl.ioctl(sock, termios.FIONREAD, bytes(_INT.size)))
    return int(num_bytes)


def num_segments(sock: socket.socket) -> tuple[int, int]:
    """Segments with payload that were ever sent, and those of them that were sent again; zeros for
    a socket that has ended and on systems that do not count."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except (AttributeError, OSError):
        return 0, 0
    if len(info) < _TCP_INFO_BYTES:
        return 0, 0
    (again,) = _U32.unpack_from(info, _TOTAL_RETRANS_AT)
    (sent,) = _U32.unpack_from(info, _DATA_SEGS_OUT_AT)
    return int(sent), int(again)


def hang_up(sock: socket.socket) -> None:
    """Ends both directions, which wakes every thread that is blocked in the socket."""
    with suppress(OSError):  # already ended by the peer
        sock.shutdown(socket.SHUT_RDWR)
