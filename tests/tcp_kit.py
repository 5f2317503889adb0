"""Open TCP channels, and a TCP peer whose every byte the test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from prfaas.seams.transport import Memory, Span
from prfaas.testing.transport import DIALLER, accepting, host_memory, pair
from prfaas.transport.tcp import TcpChannel, TcpConfig, TcpTransport
from prfaas.wire.frames import (
    Direction,
    Frame,
    FrameDecoder,
    Kind,
    PutHeader,
    encode_frame,
    encode_join,
    encode_put,
)
from prfaas.wire.handshake import Greeting, decode_greeting, encode_greeting

ANY = "tcp://127.0.0.1:0"
HELLO = encode_frame(Kind.HELLO, encode_greeting(Greeting(hello=DIALLER, num_connections=1)))


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def whole(buffer: bytearray) -> tuple[Memory, list[Span]]:
    return host_memory(buffer), [Span(0, len(buffer))]


@asynccontextmanager
async def opened(
    config: TcpConfig | None = None, address: str = ANY
) -> AsyncIterator[tuple[TcpChannel, TcpChannel]]:
    async with pair(TcpTransport(config), address) as ends:
        assert isinstance(ends.near, TcpChannel)
        assert isinstance(ends.far, TcpChannel)
        yield ends.near, ends.far


async def until(condition: Any) -> None:
    """Waits for something that other threads bring about."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


class Wire:
    """A connection that speaks in frames, or in anything else."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._decoder = FrameDecoder([kind for kind in Kind if kind is not Kind.PUT])
        self._frames: list[Frame] = []
        self.writer = writer

    @classmethod
    async def dial(cls, address: str) -> Wire:
        port = int(address.rpartition(":")[2])
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def read(self) -> Frame | None:
        """Next frame; None at the end."""
        while not self._frames:
            try:
                data = await self._reader.read(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def close(self) -> None:
        self.writer.close()


class RawPeer:
    """A dialler with one lane per direction whose every byte the test chooses."""

    control: Wire
    puts: Wire  # ours, to the listener
    answers: Wire  # the listener's puts, to us

    @classmethod
    async def connect(cls, address: str) -> RawPeer:
        self = cls()
        self.control = await Wire.dial(address)
        self.control.write(HELLO)
        welcome = await self.control.read()
        assert welcome is not None
        token = decode_greeting(welcome.body).token
        self.puts, self.answers = await Wire.dial(address), await Wire.dial(address)
        self.puts.write(encode_join(token, Direction.TO_LISTENER))
        self.answers.write(encode_join(token, Direction.TO_DIALLER))
        for lane in (self.puts, self.answers):
            assert await lane.read() == Frame(Kind.WELCOME, b"")
        return self

    def close(self) -> None:
        for wire in (self.control, self.puts, self.answers):
            wire.close()


@asynccontextmanager
async def met(config: TcpConfig | None = None) -> AsyncIterator[tuple[RawPeer, TcpChannel]]:
    """A raw peer and the listener's end of its channel."""
    async with accepting(TcpTransport(config), ANY) as (listener, accept):
        peer = await RawPeer.connect(listener.address)
        channel = await accept()
        assert isinstance(channel, TcpChannel)
        try:
            yield peer, channel
        finally:
            peer.close()


def put_header(token: bytes, offset: int, num_bytes: int, sequence: int = 0) -> bytes:
    return encode_put(
        PutHeader(token=token, offset=offset, num_bytes=num_bytes, sequence=sequence, checksum=None)
    )
