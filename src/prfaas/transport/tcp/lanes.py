"""Data connections and the threads that work on them."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from prfaas.errors import RemoteProtocolError
from prfaas.transport.tcp.sockets import hang_up

Step = Callable[[socket.socket], bool]
"""One piece of blocking work on a socket; False when there will be no more."""

_log = logging.getLogger(__name__)


class Lane:
    """A data connection: a blocking socket that the event loop and at most one thread hold.

    The last of them to let go closes it, so that its descriptor is never reused under the other.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self._num_holders = 1
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Lane fd {self.sock.fileno()}, {self._num_holders} holders>"

    def hold(self) -> None:
        with self._lock:
            self._num_holders += 1

    def release(self) -> None:
        with self._lock:
            self._num_holders -= 1
            last = not self._num_holders
        if last:
            self.sock.close()

    def hang_up(self) -> None:
        """Wakes the thread that is blocked in the socket, if there is one, with an error."""
        with self._lock:
            if self._num_holders:
                hang_up(self.sock)


class LaneThreads:
    """The threads of one channel. They are daemons, and end when their lane hangs up.

    Args:
        loop: where ``on_failure`` runs.
        on_failure: called with what ended a thread, if it was an error.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[Exception], None]
    ) -> None:
        self._loop = loop
        self._on_failure = on_failure
        self._threads: set[threading.Thread] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<LaneThreads {len(self._threads)} running>"

    def start(self, lane: Lane, step: Step) -> None:
        """Repeats ``step`` on the lane in a thread of its own. Call it from the loop."""
        lane.hold()
        thread = threading.Thread(target=self._run, args=(lane, step), daemon=True)
        thread.name = f"prfaas-tcp-{thread.name}"
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads for us
            lane.release()
            self.post(self._on_failure, error)
            return
        self._threads.add(thread)
        self._idle.clear()

    def post(self, call: Callable[..., object], *args: object) -> None:
        """Runs ``call`` in the loop; from any thread. Nothing happens once the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    async def ended(self) -> None:
        """Returns when no thread is left. Their lanes must have been hung up."""
        await self._idle.wait()

    def _run(self, lane: Lane, step: Step) -> None:
        try:
            while step(lane.sock):
                pass
        except (OSError, RemoteProtocolError) as error:
            self.post(self._on_failure, error.with_traceback(None))
        except Exception as error:
            _log.exception("a data connection failed in an unforeseen way; please report this")
            self.post(self._on_failure, error.with_traceback(None))
        finally:
            lane.release()
            self.post(self._forget, threading.current_thread())

    def _forget(self, thread: threading.Thread) -> None:
        thread.join()  # it is past its last instruction but for its own clean-up
        self._threads.discard(thread)
        if not self._threads:
            self._idle.set()
