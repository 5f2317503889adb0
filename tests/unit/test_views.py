"""Lists of views against the plain concatenation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from prfaas.errors import ConfigError
from prfaas.seams.transport import Memory, Span
from prfaas.testing.transport import host_memory
from prfaas.transport.inproc import copy_views
from prfaas.transport.views import SpanViews, advance, checksum

SIZE = 300
BUFFER = bytearray(random.Random(0).randbytes(SIZE))
SPANS = st.lists(
    st.tuples(st.integers(0, SIZE), st.integers(0, 60)).filter(lambda s: sum(s) <= SIZE),
    max_size=12,
).map(lambda spans: [Span(*span) for span in spans])


def joined(spans: list[Span]) -> bytes:
    return b"".join(BUFFER[s.offset : s.offset + s.num_bytes] for s in spans)


@given(SPANS, st.data())
def test_cut_is_a_slice_of_the_concatenation(spans: list[Span], data: st.DataObject) -> None:
    whole = joined(spans)
    views = SpanViews(host_memory(BUFFER), spans, writable=False)
    assert views.num_bytes == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    cut = views.cut(start, stop)
    assert b"".join(cut) == whole[start:stop]
    assert all(len(view) for view in cut)
    assert checksum(cut) == xxh3_64_intdigest(whole[start:stop])
    num_bytes = data.draw(st.integers(0, stop - start))
    assert b"".join(advance(cut, num_bytes)) == whole[start + num_bytes : stop]


@given(SPANS, st.integers(1, 100), st.integers(1, 4))
def test_fit_cuts_everything_once_within_both_limits(
    spans: list[Span], max_bytes: int, max_views: int
) -> None:
    views = SpanViews(host_memory(BUFFER), spans, writable=False)
    start, pieces = 0, []
    while start < views.num_bytes:
        stop = views.fit(start, max_bytes, max_views)
        cut = views.cut(start, stop)
        assert 0 < stop - start <= max_bytes
        assert len(cut) <= max_views
        pieces += cut
        start = stop
    assert views.fit(start, max_bytes, max_views) == start
    assert b"".join(pieces) == joined(spans)


@given(SPANS, SPANS)
def test_copy_from_any_cut_to_any_other(source: list[Span], target: list[Span]) -> None:
    data = joined(source)
    size = min(len(data), sum(s.num_bytes for s in target))
    buffer = bytearray(sum(s.num_bytes for s in target))
    places, at = [], 0
    for span in target:
        places.append(Span(at, span.num_bytes))
        at += span.num_bytes
    into = SpanViews(host_memory(buffer), places, writable=True)
    copy_views(
        into.cut(0, size), SpanViews(host_memory(BUFFER), source, writable=False).cut(0, size)
    )
    assert buffer == data[:size].ljust(len(buffer), b"\0")


def test_memory_that_cannot_be_used_says_why() -> None:
    read_only = Memory(address=0, num_bytes=4, buffer=memoryview(b"abcd"))
    SpanViews(read_only, [Span(0, 4)], writable=False)
    words = memoryview(bytearray(8)).cast("I")
    for memory, said in (
        (read_only, "read-only"),
        (Memory(address=1, num_bytes=4, device="cuda:0"), "memory on cuda:0 has no host buffer"),
        (Memory(address=1, num_bytes=8, buffer=words), r"cast\('B'\)"),
        (Memory(address=1, num_bytes=8, buffer=memoryview(bytearray(16))[::2]), r"cast\('B'\)"),
        (Memory(address=1, num_bytes=9, buffer=memoryview(bytearray(8))), "only 8 bytes"),
    ):
        with pytest.raises(ConfigError, match=said):
            SpanViews(memory, [], writable=True)
