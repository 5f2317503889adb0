"""One side of a control conversation: posting never waits for the peer."""

from __future__ import annotations

import asyncio
from collections import deque

from prfaas.errors import ChannelBroken, ChannelClosed, TransportError
from prfaas.runtime.messages import Message, encode, encode_transfer
from prfaas.runtime.tasks import report
from prfaas.seams import Channel
from prfaas.transfer import Message as TransferMessage

STALL_S = 30.0
FLUSH_S = 5.0
MAX_QUEUED_BYTES = 256 << 20


class Line:
    """A channel whose control frames are handed over by a task of its own, in order.

    Whoever has something to say to several peers must not be held up by one that does not read. So
    frames wait here, and the peer is given up when one of them cannot be handed over in time or
    when too many bytes wait. The end shows in `receive`.

    Args:
        channel: belongs to this object from now on.
        stall_s: longest time to hand over one frame.
        max_queued_bytes: most bytes that may wait.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        stall_s: float = STALL_S,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self.channel = channel
        self._stall_s = stall_s
        self._max_queued_bytes = max_queued_bytes
        self._frames: deque[bytes] = deque()
        self._queued_bytes = 0
        self._error: TransportError | None = None
        self._has_frames = asyncio.Event()
        self._is_flushed = asyncio.Event()
        self._is_flushed.set()
        self._writing = asyncio.ensure_future(self._write())

    def __repr__(self) -> str:
        state = "open" if self.is_open else "ended"
        return f"<Line to {self.peer_id!r} {state}, {self._queued_bytes} bytes queued>"

    @property
    def peer_id(self) -> str:
        return self.channel.peer.node_id

    @property
    def is_open(self) -> bool:
        return self._error is None

    def post(self, message: Message) -> None:
        """Says ``message`` after everything that was posted before.

        Raises: ChannelBroken, ChannelClosed; ConfigError for a message that no frame can hold.
        """
        self._queue(encode(message))

    def post_transfer(self, message: TransferMessage) -> None:
        """As `post`, for the two sides of a transfer."""
        self._queue(encode_transfer(message))

    async def receive(self) -> bytes:
        """Next frame of the peer. Raises as `Channel.receive`, and says why the line ended."""
        try:
            return await self.channel.receive()
        except TransportError:
            self._require_open()
            raise

    def abort(self) -> None:
        """Ends the channel now. Idempotent."""
        self._end(ChannelClosed(f"the line to {self.peer_id} was given up on this side"))

    async def aclose(self) -> None:
        """Hands over what is queued if the peer reads it, and ends the channel. Idempotent."""
        if self.is_open:
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._is_flushed.wait()
            except TimeoutError:
                self.abort()
        if self._error is None:
            self._error = ChannelClosed(f"the line to {self.peer_id} was closed on this side")
            self._writing.cancel()
        await self.channel.aclose()
        await asyncio.wait([self._writing])

    def _queue(self, frame: bytes) -> None:
        if self._error is None and self._queued_bytes + len(frame) > self._max_queued_bytes:
            self._end(
                ChannelBroken(
                    f"{self.peer_id} has left {self._queued_bytes} bytes unread, at most "
                    f"{self._max_queued_bytes} may wait; it was given up"
                )
            )
        self._require_open()
        self._frames.append(frame)
        self._queued_bytes += len(frame)
        self._is_flushed.clear()
        self._has_frames.set()

    def _require_open(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    def _end(self, error: TransportError) -> None:
        if self._error is None:
            self._error = error
            self._frames.clear()
            self._queued_bytes = 0
            self._is_flushed.set()
            self._writing.cancel()
            self.channel.abort()

    async def _write(self) -> None:
        try:
            while True:
                await self._has_frames.wait()
                while self._frames:
                    async with asyncio.timeout(self._stall_s):
                        await self.channel.send(self._frames[0])
                    self._queued_bytes -= len(self._frames.popleft())
                self._has_frames.clear()
                self._is_flushed.set()
        except TimeoutError:
            self._end(ChannelBroken(f"{self.peer_id} read nothing for {self._stall_s} s"))
        except TransportError as error:
            self._end(error)
        except Exception as error:
            report(f"a frame for {self.peer_id} cannot be sent", error)
            self._end(ChannelBroken(f"a frame for {self.peer_id} cannot be sent: {error}"))
