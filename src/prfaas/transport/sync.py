"""A channel for synchronous engines: blocking calls from any thread but the loop's own."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from prfaas.errors import ChannelBroken, DeadlineExceeded, LocalProtocolError
from prfaas.seams.transport import Channel, Memory, Span, WindowRef

T = TypeVar("T")


class SyncChannel:
    """Thread-safe blocking handle over a `Channel`; its methods mirror the channel's.

    Args:
        channel: where the work is done.
        loop: the running event loop that the channel belongs to.
        timeout_s: a call that takes longer is cancelled and raises DeadlineExceeded.
    """

    def __init__(
        self, channel: Channel, loop: asyncio.AbstractEventLoop, *, timeout_s: float | None = None
    ) -> None:
        self._channel = channel
        self._loop = loop
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<SyncChannel of {self._channel!r}>"

    def send(self, frame: bytes) -> None:
        self._run(lambda: self._channel.send(frame))

    def receive(self) -> bytes:
        return self._run(self._channel.receive)

    def expose(self, memory: Memory, spans: Sequence[Span]) -> WindowRef:
        async def expose() -> WindowRef:
            return self._channel.expose(memory, spans)

        return self._run(expose)

    def withdraw(self, window: WindowRef) -> None:
        self._run(lambda: self._channel.withdraw(window))

    def put(self, window: WindowRef, offset: int, memory: Memory, spans: Sequence[Span]) -> None:
        self._run(lambda: self._channel.put(window, offset, memory, spans))

    def close(self) -> None:
        self._run(self._channel.aclose)

    def _run(self, call: Callable[[], Awaitable[T]]) -> T:
        if _running_loop() is self._loop:
            raise LocalProtocolError(
                "a blocking call in the event loop's own thread would never end; "
                "await the Channel there"
            )
        if not self._loop.is_running():
            raise ChannelBroken(f"the event loop of {self._channel!r} does not run")
        try:
            return asyncio.run_coroutine_threadsafe(self._bounded(call), self._loop).result()
        except concurrent.futures.CancelledError as error:
            raise ChannelBroken(f"the event loop of {self._channel!r} has ended") from error

    async def _bounded(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await call()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"a call on {self._channel!r} took longer than {self._timeout_s} s"
            ) from error


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
