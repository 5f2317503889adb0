"""The receiving side of puts: payloads go from the socket straight into the window."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from prfaas.transport.tcp.lanes import Lane, LaneThreads
from prfaas.transport.tcp.sockets import drain, num_readable, receive_views
from prfaas.transport.views import checksum
from prfaas.transport.windows import WindowTable
from prfaas.wire.frames import (
    PUT_HEADER_BYTES,
    NackReason,
    PutHeader,
    decode_put,
    encode_ack,
    encode_nack,
)

_MAX_HELD_ANSWERS = 8


class IncomingPuts:
    """Receives puts on the lanes of one channel. A lane gets its thread with its first byte.

    Args:
        lanes: connected, in the hands of this object until `close`.
        threads: where they run; also reports failures.
        windows: where bytes may land.
    """

    def __init__(self, lanes: Sequence[Lane], threads: LaneThreads, windows: WindowTable) -> None:
        self._loop = asyncio.get_running_loop()
        self._lanes = lanes
        self._threads = threads
        self._windows = windows
        self._closed = False
        for lane in lanes:
            self._loop.add_reader(lane.sock, self._start, lane)

    def __repr__(self) -> str:
        return f"<IncomingPuts {len(self._lanes)} lanes, {self._windows!r}>"

    def close(self) -> None:
        """Lets go of the lanes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes:
            self._loop.remove_reader(lane.sock)
            lane.hang_up()
            lane.release()

    def _start(self, lane: Lane) -> None:
        self._loop.remove_reader(lane.sock)
        self._threads.start(lane, LaneReceiver(self._windows).step)


class LaneReceiver:
    """Lands the puts of one lane, one after the other; runs in the lane's thread.

    An answer is held back only while the next put has arrived already and waits to be landed, and
    for 8 puts at most: a sender that is ahead of us does not gain from every single answer, and
    pays for each. Where the link is the slower part, every answer goes out at once, since the
    sender measures the link by them.
    """

    def __init__(self, windows: WindowTable) -> None:
        self._windows = windows
        self._header = bytearray(PUT_HEADER_BYTES)
        self._answers: list[bytes] = []

    def step(self, sock: socket.socket) -> bool:
        """Receives one put. Raises: OSError, RemoteProtocolError."""
        put = self._next_put(sock)
        reason = self._land(sock, put)
        answer = encode_ack(put.sequence) if reason is None else encode_nack(put.sequence, reason)
        self._answers.append(answer)
        return True

    def _next_put(self, sock: socket.socket) -> PutHeader:
        header, got = memoryview(self._header), 0
        if self._answers:
            try:
                got = sock.recv_into(header, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                got = 0
        if got < PUT_HEADER_BYTES:
            self._send_answers(sock)
        while got < PUT_HEADER_BYTES:
            count = sock.recv_into(header[got:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("peer closed a data connection")
            got += count
        put = decode_put(self._header)
        if len(self._answers) >= _MAX_HELD_ANSWERS or num_readable(sock) < put.num_bytes:
            self._send_answers(sock)
        return put

    def _send_answers(self, sock: socket.socket) -> None:
        if self._answers:
            sock.sendall(b"".join(self._answers))
            self._answers.clear()

    def _land(self, sock: socket.socket, put: PutHeader) -> NackReason | None:
        found = self._windows.begin(put.token, put.offset, put.num_bytes)
        if isinstance(found, NackReason):
            drain(sock, put.num_bytes)
            return found
        window, views = found
        landed_bytes = 0
        try:
            receive_views(sock, views, put.num_bytes)
            if put.checksum is not None and checksum(views) != put.checksum:
                return NackReason.CHECKSUM
            landed_bytes = put.num_bytes
        finally:
            self._windows.finish(put.token, window, landed_bytes=landed_bytes)
        return None
