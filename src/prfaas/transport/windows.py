"""The windows that one channel has open: who may write where, and who is writing now."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

import attrs

from prfaas.errors import IntegrityError, LocalProtocolError, PutRefused, TransportError
from prfaas.seams.transport import WindowRef
from prfaas.transport.views import SpanViews
from prfaas.wire.frames import TOKEN_BYTES, NackReason


@attrs.define(eq=False)
class Window:
    """A window and its writers; owned by its `WindowTable`."""

    views: SpanViews
    landed_bytes: int = 0
    num_writers: int = 0
    on_idle: list[Callable[[], None]] | None = None  # a list once it is withdrawn


class WindowTable:
    """Windows by token. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[bytes, Window] = {}

    def __repr__(self) -> str:
        with self._lock:
            num_writers = sum(window.num_writers for window in self._windows.values())
            return f"<WindowTable {len(self._windows)} windows, {num_writers} writers>"

    def expose(self, views: SpanViews) -> WindowRef:
        """Opens a window under a new token that cannot be guessed."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._windows[token] = Window(views)
        return WindowRef(token, views.num_bytes)

    def begin(
        self, token: bytes, offset: int, num_bytes: int
    ) -> tuple[Window, list[memoryview]] | NackReason:
        """Destination of a put, or why there is none. A destination must be given to `finish`."""
        with self._lock:
            window = self._windows.get(token)
            if window is None or window.on_idle is not None:
                return NackReason.UNKNOWN_WINDOW
            if offset + num_bytes > window.views.num_bytes:
                return NackReason.OUT_OF_BOUNDS
            window.num_writers += 1
        return window, window.views.cut(offset, offset + num_bytes)

    def finish(self, token: bytes, window: Window, *, landed_bytes: int = 0) -> None:
        """The writer of a `begin` is done; ``landed_bytes`` stays 0 if its put failed."""
        with self._lock:
            window.landed_bytes += landed_bytes
            window.num_writers -= 1
            calls = self._take_idle_calls(token, window)
        for call in calls:
            call()

    def withdraw(self, token: bytes, on_idle: Callable[[], None]) -> Window | None:
        """Refuses further puts, and calls ``on_idle`` once when the last writer is done.

        The call comes from this thread or the writer's. Idempotent. Returns the window, whose
        count is final when ``on_idle`` is called; None if there is no such window any more.
        """
        with self._lock:
            window = self._windows.get(token)
            if window is None:
                calls = [on_idle]
            else:
                if window.on_idle is None:
                    window.on_idle = []
                window.on_idle.append(on_idle)
                calls = self._take_idle_calls(token, window)
        for call in calls:
            call()
        return window

    def _take_idle_calls(self, token: bytes, window: Window) -> list[Callable[[], None]]:
        if window.num_writers or window.on_idle is None:
            return []
        self._windows.pop(token, None)
        calls, window.on_idle = window.on_idle, []
        return calls


def put_error(reason: NackReason, offset: int, num_bytes: int) -> TransportError:
    """What the sender of a put raises for the receiver's reason."""
    where = f"put of {num_bytes} bytes at offset {offset}"
    if reason is NackReason.CHECKSUM:
        return IntegrityError(f"{where} arrived with another checksum than it left with; repeat it")
    if reason is NackReason.OUT_OF_BOUNDS:
        return PutRefused(f"{where} ends outside the peer's window; put within its num_bytes")
    return PutRefused(f"{where} names a window that the peer has not opened or has withdrawn")


def check_bounds(window: WindowRef, offset: int, num_bytes: int) -> None:
    """Raises PutRefused where the receiver would, before a byte is sent."""
    if offset < 0 or offset + num_bytes > window.num_bytes:
        raise PutRefused(
            f"put of {num_bytes} bytes at offset {offset} does not fit the window of "
            f"{window.num_bytes} bytes"
        )
    if len(window.token) != TOKEN_BYTES:
        raise LocalProtocolError(
            f"window token has {len(window.token)} bytes; tokens have {TOKEN_BYTES}: "
            "pass the WindowRef that the peer made"
        )
