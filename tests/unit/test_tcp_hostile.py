"""Peers that do not keep the protocol: nothing happens but a closed connection and a count."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from prfaas.errors import ConnectError, PeerMismatch
from prfaas.testing.transport import DIALLER, LISTENER, accepting
from prfaas.transport.tcp import TcpConfig, TcpListener, TcpTransport
from prfaas.wire.frames import (
    Direction,
    Frame,
    Kind,
    encode_frame,
    encode_join,
)
from prfaas.wire.handshake import Greeting, decode_greeting, encode_greeting
from tcp_kit import ANY, HELLO, Wire, put_header, run

pytestmark = pytest.mark.timeout(30)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def openings(tmp_path: Path) -> dict[str, bytes]:
    rng = random.Random(5)
    return {
        "random bytes": rng.randbytes(100_000),
        "a pickle": pickle.dumps(Bomb(tmp_path / "exploded")),
        "2^63": b"PRFS\x01\x01\x00\x00" + struct.pack("<Q", 2**63),
        "a large hello": b"PRFS\x01\x01\x00\x00" + struct.pack("<Q", (64 << 10) + 1),
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "a hello of nothing": encode_frame(Kind.HELLO),
        "a hello of noise": encode_frame(Kind.HELLO, rng.randbytes(300)),
        "a channel without lanes": encode_frame(
            Kind.HELLO, encode_greeting(Greeting(hello=DIALLER, num_connections=0))
        ),
        "a join of nowhere": encode_join(bytes(16), Direction.TO_LISTENER),
        "control first": encode_frame(Kind.CONTROL, b"hello?"),
        "a put first": put_header(bytes(16), 0, 100) + bytes(100),
        "silence": b"",
        "half a header": b"PRFS\x01",
        "half a hello": HELLO[:-5],
        "a hello and no lanes": HELLO,
    }


def test_a_listener_survives_every_opening(tmp_path: Path) -> None:
    async def main() -> None:
        transport = TcpTransport(TcpConfig(handshake_timeout_s=0.05))
        async with accepting(transport, ANY) as (listener, accept):
            assert isinstance(listener, TcpListener)
            wires = []
            for opening in openings(tmp_path).values():
                wires.append(await Wire.dial(listener.address))
                wires[-1].write(opening)
            for name, wire in zip(openings(tmp_path), wires, strict=True):
                if name == "a hello and no lanes":
                    assert (await wire.read() or Frame(Kind.BYE, b"")).kind is Kind.WELCOME
                assert await wire.read() is None
                wire.close()
            assert listener.num_rejected == len(wires)
            near, far = await transport.connect(listener.address, DIALLER), await accept()
            await near.send(b"still there")
            assert await far.receive() == b"still there"
            assert (listener.num_accepted, listener._openings) == (1, {})
            near.abort()

    run(main())
    assert not list(tmp_path.iterdir())


def test_a_channel_whose_lanes_do_not_all_come_is_let_go() -> None:
    async def main() -> None:
        transport = TcpTransport(TcpConfig(handshake_timeout_s=0.03))
        async with accepting(transport, ANY) as (listener, _):
            control, lane = [await Wire.dial(listener.address) for _ in range(2)]
            control.write(HELLO)
            welcome = await control.read()
            assert welcome
            lane.write(encode_join(decode_greeting(welcome.body).token, Direction.TO_LISTENER))
            assert await control.read() is None
            assert await lane.read() is None
            control.close()
            lane.close()

    run(main())


def test_handshakes_are_bounded() -> None:
    async def main() -> None:
        transport = TcpTransport(TcpConfig(max_handshakes=2))
        async with accepting(transport, ANY) as (listener, _):
            assert isinstance(listener, TcpListener)
            silent = [await Wire.dial(listener.address) for _ in range(3)]
            assert await silent[2].read() is None
            assert "2 handshakes, 0 accepted, 1 rejected" in repr(listener)
            for wire in silent:
                wire.close()

    run(main())


def test_lanes_beyond_the_granted_ones_are_turned_away() -> None:
    async def main() -> None:
        async with accepting(TcpTransport(), ANY) as (listener, _):
            control = await Wire.dial(listener.address)
            control.write(HELLO)
            welcome = await control.read()
            assert welcome
            greeting = decode_greeting(welcome.body)
            assert greeting.num_connections == 1
            lanes = [await Wire.dial(listener.address) for _ in range(3)]
            for lane in lanes[:2]:
                lane.write(encode_join(greeting.token, Direction.TO_LISTENER))
            assert await lanes[1].read() is None
            lanes[2].write(encode_join(greeting.token, Direction.TO_DIALLER))
            assert await lanes[2].read() == Frame(Kind.WELCOME, b"")
            for wire in (control, *lanes):
                wire.close()

    run(main())


@asynccontextmanager
async def impostor(*replies: bytes) -> AsyncIterator[str]:
    """A listener that answers its n-th connection with the n-th reply, and then with silence."""
    pending = list(replies)
    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.read(1 << 16)
        if pending:
            writer.write(pending.pop(0))
            if not pending:
                writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(w.wait_closed() for w in writers), return_exceptions=True)


def welcome_of(**changes: Any) -> bytes:
    fields = {"hello": LISTENER, "num_connections": 2, "token": bytes(16)} | changes
    return encode_frame(Kind.WELCOME, encode_greeting(Greeting(**fields)))


@pytest.mark.parametrize(
    "replies",
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n",),
        (b"",),
        (b"PRFS\x01\x02",),
        (encode_frame(Kind.REFUSE, b"x"),),
        (encode_frame(Kind.WELCOME, b"x"),),
        (welcome_of(num_connections=0),),
        (welcome_of(num_connections=64),),
        (welcome_of(), b"x" * 16),
        (welcome_of(), b"x" * 16, b"x" * 16, b"x" * 16, b"x" * 16),
    ],
    ids=[
        "http",
        "end",
        "half",
        "refusal",
        "welcome",
        "no lanes",
        "many lanes",
        "lane ends",
        "lanes of noise",
    ],
)
def test_an_impostor_cannot_be_connected_to(replies: tuple[bytes, ...]) -> None:
    async def main() -> None:
        async with impostor(*replies) as address:
            with pytest.raises(ConnectError, match="cannot connect"):
                await TcpTransport().connect(address, DIALLER)

    run(main())


def test_a_listener_of_another_model_is_refused_by_the_dialler() -> None:
    async def main() -> None:
        other = attrs.evolve(LISTENER, fingerprint=b"another")
        async with impostor(welcome_of(hello=other)) as address:
            with pytest.raises(PeerMismatch, match="fingerprint"):
                await TcpTransport().connect(address, DIALLER)

    run(main())


def test_silence_ends_an_attempt_to_connect() -> None:
    async def main() -> None:
        async with impostor() as address:
            config = TcpConfig(connect_timeout_s=0.03)
            with pytest.raises(ConnectError, match=r"did not answer within 0\.03 s"):
                await TcpTransport(config).connect(address, DIALLER)

    run(main())
