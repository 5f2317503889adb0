"""The link-shaping relay of the demo, on loopback with plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from prfaas.testing.relay import (
    INTERVAL_S,
    LinkMeter,
    Relay,
    Route,
)

MBIT = 1e6


class Flood:
    """Keeps a connection busy from one socket to the other and counts what arrives."""

    def __init__(self, source: socket.socket, sink: socket.socket, write_bytes: int) -> None:
        self.num_bytes = 0
        self._tasks = [
            asyncio.create_task(self._send(source, bytes(write_bytes))),
            asyncio.create_task(self._receive(sink)),
        ]

    async def _send(self, source: socket.socket, chunk: bytes) -> None:
        while True:
            await asyncio.get_running_loop().sock_sendall(source, chunk)

    async def _receive(self, sink: socket.socket) -> None:
        while chunk := await asyncio.get_running_loop().sock_recv(sink, 1 << 18):
            self.num_bytes += len(chunk)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Pairs:
    """Connections through a relay, from a dialler to the target that a listener accepts."""

    def __init__(self, port: int, listener: socket.socket) -> None:
        self._port, self._listener = port, listener
        self._sockets: list[socket.socket] = []
        self._floods: list[Flood] = []

    async def open(self, buffer_bytes: int | None = None) -> tuple[socket.socket, socket.socket]:
        loop = asyncio.get_running_loop()
        dialler = socket.socket()
        self._sockets.append(dialler)
        dialler.setblocking(False)
        dialler.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if buffer_bytes:
            dialler.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            dialler.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        await loop.sock_connect(dialler, ("127.0.0.1", self._port))
        target, _ = await loop.sock_accept(self._listener)
        target.setblocking(False)
        self._sockets.append(target)
        return dialler, target

    async def flood(
        self, source: socket.socket, sink: socket.socket, write_bytes: int = 1 << 16
    ) -> Flood:
        """A flood that runs at full speed already."""
        flood = Flood(source, sink, write_bytes)
        self._floods.append(flood)
        for _ in range(1000):
            if flood.num_bytes >= 100_000:
                return flood
            await asyncio.sleep(0.005)
        raise AssertionError("a connection stands still")

    async def close(self) -> None:
        for flood in self._floods:
            await flood.stop()
        for side in self._sockets:
            side.close()


@contextlib.asynccontextmanager
async def shaped(
    rate_bps: float, *, delay_s: float = 0.0, receive_buffer_bytes: int | None = None
) -> AsyncIterator[tuple[Relay, Pairs]]:
    """A relay of one route to a listener, and the pairs opened through it."""
    with socket.socket() as listener:
        if receive_buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        route = Route(target_host="127.0.0.1", target_port=listener.getsockname()[1])
        async with Relay([route], rate_bps, delay_s=delay_s) as relay:
            pairs = Pairs(relay.ports[0], listener)
            try:
                yield relay, pairs
            finally:
                await pairs.close()


async def window(floods: list[Flood], seconds: float) -> tuple[list[int], float]:
    """Bytes that each flood received during about ``seconds``, and the exact time."""
    start_s = time.monotonic()
    before = [flood.num_bytes for flood in floods]
    for _ in range(round(seconds / 0.02)):
        await asyncio.sleep(0.02)
    counts = [flood.num_bytes - had for flood, had in zip(floods, before, strict=True)]
    return counts, time.monotonic() - start_s


async def rate_within(floods: list[Flood], rate_bps: float, seconds: float) -> bool:
    """Whether one of a few windows is within 5 % of the rate (busy machines), none far above."""
    for _ in range(3):
        counts, elapsed_s = await window(floods, seconds)
        share = sum(counts) * 8 / elapsed_s / rate_bps
        assert share < 1.15
        if 0.95 < share < 1.05:
            return True
    return False


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


@pytest.mark.parametrize(
    ("rate_mbps", "num_connections", "direction"),
    [(100, 1, "up"), (100, 4, "down"), (200, 1, "down"), (200, 4, "up")],
)
def test_connections_together_get_the_rate(
    rate_mbps: int, num_connections: int, direction: str
) -> None:
    async def scenario() -> None:
        async with shaped(rate_mbps * MBIT) as (relay, pairs):
            opened = [await pairs.open() for _ in range(num_connections)]
            ends = opened if direction == "up" else [(b, a) for a, b in opened]
            floods = [await pairs.flood(*pair) for pair in ends]
            assert await rate_within(floods, rate_mbps * MBIT, 0.7)
            stats = relay.stats()
        other = "down" if direction == "up" else "up"
        assert stats[f"{other}_bytes"] == 0
        assert stats[f"{direction}_bytes"] > rate_mbps * MBIT / 8 * 0.6

    run(scenario())


def test_the_two_directions_do_not_share_a_rate() -> None:
    async def scenario() -> None:
        async with shaped(100 * MBIT) as (_, pairs):
            a, b = await pairs.open()
            floods = [await pairs.flood(a, b), await pairs.flood(b, a)]
            assert await rate_within(floods, 200 * MBIT, 0.3)

    run(scenario())


def test_a_delay_costs_no_rate() -> None:
    async def scenario() -> None:
        async with shaped(100 * MBIT, delay_s=0.03) as (_, pairs):
            a, b = await pairs.open()
            start_s = time.monotonic()
            a.send(b"x")
            assert await asyncio.get_running_loop().sock_recv(b, 1) == b"x"
            assert time.monotonic() - start_s >= 0.03
            flood = await pairs.flood(a, b)
            assert await rate_within([flood], 100 * MBIT, 0.3)

    run(scenario())


def test_busy_connections_get_equal_shares() -> None:
    async def scenario() -> None:
        async with shaped(100 * MBIT) as (_, pairs):
            writes = [1 << 20, 1 << 16, 1 << 16, 1 << 14]
            floods = [await pairs.flood(*await pairs.open(), write) for write in writes]
            counts, _ = await window(floods, 0.5)
        mean = sum(counts) / len(counts)
        assert all(abs(count - mean) < 0.15 * mean for count in counts), counts

    run(scenario())


def test_a_small_frame_waits_for_a_few_turns_only() -> None:
    async def scenario() -> None:
        async with shaped(20 * MBIT) as (relay, pairs):
            a, b = await pairs.open()
            for _ in range(4):
                await pairs.flood(*await pairs.open())
            passed = []
            for _ in range(5):
                before = relay.stats()["up_bytes"]
                a.send(bytes(100))
                await asyncio.get_running_loop().sock_recv(b, 100)
                passed.append(relay.stats()["up_bytes"] - before)
            assert min(passed) <= 20e6 / 8 * 0.018, "at most 18 ms of the line, on a free machine"

    run(scenario())


def test_an_idle_line_saves_nothing_up() -> None:
    async def scenario() -> None:
        async with shaped(20 * MBIT) as (_, pairs):
            a, b = await pairs.open()
            for _ in range(3):
                await asyncio.sleep(0.04)
                start_s, num_bytes = time.monotonic(), 0
                a.send(bytes(50_000))
                while num_bytes < 50_000:
                    num_bytes += len(await asyncio.get_running_loop().sock_recv(b, 1 << 16))
                assert time.monotonic() - start_s >= 0.98 * 50_000 * 8 / (20 * MBIT)

    run(scenario())


def test_the_rate_changes_in_mid_run() -> None:
    async def scenario() -> None:
        async with shaped(50 * MBIT) as (relay, pairs):
            flood = await pairs.flood(*await pairs.open())
            assert await rate_within([flood], 50 * MBIT, 0.3)
            relay.set_rate(150 * MBIT)
            assert await rate_within([flood], 150 * MBIT, 0.3)
            stats = relay.stats()
        assert stats["rate_bps"] == 150 * MBIT
        assert {rate_bps for *_, rate_bps in stats["series"]} == {50 * MBIT, 150 * MBIT}

    run(scenario())


def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    async def scenario() -> None:
        async with shaped(1e10, receive_buffer_bytes=1 << 16) as (relay, pairs):
            a, b = await pairs.open(buffer_bytes=1 << 16)
            other_a, other_b = await pairs.open()
            sent, stalls = 0, 0
            while stalls < 5:
                try:
                    sent += a.send(bytes(1 << 16))
                    stalls = 0
                except BlockingIOError:
                    stalls += 1
                    await asyncio.sleep(0.02)
                assert sent < 4 << 20
            other_a.send(b"still open")  # the others pass by
            assert await asyncio.get_running_loop().sock_recv(other_b, 100) == b"still open"
            received = 0
            while received < sent:
                received += len(await asyncio.get_running_loop().sock_recv(b, 1 << 18))
            assert relay.stats()["up_bytes"] == sent + len(b"still open")

    run(scenario())


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_end_of_stream_passes_and_the_other_direction_stays_open(delay_s: float) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with shaped(100 * MBIT, delay_s=delay_s) as (_, pairs):
            for a, b in [await pairs.open(), (await pairs.open())[::-1]]:
                a.send(b"question")
                a.shutdown(socket.SHUT_WR)
                assert await loop.sock_recv(b, 100) == b"question"
                assert await loop.sock_recv(b, 100) == b""
                b.send(b"answer")
                b.close()
                assert await loop.sock_recv(a, 100) == b"answer"
                assert await loop.sock_recv(a, 100) == b""

    run(scenario())


def test_what_was_sent_before_the_end_reaches_a_slow_reader() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with shaped(1e9) as (relay, pairs):
            a, b = await pairs.open(buffer_bytes=8192)
            a.shutdown(socket.SHUT_WR)
            await loop.sock_sendall(b, bytes(200_000))
            b.close()
            for _ in range(100):
                if relay.stats()["down_bytes"] == 200_000:
                    break
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.03)  # now the relay has closed both sides
            received = 0
            while chunk := await loop.sock_recv(a, 1 << 16):
                received += len(chunk)
            assert received == 200_000

    run(scenario())


@pytest.mark.parametrize("end", ["dialler", "target"])
@pytest.mark.parametrize("busy", [False, True])
def test_a_reset_passes(end: str, busy: bool) -> None:
    async def scenario() -> None:
        async with shaped(20 * MBIT) as (_, pairs):
            dying, other = await pairs.open()
            if end == "target":
                dying, other = other, dying
            if busy:
                await (await pairs.flood(other, dying)).stop()
            dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            dying.close()
            with pytest.raises(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(other, bytes(8 << 20))

    run(scenario())


def test_a_target_that_does_not_answer_resets_the_dialler() -> None:
    async def scenario() -> None:
        with socket.socket() as unused, socket.socket() as dialler:
            unused.bind(("127.0.0.1", 0))  # bound but not listening
            dialler.setblocking(False)
            route = Route(target_host="127.0.0.1", target_port=unused.getsockname()[1])
            async with Relay([route], 1e8) as relay:
                loop = asyncio.get_running_loop()
                await loop.sock_connect(dialler, ("127.0.0.1", relay.ports[0]))
                with pytest.raises(ConnectionResetError):
                    await loop.sock_recv(dialler, 1)

    run(scenario())


def test_a_relay_that_ends_resets_its_connections_and_frees_its_ports() -> None:
    async def scenario() -> None:
        async with shaped(20 * MBIT) as (_, pairs):
            pass
        async with shaped(20 * MBIT) as (relay, pairs):
            a, b = await pairs.open()
            port = relay.ports[0]
            await relay.__aexit__(None, None, None)
            for side in (a, b):
                with pytest.raises(ConnectionResetError):
                    await asyncio.get_running_loop().sock_recv(side, 1)
        route = Route(target_host="127.0.0.1", target_port=1, listen_port=port)
        async with Relay([route], 1e8) as relay:
            assert relay.ports == [port]
            with pytest.raises(OSError, match="in use"):
                async with Relay([Route(target_host="127.0.0.1", target_port=1), route], 1e8):
                    pass

    run(scenario())


@pytest.mark.parametrize("rate_bps", [0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_no_rate_is_refused(rate_bps: float) -> None:
    with pytest.raises(ValueError, match="rate_bps is"):
        Relay([], rate_bps)


def test_meter_counts_by_interval_and_names_the_rate() -> None:
    meter = LinkMeter(1e6, now=10.0)
    meter.add(0, 5, now=10.01)
    meter.add(1, 7, now=10.09)
    assert meter.series(now=10.09) == []
    meter.set_rate(2e6, now=10.25)
    meter.add(0, 3, now=10.26)
    starts, *columns = zip(*meter.series(now=10.31), strict=True)
    assert starts == pytest.approx([10.0, 10.0 + INTERVAL_S, 10.0 + 2 * INTERVAL_S])
    assert columns == [(5, 0, 3), (7, 0, 0), (1e6, 1e6, 2e6)]
