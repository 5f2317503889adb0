"""The sending side of puts: one queue of work that every data connection takes from."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence

import attrs

from prfaas.errors import RemoteProtocolError, TransportError
from prfaas.seams.transport import Delivery
from prfaas.transport.inbox import fresh
from prfaas.transport.tcp.config import TcpConfig
from prfaas.transport.tcp.lanes import Lane, LaneThreads
from prfaas.transport.tcp.sockets import num_segments, send_views
from prfaas.transport.views import MAX_IOVECS, SpanViews, checksum
from prfaas.transport.windows import put_error
from prfaas.wire.busy import BusyMeter
from prfaas.wire.frames import (
    PUT_HEADER_BYTES,
    Frame,
    FrameDecoder,
    Kind,
    PutHeader,
    decode_ack,
    decode_nack,
    encode_put,
)

_ACK_BYTES = 64 << 10


@attrs.define(eq=False, kw_only=True)
class _Put:
    """One call of `OutgoingPuts.put`. Counters are guarded by its lock."""

    views: SpanViews
    token: bytes
    offset: int
    done: asyncio.Future[None]
    quiet: asyncio.Event
    position: int = 0  # bytes that a connection has taken
    exhausted: bool = False
    withdrawn: bool = False
    num_sending: int = 0  # chunks that a thread is reading from the source
    num_in_flight: int = 0  # chunks taken and not answered


@attrs.frozen(eq=False)
class _Chunk:
    put: _Put
    sequence: int
    start: int
    stop: int


class OutgoingPuts:
    """Sends puts over the lanes of one channel.

    A lane's thread takes the next chunk of the next put whenever its socket has room: a slow lane
    does not hold the others, and a small put does not wait for a large one. Acknowledgements come
    back on the lane and are read by the event loop.

    Args:
        lanes: connected, in the hands of this object until `close`.
        threads: where they run; also reports failures.
        config: chunk size and checksums.
        meter: told of bytes queued and acknowledged.
        clock: monotonic seconds.
        on_failure: called in the loop when the channel cannot go on.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        threads: LaneThreads,
        *,
        config: TcpConfig,
        meter: BusyMeter,
        clock: Callable[[], float],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._lanes = lanes
        self._threads = threads
        self._config = config
        self._meter = meter
        self._clock = clock
        self._on_failure = on_failure
        self._started = False
        self._active: set[_Put] = set()
        self._sequences = itertools.count()
        self._ready = threading.Condition(threading.Lock())  # guards all that follows
        self._waiting: deque[_Put] = deque()
        self._in_flight: dict[int, _Chunk] = {}
        self._error: TransportError | None = None
        self._num_segments = [num_segments(lane.sock) for lane in lanes]
        for lane in lanes:
            decoder = FrameDecoder((Kind.ACK, Kind.NACK))
            self._loop.add_reader(lane.sock, self._on_answers, lane, decoder)

    def __repr__(self) -> str:
        return (
            f"<OutgoingPuts {len(self._active)} puts, {len(self._in_flight)} chunks in flight, "
            f"{len(self._lanes)} lanes>"
        )

    async def put(self, token: bytes, offset: int, views: SpanViews) -> None:
        """See `Channel.put`. If it fails, no thread reads the source any more when it raises."""
        put = _Put(
            views=views,
            token=token,
            offset=offset,
            done=self._loop.create_future(),
            quiet=asyncio.Event(),
        )
        if not self._started:
            self._started = True
            for lane in self._lanes:
                self._threads.start(lane, self._send_chunk)
        self._meter.queued(views.num_bytes, self._clock())
        self._active.add(put)
        with self._ready:
            self._waiting.append(put)
            self._ready.notify()
        try:
            await put.done
        except BaseException:
            await self._retire(put)
            raise
        finally:
            self._active.discard(put)

    def take_deliveries(self) -> tuple[Delivery, ...]:
        return self._meter.take()

    def take_resent(self) -> tuple[int, int]:
        """See `Channel.take_resent`; (0, 0) on systems whose sockets do not count."""
        seen, self._num_segments = self._num_segments, [num_segments(x.sock) for x in self._lanes]
        sent = sum(now[0] - then[0] for now, then in zip(self._num_segments, seen, strict=True))
        again = sum(now[1] - then[1] for now, then in zip(self._num_segments, seen, strict=True))
        return max(0, sent), max(0, again)

    def close(self, error: TransportError) -> None:
        """Fails every put with ``error`` and lets go of the lanes. Idempotent."""
        with self._ready:
            if self._error is not None:
                return
            self._error = error
            self._waiting.clear()
            self._ready.notify_all()
        for lane in self._lanes:
            self._loop.remove_reader(lane.sock)
            lane.hang_up()
            lane.release()
        for put in self._active:
            if not put.done.done():
                put.done.set_exception(fresh(error))

    def _send_chunk(self, sock: socket.socket) -> bool:
        """Takes a chunk and sends it; runs in a lane's thread."""
        chunk = self._take()
        if chunk is None:
            return False
        put = chunk.put
        try:
            views = put.views.cut(chunk.start, chunk.stop)
            num_bytes = chunk.stop - chunk.start
            header = PutHeader(
                token=put.token,
                offset=put.offset + chunk.start,
                num_bytes=num_bytes,
                sequence=chunk.sequence,
                checksum=checksum(views) if self._config.checksum else None,
            )
            send_views(sock, [encode_put(header), *views], PUT_HEADER_BYTES + num_bytes)
        finally:
            self._sent(put)
        return True

    def _take(self) -> _Chunk | None:
        with self._ready:
            while not self._waiting:
                if self._error is not None:
                    return None
                self._ready.wait()
            put = self._waiting.popleft()
            start = put.position
            put.position = put.views.fit(start, self._config.chunk_bytes, MAX_IOVECS - 1)
            if put.position == put.views.num_bytes:
                put.exhausted = True
            else:
                self._waiting.append(put)
            if self._waiting:
                self._ready.notify()
            put.num_sending += 1
            put.num_in_flight += 1
            chunk = _Chunk(put, next(self._sequences), start, put.position)
            self._in_flight[chunk.sequence] = chunk
            return chunk

    def _sent(self, put: _Put) -> None:
        with self._ready:
            put.num_sending -= 1
            quiet = put.withdrawn and not put.num_sending
        if quiet:
            self._threads.post(put.quiet.set)

    async def _retire(self, put: _Put) -> None:
        """Takes back what has not been sent, and waits for the threads that read the source."""
        with self._ready:
            put.withdrawn = True
            if put in self._waiting:
                self._waiting.remove(put)
            num_unsent = put.views.num_bytes - put.position
            if not put.num_sending:
                put.quiet.set()
        self._meter.dropped(num_unsent)
        stalled = self._loop.call_later(self._config.stall_timeout_s, self._on_stall)
        try:
            await _uninterrupted(put.quiet.wait())
        finally:
            stalled.cancel()

    def _on_stall(self) -> None:
        self._on_failure(
            TimeoutError(
                "the peer took nothing of a put that is given up "
                f"for {self._config.stall_timeout_s} s"
            )
        )

    def _on_answers(self, lane: Lane, decoder: FrameDecoder) -> None:
        try:
            data = lane.sock.recv(_ACK_BYTES, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionResetError("peer closed a data connection")
            for frame in decoder.feed(data):
                self._on_answer(frame)
        except BlockingIOError:
            return
        except (OSError, RemoteProtocolError) as error:
            self._on_failure(error)

    def _on_answer(self, frame: Frame) -> None:
        if frame.kind is Kind.ACK:
            sequence, reason = decode_ack(frame.body), None
        else:
            sequence, reason = decode_nack(frame.body)
        with self._ready:
            chunk = self._in_flight.pop(sequence, None)
            if chunk is None:
                raise RemoteProtocolError(f"peer answered PUT {sequence}, which is not in flight")
            put = chunk.put
            put.num_in_flight -= 1
            complete = put.exhausted and not put.num_in_flight
        num_bytes = chunk.stop - chunk.start
        self._meter.acknowledged(num_bytes, self._clock())
        if put.done.done():
            return
        if reason is not None:
            put.done.set_exception(put_error(reason, put.offset + chunk.start, num_bytes))
        elif complete:
            put.done.set_result(None)


async def _uninterrupted(work: Coroutine[object, object, object]) -> None:
    """Finishes ``work`` first if it is cancelled meanwhile, and is cancelled then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
