"""Control frames that have arrived and that nobody has received yet."""

from __future__ import annotations

import asyncio
from collections import deque

from prfaas.errors import ChannelBusy, TransportError

_FRAME_OVERHEAD_BYTES = 64  # so that a flood of empty frames is bounded, too


def fresh(error: TransportError) -> TransportError:
    """The same error to raise once more; an instance raised twice would keep both tracebacks."""
    again = type(error)(*error.args)
    again.__cause__ = error.__cause__
    return again


class Inbox:
    """A queue of frames with one reader, bounded by bytes, that can end with an error.

    Args:
        max_bytes: `wait_room` blocks above it; one frame always fits.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: deque[bytes] = deque()
        self._num_bytes = 0
        self._error: TransportError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writers: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        state = "ended" if self._error else "open"
        return f"<Inbox {len(self._frames)} frames, {self._num_bytes} bytes, {state}>"

    async def wait_room(self) -> None:
        """Returns when there is room for a frame, or when the inbox has ended."""
        while self._num_bytes > self._max_bytes and self._error is None:
            room = asyncio.get_running_loop().create_future()
            self._writers.append(room)
            await room

    def push(self, frame: bytes) -> None:
        """Adds a frame; dropped if the inbox has ended."""
        if self._error is None:
            self._frames.append(frame)
            self._num_bytes += len(frame) + _FRAME_OVERHEAD_BYTES
            self._wake_reader()

    def end(self, error: TransportError, *, discard: bool) -> None:
        """Nothing more will come: `get` raises ``error``, behind the frames unless ``discard``."""
        if self._error is None:
            self._error = error
        if discard:
            self._frames.clear()
            self._num_bytes = 0
            self._error = error
        self._wake_reader()
        self._wake_writers()

    async def get(self) -> bytes:
        """Next frame. Raises: the error of `end`; ChannelBusy if another task is in `get`."""
        if self._reader is not None:
            raise ChannelBusy("another task is receiving on this channel; use one receiver")
        while not self._frames:
            if self._error is not None:
                raise fresh(self._error)
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        frame = self._frames.popleft()
        self._num_bytes -= len(frame) + _FRAME_OVERHEAD_BYTES
        if self._num_bytes <= self._max_bytes:
            self._wake_writers()
        return frame

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writers(self) -> None:
        while self._writers:
            room = self._writers.popleft()
            if not room.done():
                room.set_result(None)
