"""The TCP transport beyond the contract: restarts, faults, leaks. Loopback only."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import signal
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

import attrs
import pytest

from prfaas.errors import (
    ChannelBroken,
    ChannelClosed,
    IntegrityError,
    PutRefused,
)
from prfaas.seams.transport import Channel, WindowRef
from prfaas.testing.transport import (
    DIALLER,
    LISTENER,
    Pair,
    Scattered,
    accepting,
    pair,
)
from prfaas.transport.inproc import InProcTransport
from prfaas.transport.tcp import TcpChannel, TcpConfig, TcpTransport
from prfaas.transport.tcp.lanes import Lane
from prfaas.transport.tcp.outgoing import OutgoingPuts
from prfaas.transport.views import SpanViews
from prfaas.wire.busy import BusyMeter
from tcp_kit import ANY, opened, run, until, whole

pytestmark = pytest.mark.timeout(30)


def test_h11_bytes_have_landed_when_a_put_returns() -> None:
    async def main() -> None:
        rng = random.Random(11)
        size = round(2.4 * (1 << 20))
        async with opened() as (near, far):
            for _ in range(200):
                data = rng.randbytes(size)
                target = bytearray(size)
                window = far.expose(*whole(target))
                source, spans = whole(bytearray(data))
                await near.put(window, 0, source, spans)
                assert target == data
                await far.withdraw(window)

    run(main())


class FlippingRelay:
    """Passes connections on to a port, and flips the last byte of what the dialler's lanes send."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self.flip = False

    async def __aenter__(self) -> FlippingRelay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(w.wait_closed() for w in self._writers), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += writer, far_writer
        await asyncio.gather(
            self._pump(reader, far_writer), self._pump(far_reader, writer), return_exceptions=True
        )

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 20):
            if self.flip and len(data) >= 1000:
                data = data[:-1] + bytes([data[-1] ^ 1])
                self.flip = False
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.mark.parametrize("checksum", [True, False])
def test_a_byte_changed_on_the_way_is_found(checksum: bool) -> None:
    async def main() -> None:
        transport = TcpTransport(TcpConfig(checksum=checksum))
        async with accepting(transport, ANY) as (listener, accept):
            port = int(listener.address.rpartition(":")[2])
            async with FlippingRelay(port) as relay:
                near = await transport.connect(relay.address, DIALLER)
                far = await accept()
                data = random.Random(1).randbytes(1000)
                target = bytearray(1000)
                window = far.expose(*whole(target))
                relay.flip = True
                if checksum:
                    with pytest.raises(IntegrityError, match="another checksum"):
                        await near.put(window, 0, *whole(bytearray(data)))
                    await near.put(window, 0, *whole(bytearray(data)))
                    assert target == data
                else:
                    await near.put(window, 0, *whole(bytearray(data)))
                    assert target[:-1] == data[:-1]
                    assert target[-1] == data[-1] ^ 1
                await near.aclose()

    run(main())


def test_a_restart_on_the_same_port_is_noticed() -> None:
    async def main() -> None:
        transport = TcpTransport()
        memory, spans = whole(bytearray(100))
        async with accepting(transport, ANY) as (listener, accept):
            address = listener.address
            old = await transport.connect(address, DIALLER)
            window = (await accept()).expose(memory, spans)
            await old.put(window, 0, memory, spans)
        again = attrs.evolve(LISTENER, epoch=8)
        async with accepting(transport, address, again) as (listener, accept):
            assert listener.address == address
            with pytest.raises(ChannelBroken, match="connect again"):
                await old.put(window, 0, memory, spans)
            new = await transport.connect(address, DIALLER)
            assert new.peer.epoch == 8
            with pytest.raises(PutRefused, match="not opened or has withdrawn"):
                await new.put(window, 0, memory, spans)
            await new.put((await accept()).expose(memory, spans), 0, memory, spans)
            await new.aclose()

    run(main())


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def tcp_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("prfaas-tcp")]


@pytest.mark.parametrize("how", ["aclose", "abort", "peer closes", "listener closes"])
def test_nothing_is_left_behind(how: str) -> None:
    async def main() -> None:
        gc.collect()
        before = num_fds()
        for _ in range(3):
            async with pair(TcpTransport(), ANY) as ends:
                for sender, receiver in ((ends.near, ends.far), (ends.far, ends.near)):
                    source = Scattered(random.Random(1), 3 << 20, bytes(3 << 20))
                    target = Scattered(random.Random(2), 3 << 20)
                    window = receiver.expose(target.memory, target.spans)
                    await sender.put(window, 0, source.memory, source.spans)
                assert len(tcp_threads()) >= 4
                await end(ends)
        await until(lambda: num_fds() == before and not tcp_threads())

    async def end(ends: Pair) -> None:
        assert isinstance(ends.near, TcpChannel)
        if how == "aclose":
            await ends.near.aclose()
            assert f"{0} running" in repr(ends.near._threads)
        elif how == "abort":
            ends.near.abort()
        elif how == "peer closes":
            await ends.far.aclose()
            await ends.near.ended()
        else:
            await ends.listener.aclose()

    run(main())


def test_a_channel_without_puts_has_no_threads() -> None:
    async def main() -> None:
        async with opened() as (near, far):
            await near.send(b"hello")
            await far.receive()
            assert not tcp_threads()

    run(main())


def test_a_handler_that_fails_costs_its_channel_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def on_channel(channel: Any) -> None:
            if await channel.receive() == b"fail":
                raise ValueError("of the handler")
            await channel.send(b"served")
            await channel.receive()

        transport = TcpTransport()
        listener = await transport.listen(ANY, LISTENER, on_channel)
        bad, good = [await transport.connect(listener.address, DIALLER) for _ in range(2)]
        await bad.send(b"fail")
        with pytest.raises(ChannelBroken):
            await bad.receive()
        await good.send(b"work")
        assert await good.receive() == b"served"
        await good.aclose()
        await listener.aclose()

    run(main())
    assert "ValueError: of the handler" in caplog.text


def test_aclose_waits_for_the_threads() -> None:
    async def main() -> None:
        async with opened() as (near, _):
            may_end = threading.Event()
            ours, theirs = socket.socketpair()
            lane = Lane(ours)
            near._threads.start(lane, lambda _: may_end.wait() and False)
            lane.release()
            closing = asyncio.create_task(near.aclose())
            await asyncio.wait([near._reading])
            await asyncio.sleep(0.01)
            assert not closing.done()
            may_end.set()
            await closing
            assert ours.fileno() == -1
            theirs.close()

    run(main())


def test_a_given_up_put_leaves_nothing_in_the_books() -> None:
    async def main() -> None:
        async with opened() as (near, far):
            memory, spans = whole(bytearray(16 << 20))
            window = far.expose(memory, spans)
            far_away = attrs.evolve(window, num_bytes=1 << 40)
            putting = asyncio.create_task(near.put(window, 0, memory, spans))
            await asyncio.sleep(0)
            putting.cancel()
            await asyncio.wait([putting])
            with pytest.raises(PutRefused):
                await near.put(far_away, 1 << 30, memory, spans)
            await near.put(window, 0, memory, spans)
            await until(lambda: not near._outgoing._in_flight)
            assert near._outgoing._meter.outstanding_bytes == 0
            assert not near._outgoing._active
            near._outgoing._meter.check()

    run(main())


@pytest.mark.parametrize("scheme", ["tcp", "inproc"])
def test_a_handler_may_close_its_listener(scheme: str) -> None:
    async def main() -> None:
        over = asyncio.Event()

        async def on_channel(_: Channel) -> None:
            await listener.aclose()
            over.set()

        transport = TcpTransport() if scheme == "tcp" else InProcTransport({})
        listener = await transport.listen(f"{scheme}://localhost:0", LISTENER, on_channel)
        channel = await transport.connect(listener.address, DIALLER)
        with pytest.raises(ChannelBroken):
            await channel.receive()
        await over.wait()
        await asyncio.sleep(0)
        await channel.aclose()

    run(main())


def test_a_slow_lane_does_not_hold_the_others() -> None:
    async def main() -> None:
        async with opened(TcpConfig(num_connections=2)) as (near, far):
            slow = far._incoming._lanes[0]
            asyncio.get_running_loop().remove_reader(slow.sock)
            size = 64 << 20
            target = bytearray(size)
            window = far.expose(*whole(target))
            data = bytearray(random.Random(3).randbytes(1 << 20) * 64)
            putting = asyncio.create_task(near.put(window, 0, *whole(data)))
            await until(lambda: target.count(0) < size // 2)
            assert not putting.done()
            far._incoming._start(slow)
            await putting
            assert target == data

    run(main())


def test_puts_take_turns() -> None:
    async def main() -> None:
        outgoing = OutgoingPuts(
            [],
            threads=None,  # type: ignore[arg-type]
            config=TcpConfig(chunk_bytes=100),
            meter=BusyMeter(base_rtt_s=0.0),
            clock=lambda: 0.0,
            on_failure=lambda _: None,
        )
        sizes = {b"large": 1000, b"small": 150, b"empty": 0}
        for token, size in sizes.items():
            views = SpanViews(*whole(bytearray(size)), writable=False)
            asyncio.create_task(outgoing.put(token, 0, views))  # noqa: RUF006
            await asyncio.sleep(0)
        taken = [outgoing._take() for _ in range(13)]
        order = [chunk.put.token for chunk in taken if chunk]
        assert order[:5] == [b"large", b"small", b"empty", b"large", b"small"]
        assert order[5:] == [b"large"] * 8
        outgoing.close(ChannelClosed("over"))
        await asyncio.sleep(0)

    run(main())


def receive_for_ever(pipe: Connection) -> None:
    """A process that opens a window, and then is at the mercy of signals."""

    async def main() -> None:
        async def on_channel(channel: Any) -> None:
            memory, spans = whole(bytearray(32 << 20))
            await channel.send(channel.expose(memory, spans).token)
            await channel.receive()

        listener = await TcpTransport().listen(ANY, LISTENER, on_channel)
        pipe.send(listener.address)
        await asyncio.Event().wait()

    asyncio.run(main())


def test_a_peer_that_stops_and_dies() -> None:
    async def main() -> None:
        pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=receive_for_ever, args=(theirs,), daemon=True)
        process.start()
        transport = TcpTransport(TcpConfig(stall_timeout_s=0.05))
        address = await asyncio.to_thread(pipe.recv)
        channel = await transport.connect(address, DIALLER)
        window = WindowRef(await channel.receive(), 32 << 20)
        memory, spans = whole(bytearray(32 << 20))
        await channel.put(window, 0, memory, spans)

        assert process.pid
        os.kill(process.pid, signal.SIGSTOP)
        putting = [asyncio.create_task(channel.put(window, 0, memory, spans)) for _ in range(3)]
        receiving = asyncio.create_task(channel.receive())
        await until(lambda: tcp_threads())
        os.kill(process.pid, signal.SIGKILL)
        for task in (*putting, receiving):
            with pytest.raises(ChannelBroken):
                await task
        await asyncio.to_thread(process.join)
        await channel.aclose()
        process.close()
        pipe.close()
        theirs.close()
        assert not tcp_threads()

    run(main())
