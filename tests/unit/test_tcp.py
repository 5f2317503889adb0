"""The TCP transport beyond the contract: addresses, restarts, faults, leaks. Loopback only."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import signal
import socket
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import pytest

from prfaas.errors import (
    AddressError,
    ChannelBroken,
    ChannelClosed,
    ConfigError,
    ConnectError,
    IntegrityError,
    ListenError,
    PutRefused,
)
from prfaas.seams.transport import Memory, Span, WindowRef
from prfaas.testing.transport import (
    DIALLER,
    LISTENER,
    Pair,
    Scattered,
    accepting,
    check_transport,
    host_memory,
    pair,
)
from prfaas.transport.tcp import TcpChannel, TcpConfig, TcpTransport
from prfaas.transport.tcp.lanes import Lane
from prfaas.transport.tcp.outgoing import OutgoingPuts
from prfaas.transport.views import SpanViews
from prfaas.wire.busy import BusyMeter

pytestmark = pytest.mark.timeout(30)

ANY = "tcp://127.0.0.1:0"


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


def test_bytes_have_landed_when_a_put_returns() -> None:
    async def main() -> None:
        rng = random.Random(11)
        size = round(2.4 * (1 << 20))
        async with opened() as (near, far):
            for _ in range(60):
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


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="the host has no IPv6 loopback")
@pytest.mark.parametrize("address", ["[::1]:0", "::1"])
def test_ipv6(address: str) -> None:
    async def main() -> None:
        async with accepting(TcpTransport(), address) as (listener, _):
            assert listener.address.startswith("tcp://[::1]:")
        await check_transport(TcpTransport(), address)

    run(main())


def test_localhost() -> None:
    async def main() -> None:
        async with accepting(TcpTransport(), "localhost:0") as (listener, _):
            port = listener.address.rpartition(":")[2]
            (await TcpTransport().connect(f"localhost:{port}", DIALLER)).abort()

    run(main())


def test_a_taken_port_is_named() -> None:
    async def main() -> None:
        async with accepting(TcpTransport(), ANY) as (listener, _):
            with pytest.raises(ListenError, match=f"{listener.address}: .*another port"):
                await TcpTransport().listen(listener.address, LISTENER, lambda _: asyncio.sleep(0))

    run(main())


@pytest.mark.parametrize("address", ["0.0.0.0:0", "tcp://[::]:0"])
def test_other_hosts_are_let_in_only_if_asked_for(address: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="allow_remote=True"):
            await TcpTransport().listen(address, LISTENER, lambda _: asyncio.sleep(0))
        config = TcpConfig(allow_remote=True, advertise_host="node-7")
        async with accepting(TcpTransport(config), address) as (listener, _):
            assert listener.address.startswith("tcp://node-7:")

    run(main())


def test_hosts_outside_the_allow_list_are_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with accepting(TcpTransport(), ANY) as (listener, _):
            allowed = TcpConfig(allowed_hosts=frozenset({"127.0.0.1"}))
            (await TcpTransport(allowed).connect(listener.address, DIALLER)).abort()
            monkeypatch.setattr(socket, "socket", None)
            with pytest.raises(AddressError, match="allowed_hosts"):
                await TcpTransport(allowed).connect("tcp://169.254.169.254:80", DIALLER)
            monkeypatch.undo()

    run(main())


@pytest.mark.parametrize("address", ["inproc://a", "tcp://localhost:0", "localhost"])
def test_addresses_that_cannot_be_dialled(address: str) -> None:
    with pytest.raises(AddressError):
        run(TcpTransport().connect(address, DIALLER))


def test_unresolvable_hosts() -> None:
    async def main() -> None:
        with pytest.raises(ConnectError, match="cannot connect"):
            await TcpTransport().connect("no-such-host.invalid:1", DIALLER)
        with pytest.raises(ListenError, match="check the host name"):
            await TcpTransport().listen("no-such-host.invalid:1", LISTENER, lambda _: _)

    run(main())


def test_congestion_control_is_set_or_refused() -> None:
    names = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()

    async def main() -> None:
        config = TcpConfig(congestion=names[0])
        async with opened(config) as (near, far):
            for channel in (near, far):
                lane = channel._outgoing._lanes[0].sock
                name = lane.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert name.rstrip(b"\0").decode() == names[0]
        wrong = TcpTransport(TcpConfig(congestion="no-such"))
        with pytest.raises(ConfigError, match="'no-such' cannot be set"):
            await wrong.listen(ANY, LISTENER, lambda _: asyncio.sleep(0))
        async with accepting(TcpTransport(), ANY) as (listener, _):
            with pytest.raises(ConfigError, match="'no-such' cannot be set"):
                await wrong.connect(listener.address, DIALLER)

    run(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_connections": 0},
        {"num_connections": 65},
        {"chunk_bytes": 0},
        {"chunk_bytes": (16 << 20) + 1},
        {"stall_timeout_s": 0},
        {"connect_timeout_s": -1},
        {"max_handshakes": 0},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TcpConfig(**wrong)


def test_the_smaller_wish_for_connections_holds() -> None:
    async def main() -> None:
        async with accepting(TcpTransport(TcpConfig(num_connections=2)), ANY) as (listener, accept):
            for wish, granted in ((1, 1), (2, 2), (5, 2)):
                transport = TcpTransport(TcpConfig(num_connections=wish))
                near, far = await transport.connect(listener.address, DIALLER), await accept()
                for channel in (near, far):
                    assert isinstance(channel, TcpChannel)
                    assert f"{granted} lanes" in repr(channel)
                near.abort()

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
