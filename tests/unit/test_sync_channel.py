"""The blocking handle of a channel, from a thread beside the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from prfaas.errors import ChannelBroken, ChannelClosed, DeadlineExceeded, LocalProtocolError
from prfaas.seams.transport import Hello, Span
from prfaas.testing.transport import DIALLER, LISTENER, host_memory
from prfaas.transport.inproc import InProcChannel
from prfaas.transport.sync import SyncChannel


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def ends(
    loop: asyncio.AbstractEventLoop, timeout_s: float | None = 5.0
) -> tuple[SyncChannel, SyncChannel]:
    def clock() -> float:
        return 0.0

    async def make(near: Hello, far: Hello) -> tuple[InProcChannel, InProcChannel]:
        return InProcChannel.pair(near, far, clock)

    pair = asyncio.run_coroutine_threadsafe(make(DIALLER, LISTENER), loop).result()
    near, far = (SyncChannel(channel, loop, timeout_s=timeout_s) for channel in pair)
    return near, far


def test_everything_a_channel_does(loop: asyncio.AbstractEventLoop) -> None:
    near, far = ends(loop)
    near.send(b"frame")
    assert far.receive() == b"frame"
    buffer = bytearray(4)
    window = far.expose(host_memory(buffer), [Span(0, 4)])
    near.put(window, 1, host_memory(bytearray(b"xyz")), [Span(0, 3)])
    assert buffer == b"\0xyz"
    far.withdraw(window)
    near.close()
    with pytest.raises(ChannelBroken):
        far.receive()
    with pytest.raises(ChannelClosed):
        near.send(b"late")


def test_a_call_that_takes_too_long_is_over_when_it_raises(
    loop: asyncio.AbstractEventLoop,
) -> None:
    near, far = ends(loop, timeout_s=0.02)
    with pytest.raises(DeadlineExceeded, match=r"longer than 0\.02 s"):
        far.receive()
    near.send(b"frame")
    assert far.receive() == b"frame"


def test_the_loops_own_thread_is_refused(loop: asyncio.AbstractEventLoop) -> None:
    near, _ = ends(loop)

    async def block() -> None:
        near.send(b"frame")

    with pytest.raises(LocalProtocolError, match="await the Channel"):
        asyncio.run_coroutine_threadsafe(block(), loop).result()


def test_a_loop_that_has_ended() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    near, far = ends(loop)
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            far.receive()
        except ChannelBroken as error:
            waiting.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()

    async def cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        while not tasks:
            await asyncio.sleep(0)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run_coroutine_threadsafe(cancel_all(), loop).result()
    waiter.join()
    assert "has ended" in str(waiting[0])
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    with pytest.raises(ChannelBroken, match="does not run"):
        near.send(b"frame")
    loop.close()
