"""An open channel against a peer that sends and answers what and when it likes."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest

from prfaas.errors import ChannelBroken
from prfaas.seams.transport import Span, WindowRef
from prfaas.testing.transport import host_memory
from prfaas.transport.tcp import TcpConfig
from prfaas.transport.tcp.incoming import LaneReceiver
from prfaas.transport.windows import WindowTable
from prfaas.wire.frames import (
    Frame,
    Kind,
    NackReason,
    PutHeader,
    decode_ack,
    decode_nack,
    encode_ack,
    encode_frame,
    encode_nack,
    encode_put,
)
from tcp_kit import Wire, met, put_header, run

pytestmark = pytest.mark.timeout(30)


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
