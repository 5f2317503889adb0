"""Conformance of a `Transport`: what every one must hold, whatever it moves bytes over.

Nothing here needs pytest: `check_transport` raises AssertionError with the clause that failed.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from io import BytesIO
from itertools import pairwise

import attrs

from prfaas.core import Handoff, NodeId
from prfaas.errors import (
    ChannelBroken,
    ChannelBusy,
    ChannelClosed,
    ConfigError,
    ConnectError,
    PeerMismatch,
    PrfaasError,
    PutRefused,
)
from prfaas.seams.transport import Channel, Hello, Listener, Memory, Span, Transport, WindowRef

SIZES = (0, 1, 7, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537, (4 << 20) + 1)
LARGE_SIZE = (64 << 20) + 3
CLAUSE_TIMEOUT_S = 20.0

_POISON = 0xA5
DIALLER = Hello(node_id=NodeId("dialler"), epoch=1, fingerprint=b"fingerprint", model="toy")
LISTENER = Hello(node_id=NodeId("listener"), epoch=7, fingerprint=b"fingerprint", model="toy")


def host_memory(buffer: bytearray) -> Memory:
    """A `Memory` over a bytearray, which must not be resized while the memory is in use."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0
    return Memory(address=address, num_bytes=len(buffer), buffer=memoryview(buffer))


class Scattered:
    """``num_bytes`` bytes in random pieces at random places of a poisoned memory."""

    def __init__(self, rng: random.Random, num_bytes: int, data: bytes | None = None) -> None:
        cuts = sorted(rng.sample(range(num_bytes + 1), min(num_bytes, rng.randrange(40))))
        lengths = [stop - start for start, stop in pairwise([0, *cuts, num_bytes])]
        order = rng.sample(range(len(lengths)), len(lengths))
        offsets, end = [0] * len(lengths), 0
        for index in order:
            offsets[index] = end + rng.randrange(3)
            end = offsets[index] + lengths[index]
        self.buffer = bytearray([_POISON]) * (end + 2)
        self.memory = host_memory(self.buffer)
        self.spans = [Span(*span) for span in zip(offsets, lengths, strict=True)]
        if data is not None:
            stream = BytesIO(data)
            for span in self.spans:
                self.buffer[span.offset : span.offset + span.num_bytes] = stream.read(
                    span.num_bytes
                )

    def read(self) -> bytes:
        """The pieces in order."""
        return b"".join(self.buffer[s.offset : s.offset + s.num_bytes] for s in self.spans)

    def untouched(self) -> bool:
        """Whether every byte between the pieces is as it was."""
        rest = bytearray(self.buffer)
        for span in self.spans:
            rest[span.offset : span.offset + span.num_bytes] = bytes([_POISON]) * span.num_bytes
        return rest == bytes([_POISON]) * len(rest)


@attrs.frozen
class Pair:
    """Both ends of an open channel and the listener that accepted it."""

    near: Channel
    far: Channel
    listener: Listener


@asynccontextmanager
async def accepting(
    transport: Transport, address: str, hello: Hello = LISTENER
) -> AsyncIterator[tuple[Listener, Callable[[], Awaitable[Channel]]]]:
    """A listener and a function that waits for its next channel."""
    channels: asyncio.Queue[Channel] = asyncio.Queue()
    over = asyncio.Event()

    async def on_channel(channel: Channel) -> None:
        channels.put_nowait(channel)
        await over.wait()

    listener = await transport.listen(address, hello, on_channel)
    try:
        yield listener, channels.get
    finally:
        over.set()
        await listener.aclose()


@asynccontextmanager
async def pair(transport: Transport, address: str) -> AsyncIterator[Pair]:
    """An open channel, aborted in the end."""
    async with accepting(transport, address) as (listener, accept):
        near = await transport.connect(listener.address, DIALLER)
        try:
            yield Pair(near, await accept(), listener)
        finally:
            near.abort()


async def check_transport(transport: Transport, address: str, *, large: bool = False) -> None:
    """Runs every check of the `Transport` contract.

    Args:
        transport: may be used for several channels at a time.
        address: can be listened on again and again; for TCP with port 0.
        large: also put 64 MiB + 3 bytes.

    Raises: AssertionError naming the clause that does not hold.
    """
    for check in (
        _check_hello,
        _check_frames,
        _check_puts,
        _check_concurrent_puts,
        _check_refusals,
        _check_bad_spans,
        _check_cancelled_put,
        _check_close,
        _check_abort,
        _check_busy,
        _check_listener_close,
        _check_deliveries,
    ):
        await _run(check.__name__, _in_pair(check, transport, address))
    await _run("mismatch", _check_mismatch(transport, address))
    await _run("reconnect", _check_reconnect(transport, address))
    if large:
        check = partial(_check_puts, sizes=[LARGE_SIZE])
        await _run("large puts", _in_pair(check, transport, address))


async def _in_pair(
    clause: Callable[[Pair], Awaitable[None]], transport: Transport, address: str
) -> None:
    async with pair(transport, address) as ends:
        await clause(ends)


async def _run(name: str, clause: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(CLAUSE_TIMEOUT_S):
            await clause
    except TimeoutError as error:
        raise AssertionError(f"{name}: not over after {CLAUSE_TIMEOUT_S} s") from error


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


async def _expect(error: type[PrfaasError], call: Awaitable[object], when: str) -> PrfaasError:
    """Awaits ``call`` and returns the error that it must raise."""
    try:
        await call
    except error as raised:
        return raised
    except PrfaasError as raised:
        raise AssertionError(f"{when}: {raised!r} instead of {error.__name__}") from raised
    raise AssertionError(f"{when}: no {error.__name__}")


async def _check_hello(ends: Pair) -> None:
    _require(ends.near.local == DIALLER and ends.far.local == LISTENER, "local is not ours")
    _require(ends.near.peer == LISTENER and ends.far.peer == DIALLER, "peer is not theirs")


async def _check_frames(ends: Pair) -> None:
    rng = random.Random(1)
    frames = [rng.randbytes(size) for size in (*SIZES, *reversed(SIZES))]
    for sender, receiver in ((ends.near, ends.far), (ends.far, ends.near)):
        sending = asyncio.create_task(_send_all(sender, frames))
        for frame in frames:
            got = await receiver.receive()
            _require(got == frame, f"a frame of {len(frame)} bytes came as {len(got)} others")
        await sending
    await _expect(ConfigError, ends.near.send(bytes(1 << 28)), "a frame of 256 MiB")
    await ends.near.send(b"still here")
    _require(await ends.far.receive() == b"still here", "a refused frame left something behind")


async def _send_all(channel: Channel, frames: Iterable[bytes]) -> None:
    for frame in frames:
        await channel.send(frame)


async def _check_puts(ends: Pair, sizes: Sequence[int] = SIZES) -> None:
    rng = random.Random(2)
    for size in sizes:
        await _put_once(ends.near, ends.far, size, rng)
        await _put_once(ends.far, ends.near, size, rng)


async def _put_once(sender: Channel, receiver: Channel, size: int, rng: random.Random) -> None:
    """Puts in two parts, the second one first, and compares as soon as each is done."""
    data, target = rng.randbytes(size), Scattered(rng, size)
    window = receiver.expose(target.memory, target.spans)
    _require(window.num_bytes == size, f"a window over {size} bytes has {window.num_bytes}")
    cut = rng.randint(0, size)
    for offset, part in ((cut, data[cut:]), (0, data[:cut])):
        source = Scattered(rng, len(part), part)
        await sender.put(window, offset, source.memory, source.spans)
        landed = target.read()[offset : offset + len(part)]
        _require(landed == part, f"put of {len(part)} bytes returned before they had landed")
    _require(target.untouched(), f"a put of {size} bytes wrote beside its window")
    _require(await receiver.withdraw(window) in (None, size), f"{size} bytes were miscounted")


async def _check_concurrent_puts(ends: Pair) -> None:
    rng = random.Random(4)
    data = rng.randbytes(3 << 20)
    target = Scattered(rng, len(data))
    window = ends.far.expose(target.memory, target.spans)
    cuts = [0, *sorted(rng.sample(range(len(data)), 30)), len(data)]
    sources = [
        (start, Scattered(rng, stop - start, data[start:stop])) for start, stop in pairwise(cuts)
    ]
    await asyncio.gather(
        *(ends.near.put(window, start, source.memory, source.spans) for start, source in sources)
    )
    _require(target.read() == data, "concurrent puts mixed their bytes")


async def _check_refusals(ends: Pair) -> None:
    rng = random.Random(5)
    target = Scattered(rng, 5000)
    source = Scattered(rng, 5000, rng.randbytes(5000))
    window = ends.far.expose(target.memory, target.spans)
    claimed = attrs.evolve(window, num_bytes=1 << 40)
    for ref, offset in ((window, 1), (window, -1), (claimed, 1), (claimed, 1 << 39)):
        call = ends.near.put(ref, offset, source.memory, source.spans)
        await _expect(PutRefused, call, "put out of bounds")
    unknown = WindowRef(bytes(len(window.token)), 5000)
    own = ends.near.expose(target.memory, target.spans)
    for ref in (unknown, own):
        call = ends.near.put(ref, 0, source.memory, source.spans)
        await _expect(PutRefused, call, "put into a window that the peer did not open")
    _require(not any(target.read().replace(bytes([_POISON]), b"")), "a refused put wrote")
    await ends.near.put(window, 0, source.memory, source.spans)
    _require(target.read() == source.read(), "the channel does not work after refusals")
    await ends.far.withdraw(window)
    _require(not await ends.far.withdraw(window), "a window was withdrawn twice")
    call = ends.near.put(window, 0, source.memory, source.spans)
    await _expect(PutRefused, call, "put into a withdrawn window")


async def _check_bad_spans(ends: Pair) -> None:
    memory = host_memory(bytearray(100))
    on_device = Memory(address=1, num_bytes=100, device="elsewhere:0")
    window = ends.far.expose(memory, [Span(0, 100)])
    for wrong, span in (
        (memory, Span(90, 11)),
        (memory, Span(-1, 5)),
        (memory, Span(5, -1)),
        (on_device, Span(0, 1)),
    ):
        call = ends.near.put(window, 0, wrong, [span])
        await _expect(ConfigError, call, f"put from {span}")
        try:
            ends.far.expose(wrong, [span])
        except ConfigError:
            continue
        raise AssertionError(f"expose of {span} is accepted")


async def _check_cancelled_put(ends: Pair) -> None:
    rng = random.Random(7)
    data = rng.randbytes(8 << 20)
    target, source = Scattered(rng, len(data)), Scattered(rng, len(data), data)
    window = ends.far.expose(target.memory, target.spans)
    for num_steps in (0, 1, 2, 5):
        putting = asyncio.create_task(ends.near.put(window, 0, source.memory, source.spans))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait([putting])
    await ends.near.put(window, 0, source.memory, source.spans)
    _require(target.read() == data, "the channel does not work after a cancelled put")


async def _check_close(ends: Pair) -> None:
    memory = host_memory(bytearray(10))
    window = ends.far.expose(memory, [Span(0, 10)])
    frames = [bytes([index]) * 100_000 for index in range(50)]
    sending = asyncio.create_task(_send_all(ends.near, frames))
    received = [await ends.far.receive() for _ in range(40)]
    await sending
    closing = asyncio.create_task(ends.near.aclose())
    received += [await ends.far.receive() for _ in range(10)]
    _require(received == frames, "frames sent before aclose are lost")
    await _expect(ChannelBroken, ends.far.receive(), "receive after the peer's aclose")
    await closing
    await ends.near.aclose()
    for name, call in (
        ("send", ends.near.send(b"")),
        ("receive", ends.near.receive()),
        ("put", ends.near.put(window, 0, memory, [Span(0, 10)])),
    ):
        await _expect(ChannelClosed, call, f"{name} after aclose")
    await ends.far.withdraw(window)


async def _check_abort(ends: Pair) -> None:
    receiving = asyncio.create_task(ends.far.receive())
    await _send_all(ends.far, [b"read", b"unread"])
    await ends.near.receive()
    ends.near.abort()
    ends.near.abort()
    await _expect(ChannelBroken, receiving, "receive while the peer aborts")
    await _expect(ChannelBroken, ends.far.send(b""), "send after the peer aborted")
    await _expect(ChannelClosed, ends.near.receive(), "receive after abort")


async def _check_busy(ends: Pair) -> None:
    receiving = asyncio.create_task(ends.near.receive())
    await asyncio.sleep(0)
    await _expect(ChannelBusy, ends.near.receive(), "a second receiver")
    await ends.far.send(b"for the first")
    _require(await receiving == b"for the first", "the first receiver lost its frame")
    receiving = asyncio.create_task(ends.near.receive())
    await asyncio.sleep(0)
    receiving.cancel()
    await asyncio.wait([receiving])
    await ends.far.send(b"after a cancelled receive")
    _require(
        await ends.near.receive() == b"after a cancelled receive", "a cancelled receive took it"
    )


async def _check_listener_close(ends: Pair) -> None:
    await ends.listener.aclose()
    await ends.listener.aclose()
    await _expect(ChannelBroken, ends.near.receive(), "receive after the peer's listener closed")
    await _expect(ChannelClosed, ends.far.receive(), "receive after our listener closed")


async def _check_deliveries(ends: Pair) -> None:
    rng = random.Random(8)
    size = 1 << 20
    target, source = Scattered(rng, size), Scattered(rng, size, bytes(size))
    window = ends.far.expose(target.memory, target.spans)
    for _ in range(8):
        await ends.near.put(window, 0, source.memory, source.spans)
    deliveries = ends.near.take_deliveries()
    _require(all(d.start_s < d.end_s for d in deliveries), "a delivery without a duration")
    _require(sum(d.num_bytes for d in deliveries) <= 8 * size, "deliveries of bytes never put")
    _require(ends.near.take_deliveries() == (), "deliveries are handed out twice")


async def _check_mismatch(transport: Transport, address: str) -> None:
    async with accepting(transport, address) as (listener, accept):
        for field, other in (
            ("protocol_version", attrs.evolve(DIALLER, protocol_version=99)),
            ("fingerprint", attrs.evolve(DIALLER, fingerprint=b"another")),
            ("granule_tokens", attrs.evolve(DIALLER, granule_tokens=128)),
            ("layout", attrs.evolve(DIALLER, layout="token.layer.group")),
            ("handoff", attrs.evolve(DIALLER, handoff=Handoff.BEFORE_LAST)),
        ):
            call = transport.connect(listener.address, other)
            error = await _expect(PeerMismatch, call, f"{field} differs")
            assert isinstance(error, PeerMismatch)
            _require(error.field == field, f"{field} differs, but {error.field} is blamed")
        gateway = attrs.evolve(DIALLER, fingerprint=b"", granule_tokens=1)
        near = await transport.connect(listener.address, gateway)
        _require((await accept()).peer == gateway, "a channel without a cache is not opened")
        near.abort()


async def _check_reconnect(transport: Transport, address: str) -> None:
    rng = random.Random(9)
    async with accepting(transport, address) as (listener, accept):
        for _ in range(3):
            near = await transport.connect(listener.address, DIALLER)
            far = await accept()
            await _put_once(near, far, 100_000, rng)
            far.abort()
            await _expect(ChannelBroken, near.receive(), "receive after the listener's abort")
            near.abort()
        address = listener.address
    await _expect(ConnectError, transport.connect(address, DIALLER), "nobody listens any more")
