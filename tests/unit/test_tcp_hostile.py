"""Peers that do not keep the protocol: nothing happens but a closed connection and a count."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from prfaas.errors import ChannelBroken, ConnectError, PeerMismatch
from prfaas.seams.transport import Span, WindowRef
from prfaas.testing.transport import DIALLER, LISTENER, accepting, host_memory
from prfaas.transport.tcp import TcpChannel, TcpConfig, TcpListener, TcpTransport
from prfaas.transport.tcp.incoming import LaneReceiver
from prfaas.transport.windows import WindowTable
from prfaas.wire.frames import (
    Direction,
    Frame,
    FrameDecoder,
    Kind,
    NackReason,
    PutHeader,
    decode_ack,
    decode_nack,
    encode_ack,
    encode_frame,
    encode_join,
    encode_nack,
    encode_put,
)
from prfaas.wire.handshake import Greeting, decode_greeting, encode_greeting

pytestmark = pytest.mark.timeout(30)

ANY = "tcp://127.0.0.1:0"
HELLO = encode_frame(Kind.HELLO, encode_greeting(Greeting(hello=DIALLER, num_connections=1)))


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


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


@pytest.mark.parametrize("where", ["control", "puts", "answers"])
@pytest.mark.parametrize(
    "noise",
    [
        b"x" * 100,
        b"PRFS\x01\x05\x00\x00" + struct.pack("<Q", 2**63) + bytes(60),
        b"PRFS\x01\x06\x00\x00" + struct.pack("<Q", 2**63) + bytes(60),
        encode_ack(12345),
        encode_frame(Kind.HELLO, bytes(50)),
        None,
    ],
    ids=["noise", "long control", "long put", "unasked ack", "second hello", "end"],
)
def test_garbage_on_an_open_channel_breaks_it_alone(where: str, noise: bytes | None) -> None:
    async def main() -> None:
        async with met() as (peer, channel):
            receiving = asyncio.create_task(channel.receive())
            wire: Wire = getattr(peer, where)
            if noise is None:
                wire.close()
            else:
                wire.write(noise.ljust(56, b"\0") if where == "puts" else noise)
            with pytest.raises(ChannelBroken, match="connect again"):
                await receiving
            with pytest.raises(ChannelBroken):
                channel.expose(host_memory(bytearray(1)), [])
            await channel.ended()

    run(main())


def test_frames_before_garbage_are_delivered() -> None:
    async def main() -> None:
        async with met() as (peer, channel):
            peer.control.write(encode_frame(Kind.CONTROL, b"first") + b"x" * 16)
            assert await channel.receive() == b"first"
            with pytest.raises(ChannelBroken, match="starts with"):
                await channel.receive()

    run(main())


def test_refused_puts_are_drained_and_answered_with_the_reason() -> None:
    async def main() -> None:
        async with met() as (peer, channel):
            buffer = bytearray(100)
            window = channel.expose(host_memory(buffer), [Span(10, 50)])
            size = 300_000
            for sequence, (token, offset, num_bytes, reason) in enumerate(
                [
                    (bytes(16), 0, size, NackReason.UNKNOWN_WINDOW),
                    (window.token, 0, 51, NackReason.OUT_OF_BOUNDS),
                    (window.token, 50, 1, NackReason.OUT_OF_BOUNDS),
                    (window.token, 2**64 - 1, size, NackReason.OUT_OF_BOUNDS),
                ]
            ):
                peer.puts.write(put_header(token, offset, num_bytes, sequence) + b"!" * num_bytes)
                answer = await peer.puts.read()
                assert answer
                assert decode_nack(answer.body) == (sequence, reason)
            assert buffer == bytes(100)
            wrong = PutHeader(token=window.token, offset=0, num_bytes=3, sequence=7, checksum=12345)
            peer.puts.write(encode_put(wrong) + b"abc")
            answer = await peer.puts.read()
            assert answer
            assert decode_nack(answer.body) == (7, NackReason.CHECKSUM)
            peer.puts.write(put_header(window.token, 49, 1, 9) + b"z")
            answer = await peer.puts.read()
            assert answer
            assert decode_ack(answer.body) == 9
            assert buffer[59:60] == b"z"

    run(main())


def num_answers(sock: socket.socket) -> int:
    try:
        return len(sock.recv(1 << 16, socket.MSG_DONTWAIT)) // len(encode_nack(0, NackReason(1)))
    except BlockingIOError:
        return 0


def test_answers_are_held_back_while_the_next_put_is_there_but_not_for_ever() -> None:
    near, far = socket.socketpair()
    with near, far:
        puts = [put_header(bytes(16), 0, 10, sequence) + b"0123456789" for sequence in range(23)]
        far.sendall(b"".join(puts[:21]) + puts[21][:-1])
        receiver = LaneReceiver(WindowTable())
        answered = []
        for _ in range(21):
            assert receiver.step(near)
            answered.append(num_answers(far))
        assert answered == [8 if step in (8, 16) else 0 for step in range(21)]
        stepping = threading.Thread(target=receiver.step, args=(near,))
        stepping.start()
        while not (held := num_answers(far)):
            pass
        assert held == 5  # the last put is not complete: the sender hears of the others first
        far.sendall(puts[21][-1:])
        stepping.join()
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            receiver.step(near)
        assert num_answers(far) == 1


def test_withdraw_waits_for_the_put_that_is_being_written() -> None:
    async def main() -> None:
        async with met() as (peer, channel):
            buffer = bytearray(1000)
            window = channel.expose(host_memory(buffer), [Span(0, 1000)])
            header = put_header(window.token, 0, 1000)
            peer.puts.write(header + b"a" * 500)
            while not buffer[0]:
                await asyncio.sleep(0.001)
            withdrawing = [asyncio.create_task(channel.withdraw(window)) for _ in range(2)]
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in withdrawing)
            peer.puts.write(b"b" * 500)
            await asyncio.gather(*withdrawing)
            assert buffer == b"a" * 500 + b"b" * 500
            assert await peer.puts.read() == Frame(Kind.ACK, bytes(8))
            peer.puts.write(header + b"c" * 1000)
            answer = await peer.puts.read()
            assert answer
            assert decode_nack(answer.body) == (0, NackReason.UNKNOWN_WINDOW)
            assert buffer == b"a" * 500 + b"b" * 500

    run(main())


def test_withdraw_breaks_a_channel_whose_put_does_not_go_on() -> None:
    async def main() -> None:
        async with met(TcpConfig(stall_timeout_s=0.03)) as (peer, channel):
            buffer = bytearray(1000)
            window = channel.expose(host_memory(buffer), [Span(0, 1000)])
            peer.puts.write(put_header(window.token, 0, 1000) + b"a" * 500)
            while not buffer[0]:
                await asyncio.sleep(0.001)
            await channel.withdraw(window)
            peer.puts.write(b"b" * 500)
            with pytest.raises(ChannelBroken, match=r"did not finish a put within 0\.03 s"):
                await channel.send(b"")
            await channel.ended()
            assert buffer == b"a" * 500 + bytes(500)

    run(main())


def test_a_cancelled_put_that_does_not_move_breaks_the_channel() -> None:
    async def main() -> None:
        async with met(TcpConfig(stall_timeout_s=0.03)) as (_, channel):
            size = 64 << 20
            memory = host_memory(bytearray(size))
            window = WindowRef(bytes(16), size)
            putting = asyncio.create_task(channel.put(window, 0, memory, [Span(0, size)]))
            await asyncio.sleep(0.02)
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
            with pytest.raises(ChannelBroken, match="given up"):
                await channel.send(b"")
            await channel.ended()

    run(main())


def test_an_inbox_that_nobody_empties_stops_the_peer() -> None:
    async def main() -> None:
        async with met() as (peer, channel):

            async def flood() -> None:
                for _ in range(64):
                    peer.control.write(encode_frame(Kind.CONTROL, bytes(1 << 20)))
                    await peer.control.writer.drain()

            flooding = asyncio.create_task(flood())
            while channel._inbox._num_bytes < 16 << 20:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.02)
            assert channel._inbox._num_bytes < 20 << 20
            assert not flooding.done()
            for _ in range(64):
                assert len(await channel.receive()) == 1 << 20
            await flooding
            assert channel._inbox._num_bytes == 0

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
