"""Spans of host memory as lists of views: what gathering sends and scattering receives take."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from xxhash import xxh3_64

from prfaas.errors import ConfigError
from prfaas.seams.transport import Memory, Span

MAX_IOVECS = 1024
"""IOV_MAX of Linux and of the BSDs."""


class SpanViews:
    """The concatenation of spans of one memory, addressable by offset.

    Args:
        memory: must be host memory.
        spans: in order; may overlap and may be empty.
        writable: whether bytes will land in it.

    Raises: ConfigError for memory without a usable buffer and for spans outside it.
    """

    def __init__(self, memory: Memory, spans: Sequence[Span], *, writable: bool) -> None:
        buffer = _host_buffer(memory, writable=writable)
        size = memory.num_bytes
        views = []
        for span in spans:
            start, num_bytes = span.offset, span.num_bytes
            if start < 0 or num_bytes < 0 or start + num_bytes > size:
                raise ConfigError(
                    f"span of {num_bytes} bytes at {start} lies outside its memory of {size} bytes"
                )
            if num_bytes:
                views.append(buffer[start : start + num_bytes])
        self._views = views
        self._stops = list(accumulate(map(len, views)))

    @property
    def num_bytes(self) -> int:
        """Length of the concatenation."""
        return self._stops[-1] if self._stops else 0

    def fit(self, start: int, max_bytes: int, max_views: int) -> int:
        """Largest end of a `cut` from ``start`` that keeps both limits."""
        stops = self._stops
        if start == self.num_bytes:
            return start
        last = min(bisect_right(stops, start) + max_views, len(stops)) - 1
        return min(start + max_bytes, stops[last])

    def cut(self, start: int, stop: int) -> list[memoryview]:
        """Views of bytes [start, stop) of the concatenation, in order."""
        if start == stop:
            return []
        first = bisect_right(self._stops, start)
        last = bisect_left(self._stops, stop)
        views = self._views[first : last + 1]
        skip = start - (self._stops[first] - len(views[0]))
        views[-1] = views[-1][: len(views[-1]) - (self._stops[last] - stop)]
        views[0] = views[0][skip:]
        return views


def advance(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of ``views`` behind their first ``num_bytes`` bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


def checksum(views: Sequence[memoryview]) -> int:
    """xxh3_64 of the concatenation."""
    state = xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def _host_buffer(memory: Memory, *, writable: bool) -> memoryview:
    buffer = memory.buffer
    if buffer is None:
        raise ConfigError(
            f"memory on {memory.device} has no host buffer; this transport moves host memory only: "
            "stage it, or use a transport that reaches the device"
        )
    if buffer.format != "B" or buffer.ndim != 1 or not buffer.contiguous:
        raise ConfigError(
            f"memory buffer has format {buffer.format!r} and {buffer.ndim} dimensions; "
            "pass memoryview(...).cast('B')"
        )
    if len(buffer) < memory.num_bytes:
        raise ConfigError(
            f"memory of {memory.num_bytes} bytes has a buffer of only {len(buffer)} bytes"
        )
    if writable and buffer.readonly:
        raise ConfigError("memory buffer is read-only; a window needs a writable one")
    return buffer
