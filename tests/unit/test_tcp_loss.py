"""Packets that were lost and sent again, as the socket counts them."""

from __future__ import annotations

import socket
import struct

import pytest

from prfaas.transport.tcp import sockets
from prfaas.transport.tcp.sockets import num_segments
from tcp_kit import opened, run, whole

pytestmark = pytest.mark.timeout(30)


class Counting:
    """A socket whose counters a test sets."""

    def __init__(self, sent: int, again: int, num_bytes: int = 232) -> None:
        info = bytearray(b"\xff" * num_bytes)
        if num_bytes >= 160:
            struct.pack_into("=I", info, 100, again)
            struct.pack_into("=I", info, 156, sent)
        self.info = bytes(info)

    def getsockopt(self, level: int, option: int, num_bytes: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self.info[:num_bytes]


def test_segments_are_counted_while_the_socket_lives() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        assert num_segments(near) == (0, 0)
        for _ in range(5):
            near.sendall(b"x" * 1000)
            assert len(far.recv(1000, socket.MSG_WAITALL)) == 1000
        sent, again = num_segments(near)
        assert sent - again >= 5
        near.close()
        far.close()
        assert num_segments(near) == (0, 0)


def test_where_the_counters_are_in_the_kernels_answer() -> None:
    assert num_segments(Counting(1000, 7)) == (1000, 7)  # type: ignore[arg-type]
    assert num_segments(Counting(1000, 7, num_bytes=104)) == (0, 0)  # type: ignore[arg-type]


def test_a_system_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sockets.socket, "TCP_INFO")
    with socket.socket() as sock:
        assert num_segments(sock) == (0, 0)


def test_a_channel_tells_what_it_sent_since_the_last_time() -> None:
    async def main() -> None:
        async with opened() as (near, far):
            assert near.take_resent()[0] == 0
            window = far.expose(*whole(bytearray(1 << 20)))
            await near.put(window, 0, *whole(bytearray(1 << 20)))
            sent, again = near.take_resent()
            assert sent > 0
            assert 0 <= again <= sent
            assert near.take_resent() == (0, 0)
            near.abort()
            assert near.take_resent() == (0, 0)

    run(main())
