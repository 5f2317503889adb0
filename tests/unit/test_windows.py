"""Who may write where, and when a window is quiet."""

from __future__ import annotations

import threading

import attrs
import pytest

from prfaas.errors import IntegrityError, LocalProtocolError, PutRefused
from prfaas.seams.transport import Span, WindowRef
from prfaas.testing.transport import host_memory
from prfaas.transport.views import SpanViews
from prfaas.transport.windows import WindowTable, check_bounds, put_error
from prfaas.wire.frames import NackReason


@attrs.define
class Opened:
    table: WindowTable = attrs.field(factory=WindowTable)
    buffer: bytearray = attrs.field(factory=lambda: bytearray(100))
    idle: list[str] = attrs.field(factory=list)

    def expose(self) -> WindowRef:
        spans = [Span(90, 10), Span(0, 20)]
        return self.table.expose(SpanViews(host_memory(self.buffer), spans, writable=True))


def test_tokens_are_new_and_long() -> None:
    case = Opened()
    tokens = {case.expose().token for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {16}


def test_a_put_lands_where_the_window_lies() -> None:
    case = Opened()
    ref = case.expose()
    assert ref.num_bytes == 30
    found = case.table.begin(ref.token, 5, 10)
    assert not isinstance(found, NackReason)
    window, views = found
    for view, data in zip(views, (b"aaaaa", b"bbbbb"), strict=True):
        view[:] = data
    assert case.buffer == b"bbbbb" + bytes(90) + b"aaaaa"
    assert repr(case.table) == "<WindowTable 1 windows, 1 writers>"
    case.table.finish(ref.token, window)
    assert repr(case.table) == "<WindowTable 1 windows, 0 writers>"


def test_refusals() -> None:
    case = Opened()
    ref = case.expose()
    for offset, num_bytes in ((0, 31), (30, 1), (31, 0), (2**64 - 1, 2**64 - 1)):
        assert case.table.begin(ref.token, offset, num_bytes) is NackReason.OUT_OF_BOUNDS
    assert case.table.begin(bytes(16), 0, 1) is NackReason.UNKNOWN_WINDOW
    assert not isinstance(case.table.begin(ref.token, 30, 0), NackReason)


def test_withdraw_is_over_when_the_last_writer_is() -> None:
    case = Opened()
    ref = case.expose()
    writers = [case.table.begin(ref.token, 0, 1) for _ in range(2)]
    case.table.withdraw(ref.token, lambda: case.idle.append("first"))
    case.table.withdraw(ref.token, lambda: case.idle.append("second"))
    assert case.table.begin(ref.token, 0, 1) is NackReason.UNKNOWN_WINDOW
    for found, idle in zip(writers, ([], ["first", "second"]), strict=True):
        assert not isinstance(found, NackReason)
        case.table.finish(ref.token, found[0])
        assert case.idle == idle
    case.table.withdraw(ref.token, lambda: case.idle.append("third"))
    assert case.idle == ["first", "second", "third"]
    assert repr(case.table) == "<WindowTable 0 windows, 0 writers>"


def test_a_window_without_writers_is_withdrawn_at_once() -> None:
    case = Opened()
    ref = case.expose()
    case.table.withdraw(ref.token, lambda: case.idle.append("now"))
    assert case.idle == ["now"]
    assert case.table.begin(ref.token, 0, 1) is NackReason.UNKNOWN_WINDOW


def test_no_thread_writes_after_a_withdraw() -> None:
    case = Opened()
    for _ in range(50):
        ref, over, late = case.expose(), threading.Event(), []

        def write(
            ref: WindowRef = ref, over: threading.Event = over, late: list[int] = late
        ) -> None:
            for _ in range(20):
                found = case.table.begin(ref.token, 0, 5)
                if isinstance(found, NackReason):
                    return
                late.append(over.is_set())
                case.table.finish(ref.token, found[0])

        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()
        case.table.withdraw(ref.token, over.set)
        for thread in threads:
            thread.join()
        assert over.is_set()
        assert not any(late)


def test_reasons_become_errors() -> None:
    assert isinstance(put_error(NackReason.CHECKSUM, 0, 1), IntegrityError)
    for reason in (NackReason.UNKNOWN_WINDOW, NackReason.OUT_OF_BOUNDS):
        assert isinstance(put_error(reason, 0, 1), PutRefused)


def test_bounds_are_checked_before_anything_is_sent() -> None:
    ref = WindowRef(bytes(16), 10)
    check_bounds(ref, 3, 7)
    for offset, num_bytes in ((-1, 1), (4, 7), (11, 0)):
        with pytest.raises(PutRefused, match="window of 10 bytes"):
            check_bounds(ref, offset, num_bytes)
    with pytest.raises(LocalProtocolError, match="tokens have 16"):
        check_bounds(WindowRef(b"short", 10), 0, 1)
