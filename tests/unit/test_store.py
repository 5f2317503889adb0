"""The bytes behind block ids and slots."""

from __future__ import annotations

import ctypes
import mmap
import resource

import attrs
import pytest

from prfaas.cache import PagedHybridCache, PoolGeometry
from prfaas.core import BlockId, GroupId, RequestId
from prfaas.errors import ConfigError, LocalProtocolError
from prfaas.seams import PrefixMatch
from prfaas.store import HostArena, PoolMemory
from strategies import BLOCK_SIZE, FULL, LATENT, LINEAR, chain_of, small_geometry, small_spec

LAYERS = (LINEAR, FULL, None, LINEAR, FULL, LATENT)
STATE = GroupId(2)


def make_pool(num_slabs: int = 8) -> PoolMemory:
    geometry = attrs.evolve(small_geometry(LAYERS), slab_bytes=512, num_slabs=num_slabs)
    return PoolMemory(HostArena(geometry.pool_bytes), geometry)


def test_an_arena_is_zeroed_page_aligned_memory_at_its_address() -> None:
    arena = HostArena(3 * mmap.PAGESIZE + 5)
    memory = arena.memory
    assert memory.num_bytes == len(memory.buffer) == 3 * mmap.PAGESIZE + 5
    assert memory.address % mmap.PAGESIZE == 0
    assert bytes(memory.buffer) == bytes(memory.num_bytes)
    memory.buffer[-3:] = b"end"
    assert ctypes.string_at(memory.address + memory.num_bytes - 3, 3) == b"end"
    assert memory.device == "cpu"


def test_an_arena_costs_no_page_faults_later() -> None:
    num_pages = 1024
    view = HostArena(num_pages * mmap.PAGESIZE).memory.buffer
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for page in range(num_pages):
        view[page * mmap.PAGESIZE] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < num_pages // 4


def test_a_closed_arena_says_so_and_leaves_views_alone() -> None:
    pool = make_pool()
    view = pool.view(0, 8)
    arena = pool._arena
    arena.close()
    arena.close()
    view[:] = b"survives"
    with pytest.raises(LocalProtocolError, match="closed"):
        _ = arena.memory
    assert repr(arena) == "<HostArena closed>"


def test_a_closed_arena_keeps_no_view_of_its_pages() -> None:
    arena = HostArena(mmap.PAGESIZE)
    pages = arena.memory.buffer.obj
    with pytest.raises(BufferError):
        pages.close()
    arena.close()
    pages.close()


@pytest.mark.parametrize("num_bytes", [0, -1, 1 << 62])
def test_an_impossible_arena_is_refused(num_bytes: int) -> None:
    with pytest.raises(ConfigError, match=str(num_bytes)):
        HostArena(num_bytes)


def test_a_pool_must_fit_its_arena() -> None:
    geometry = small_geometry(num_slabs=2)
    with pytest.raises(ConfigError, match="takes 512 bytes, the arena has 511"):
        PoolMemory(HostArena(511), geometry)


def test_every_byte_of_an_entry_has_its_own_place() -> None:
    """Writes a different pattern per layer and token or state, then reads everything back."""
    pool = make_pool()
    cache = PagedHybridCache(pool.geometry)
    entries = {}
    for number, num_tokens in enumerate((11, 4, 1)):
        request = RequestId(f"r{number}")
        reservation = cache.reserve(
            request, num_tokens, PrefixMatch(), now=0.0, checkpoints=[8][: num_tokens // 8]
        )
        entries[number] = reservation, pool.entry(reservation)
    written: list[tuple[memoryview, bytes]] = []
    for number, (reservation, entry) in entries.items():
        for layer in (1, 4, 5):
            for span in entry.rows(layer, 0, reservation.num_tokens):
                pattern = bytes([1 + 16 * number + layer, span.first_token]) * len(span.data)
                span.data[:] = pattern[: len(span.data)]
                written.append((span.data, bytes(span.data)))
        for layer in (0, 3):
            for place, slots in {0: reservation.tail_slots, **reservation.checkpoint_slots}.items():
                state = entry.slot(layer, slots)
                state[:] = bytes([100 + 16 * number + layer + place]) * len(state)
                written.append((state, bytes(state)))
    for view, expected in written:
        assert bytes(view) == expected
    assert sum(len(view) for view, _ in written) == 16 * 3 * 16 + 4 * 2 * 80


def test_rows_come_block_by_block_in_order() -> None:
    pool = make_pool()
    cache = PagedHybridCache(pool.geometry)
    entry = pool.entry(cache.reserve(RequestId("a"), 10, PrefixMatch(), now=0.0))
    spans = entry.rows(4, 2, 9)
    assert [(span.first_token, span.num_rows) for span in spans] == [(2, 2), (4, 4), (8, 1)]
    assert all(len(span.data) == span.num_rows * FULL.row_bytes for span in spans)
    assert entry.rows(4, 3, 3) == []
    whole = entry.rows(4, 0, 10)
    whole[1].data[:] = b"x" * len(whole[1].data)
    assert bytes(spans[1].data) == b"x" * 64


def test_what_is_outside_an_entry_is_refused() -> None:
    pool = make_pool()
    cache = PagedHybridCache(pool.geometry)
    reservation = cache.reserve(RequestId("a"), 10, PrefixMatch(), now=0.0)
    entry = pool.entry(reservation)
    for start, stop in ((0, 13), (-1, 2), (5, 4)):
        with pytest.raises(ConfigError, match="outside its 3 reserved blocks"):
            entry.rows(1, start, stop)
    with pytest.raises(ConfigError, match="layer 2 has no cache"):
        entry.rows(2, 0, 1)
    with pytest.raises(ConfigError, match="outside its 0 reserved blocks"):
        entry.rows(0, 0, 1)
    with pytest.raises(ConfigError, match="slots name"):
        entry.slot(0, {})
    with pytest.raises(ConfigError):
        entry.slot(1, {GroupId(0): BlockId(0)})


def test_h05_a_dirty_slot_is_cleared_in_every_layer_and_nowhere_else() -> None:
    pool = make_pool()
    cache = PagedHybridCache(pool.geometry)
    pool.memory.buffer[:] = b"\x01" * pool.memory.num_bytes
    hashes = chain_of([1] * BLOCK_SIZE)
    first = cache.reserve(RequestId("a"), 5, PrefixMatch(), now=0.0)
    cache.commit(RequestId("a"), hashes, 5, 0.0)
    cache.release(RequestId("a"))
    second = cache.reserve(RequestId("b"), 5, PrefixMatch(), now=0.0)
    slot = second.tail_slots[STATE]
    assert slot == first.tail_slots[STATE]
    assert second.resume_slots == {}
    entry = pool.entry(second)
    assert bytes(entry.slot(0, second.tail_slots)) == b"\x01" * LINEAR.slot_bytes
    pool.zero(STATE, slot)
    for layer in (0, 3):
        assert bytes(entry.slot(layer, second.tail_slots)) == bytes(LINEAR.slot_bytes)
    zeros = bytes(pool.memory.buffer).count(0)
    assert zeros == 2 * LINEAR.slot_bytes


def test_a_pool_of_a_model_with_larger_blocks_than_granules() -> None:
    geometry = PoolGeometry.for_spec(small_spec(LAYERS), block_size=12, pool_bytes=1 << 16)
    pool = PoolMemory(HostArena(1 << 16), geometry)
    reservation = PagedHybridCache(geometry).reserve(RequestId("a"), 30, PrefixMatch(), now=0.0)
    spans = pool.entry(reservation).rows(1, 0, 30)
    assert [span.num_rows for span in spans] == [12, 12, 6]
    assert sum(len(span.data) for span in spans) == 30 * FULL.row_bytes
