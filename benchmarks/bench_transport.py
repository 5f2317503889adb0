"""The TCP transport against plain blocking sockets, between two processes on the loopback.

Two shapes: 256 MiB in one put, and 2,000 blocks of 32 KiB from scattered to scattered places. An
operation ends when the sender knows that the bytes are in the receiver's pool. Plain sockets send
and receive iovec lists over 1 or 2 streams: whoever wants a library compares it with those.
Rounds are interleaved, since other work on the machine moves all of them together.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from _common import emit, machine, parser
from prfaas.core import NodeId
from prfaas.seams.transport import Channel, Hello, Memory, Span, WindowRef
from prfaas.transport.tcp import TcpConfig, TcpTransport

MIB = 1 << 20
POOL_BYTES = 512 * MIB
BLOCK_BYTES = 32 << 10
NUM_BLOCKS = 2000
IOVECS = 1024
NUM_STREAMS = (1, 2)

Regions = list[tuple[int, int]]
"""(offset, bytes) of pieces of a pool, in order."""

_COUNT = struct.Struct("<Q")


def make_pool(seed: int | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A pool whose pages are all backed; random if there is a seed."""
    pool = np.zeros(POOL_BYTES, np.uint8)
    if seed is None:
        pool[:] = 0
    else:
        noise = np.random.default_rng(seed).integers(0, 256, 7 * MIB, np.uint8)
        for start in range(0, POOL_BYTES, len(noise)):
            pool[start : start + len(noise)] = noise[: POOL_BYTES - start]
    return pool


def one_piece(round_: int) -> tuple[Regions, Regions]:
    """Source and destination: the halves of the pools, changing places."""
    half = POOL_BYTES // 2
    return [(round_ % 2 * half, half)], [((round_ + 1) % 2 * half, half)]


def scattered(round_: int) -> tuple[Regions, Regions]:
    rng = random.Random(round_)
    places = range(0, POOL_BYTES, BLOCK_BYTES)
    return tuple([(at, BLOCK_BYTES) for at in rng.sample(places, NUM_BLOCKS)] for _ in range(2))


SHAPES = {"one put of 256 MiB": one_piece, "2000 blocks of 32 KiB": scattered}


# Plain sockets.


def transfer(call: Callable[[list[memoryview]], int], pool: memoryview, regions: Regions) -> None:
    """Repeats ``call`` (a gathering send or a scattering receive) until all regions are done."""
    for first in range(0, len(regions), IOVECS):
        views = [pool[at : at + size] for at, size in regions[first : first + IOVECS]]
        while views:
            done = call(views)
            if not done:
                raise ConnectionResetError("the other process is gone")
            index = 0
            while index < len(views) and done >= len(views[index]):
                done -= len(views[index])
                index += 1
            views = views[index:]
            if done:
                views[0] = views[0][done:]


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = sock.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        raise ConnectionResetError("the other process is gone")
    return data


def serve_plain(sock: socket.socket, pool: memoryview) -> None:
    """Receives a list of regions and then their bytes, and says so, until the peer leaves."""
    try:
        while True:
            (size,) = _COUNT.unpack(receive_exactly(sock, _COUNT.size))
            regions = np.frombuffer(receive_exactly(sock, size), np.uint64).reshape(-1, 2).tolist()
            transfer(
                lambda views: sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0], pool, regions
            )
            sock.sendall(b"k")
    except ConnectionResetError:
        sock.close()


def send_plain(sock: socket.socket, pool: memoryview, source: Regions, target: Regions) -> None:
    table = np.asarray(target, np.uint64).tobytes()
    sock.sendall(_COUNT.pack(len(table)) + table)
    transfer(sock.sendmsg, pool, source)
    receive_exactly(sock, 1)


def share(regions: Regions, index: int, count: int) -> Regions:
    """One of ``count`` equal parts; a single region is cut."""
    if len(regions) == 1:
        at, size = regions[0]
        part = size // count
        return [(at + index * part, part)]
    part = -(-len(regions) // count)
    return regions[index * part : (index + 1) * part]


class PlainStreams:
    """Contender: plain sockets, a thread for each."""

    def __init__(self, address: tuple[str, int], pool: memoryview, count: int, cc: str | None):
        self._pool = pool
        self._sockets = [dial_plain(address, cc) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count)

    def put(self, source: Regions, target: Regions) -> float:
        start_s = time.perf_counter()
        count = len(self._sockets)
        jobs = [
            self._threads.submit(
                send_plain, sock, self._pool, share(source, i, count), share(target, i, count)
            )
            for i, sock in enumerate(self._sockets)
        ]
        for job in jobs:
            job.result()
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._threads.shutdown()
        for sock in self._sockets:
            sock.close()


def dial_plain(address: tuple[str, int], cc: str | None) -> socket.socket:
    sock = socket.create_connection(address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if cc:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, cc.encode())
    return sock


# The transport.


def hello(name: str) -> Hello:
    return Hello(node_id=NodeId(name), epoch=1, fingerprint=b"bench")


def memory_of(pool: np.ndarray[Any, Any]) -> Memory:
    return Memory(
        address=pool.ctypes.data, num_bytes=pool.nbytes, buffer=memoryview(pool).cast("B")
    )


def spans(regions: Regions) -> list[Span]:
    return [Span(at, size) for at, size in regions]


class OurChannel:
    """Contender: a channel of the TCP transport, in an event loop of its own thread."""

    def __init__(self, address: str, memory: Memory, config: TcpConfig) -> None:
        self._memory = memory
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._channel: Channel = self._run(TcpTransport(config).connect(address, hello("sender")))

    def put(self, source: Regions, target: Regions) -> float:
        return self._run(self._put(spans(source), target))

    async def _put(self, source: list[Span], target: Regions) -> float:
        await self._channel.send(json.dumps(target).encode())
        token = await self._channel.receive()
        window = WindowRef(token, sum(size for _, size in target))
        start_s = time.perf_counter()
        await self._channel.put(window, 0, self._memory, source)
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._run(self._channel.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


async def serve_ours(channel: Channel, memory: Memory) -> None:
    """Opens a window for every list of regions, and closes the one before."""
    window: WindowRef | None = None
    while True:
        regions = json.loads(await channel.receive())
        if window is not None:
            await channel.withdraw(window)
        window = channel.expose(memory, spans(regions))
        await channel.send(window.token)


# The processes.


def receiver(pipe: Connection, cc: str | None) -> None:
    """The other process: a pool, plain sockets, a listener; answers with bytes of its pool."""
    pool = make_pool(None)
    memory = memory_of(pool)
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            sock, _ = server.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=serve_plain, args=(sock, memory.buffer), daemon=True).start()

    async def main() -> None:
        listener = await TcpTransport(TcpConfig(congestion=cc)).listen(
            "tcp://127.0.0.1:0", hello("receiver"), lambda channel: serve_ours(channel, memory)
        )
        pipe.send((server.getsockname(), listener.address))
        while (regions := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send_bytes(b"".join(pool[at : at + size].tobytes() for at, size in regions))
        await listener.aclose()

    threading.Thread(target=accept, daemon=True).start()
    asyncio.run(main())


def run(num_rounds: int, cc: str | None) -> list[dict[str, Any]]:
    """Rows of shape, contender and GB/s."""
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receiver, args=(theirs, cc))
    process.start()
    pool = make_pool(1)
    memory = memory_of(pool)
    plain_address, our_address = pipe.recv()
    contenders: dict[str, PlainStreams | OurChannel] = {
        f"plain sockets, {n} stream{'s' * (n > 1)}": PlainStreams(
            plain_address, memory.buffer, n, cc
        )
        for n in NUM_STREAMS
    }
    for checksum in (False, True):
        name = f"prfaas tcp, checksum {'on' if checksum else 'off'}"
        config = TcpConfig(checksum=checksum, congestion=cc)
        contenders[name] = OurChannel(our_address, memory, config)

    times: dict[tuple[str, str], list[float]] = {}
    rng = random.Random(0)
    for round_ in range(num_rounds + 1):  # the first warms up
        for shape, plan in SHAPES.items():
            source, target = plan(round_)
            for name in rng.sample(sorted(contenders), len(contenders)):
                elapsed_s = contenders[name].put(source, target)
                if round_:
                    times.setdefault((shape, name), []).append(elapsed_s)
                check(pipe, pool, source, target)

    for contender in contenders.values():
        contender.close()
    pipe.send(None)
    process.join()
    return [row(shape, name, times[shape, name]) for shape in SHAPES for name in contenders]


def check(pipe: Connection, pool: Any, source: Regions, target: Regions) -> None:
    """Compares the last bytes of the last region on both sides."""
    size = min(source[-1][1], target[-1][1], BLOCK_BYTES)
    ours, theirs = sum(source[-1]) - size, sum(target[-1]) - size
    pipe.send([(theirs, size)])
    if pipe.recv_bytes() != pool[ours : ours + size].tobytes():
        raise SystemExit("the receiver's pool does not hold what was sent")


def row(shape: str, name: str, seconds: list[float]) -> dict[str, Any]:
    num_bytes = sum(size for _, size in SHAPES[shape](0)[0])
    return {
        "shape": shape,
        "contender": name,
        "median_gbytes_per_s": round(num_bytes / statistics.median(seconds) / 1e9, 3),
        "best_gbytes_per_s": round(num_bytes / min(seconds) / 1e9, 3),
        "rounds": len(seconds),
    }


def ratios_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Ours over the best plain row of the shape."""
    found = {}
    for shape in SHAPES:
        speeds = {r["contender"]: r["median_gbytes_per_s"] for r in rows if r["shape"] == shape}
        best = max(speed for name, speed in speeds.items() if name.startswith("plain"))
        for name, speed in speeds.items():
            if not name.startswith("plain"):
                found[f"{shape}: {name} / best plain"] = round(speed / best, 3)
    return found


def network(cc: str | None) -> dict[str, object]:
    """The settings of the system that decide."""
    settings = Path("/proc/sys/net/ipv4")
    default = (settings / "tcp_congestion_control").read_text().strip()
    return {
        "congestion": cc or f"{default} (system)",
        "tcp_wmem": " ".join((settings / "tcp_wmem").read_text().split()),
        "tcp_rmem": " ".join((settings / "tcp_rmem").read_text().split()),
        "num_connections": TcpConfig().num_connections,
        "chunk_bytes": TcpConfig().chunk_bytes,
    }


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--congestion", help="of every socket; needs the right to set it")
    args = arguments.parse_args()
    rows = run(9 if args.quick else 31, args.congestion)
    ratios, settings = ratios_of(rows), network(args.congestion)
    if args.json:
        print(json.dumps({"machine": machine() | settings, "rows": rows, "ratios": ratios}))
        return
    print("  ".join(f"{key}: {value}" for key, value in settings.items()))
    emit(args, rows, ratios)


if __name__ == "__main__":
    main()
