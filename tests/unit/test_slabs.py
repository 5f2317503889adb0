"""Geometry of a pool, and the allocator of its units."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache import PoolGeometry, SlabAllocator
from prfaas.core import BlockId, GroupId
from prfaas.errors import CapacityError, ConfigError, LocalProtocolError
from prfaas.spec import PRESETS, preset
from strategies import BLOCK_SIZE, FULL, LAYERS, LINEAR, small_geometry, small_spec

FULL_GROUP, LINEAR_GROUP = GroupId(0), GroupId(1)


def test_units_of_a_hybrid_pool() -> None:
    blocks, slots = small_geometry().units
    assert (blocks.unit_bytes, blocks.unit_stride_bytes, blocks.units_per_slab) == (64, 64, 4)
    assert (slots.unit_bytes, slots.unit_stride_bytes, slots.units_per_slab) == (80, 128, 2)
    assert blocks.row_bytes == FULL.row_bytes
    assert slots.row_bytes is None


@pytest.mark.parametrize("layers", LAYERS)
def test_layers_of_all_units_are_disjoint_aligned_and_inside_their_slab(layers: tuple) -> None:
    geometry = small_geometry(layers, num_slabs=5)
    for group, unit in zip(geometry.spec.groups, geometry.units, strict=True):
        spans = []
        for block_id in range(geometry.num_slabs * unit.units_per_slab):
            for position in range(group.num_layers):
                if group.is_token_kind:
                    span = geometry.layer_span(
                        group.group_id, BlockId(block_id), position, 0, BLOCK_SIZE
                    )
                    assert span[1] == BLOCK_SIZE * group.layer_spec.row_bytes
                else:
                    span = geometry.slot_span(group.group_id, BlockId(block_id), position)
                    assert span[1] == group.layer_spec.slot_bytes
                assert span[0] % 64 == 0
                slab = block_id // unit.units_per_slab
                assert slab * geometry.slab_bytes <= span[0]
                assert sum(span) <= (slab + 1) * geometry.slab_bytes
                spans.append(span)
        for (offset, num_bytes), (following, _) in itertools.pairwise(spans):
            assert offset + num_bytes <= following


def test_rows_lie_back_to_back_and_layers_at_a_fixed_distance() -> None:
    geometry = small_geometry((FULL, FULL, LINEAR))
    start, _ = geometry.layer_span(FULL_GROUP, BlockId(3), 0, 0, 1)
    assert geometry.layer_span(FULL_GROUP, BlockId(3), 0, 2, 2) == (start + 32, 32)
    assert geometry.layer_span(FULL_GROUP, BlockId(3), 1, 2, 2) == (start + 64 + 32, 32)


@pytest.mark.parametrize(
    ("block", "layer", "first", "rows"),
    [(0, 0, 0, 5), (0, 0, -1, 2), (0, 0, 4, 1), (0, 0, 0, -1), (0, 1, 0, 1), (0, -1, 0, 1),
     (64, 0, 0, 1), (-1, 0, 0, 1)],
)  # fmt: skip
def test_rows_outside_a_block_or_the_pool_are_refused(
    block: int, layer: int, first: int, rows: int
) -> None:
    with pytest.raises(ConfigError):
        small_geometry().layer_span(FULL_GROUP, BlockId(block), layer, first, rows)


def test_the_kinds_of_groups_are_not_mixed_up() -> None:
    geometry = small_geometry()
    with pytest.raises(ConfigError, match="only token groups"):
        geometry.layer_span(LINEAR_GROUP, BlockId(0), 0, 0, 1)
    with pytest.raises(ConfigError, match="only slot groups"):
        geometry.slot_span(FULL_GROUP, BlockId(0), 0)
    with pytest.raises(ConfigError, match="1 layers"):
        geometry.slot_span(LINEAR_GROUP, BlockId(0), 1)


def test_for_spec_wastes_little_on_every_public_model() -> None:
    for name in PRESETS:
        spec = preset(name)
        geometry = PoolGeometry.for_spec(spec, block_size=64, pool_bytes=64 << 30)
        assert geometry.slab_bytes >= 1 << 20
        for unit in geometry.units:
            used = unit.units_per_slab * unit.unit_bytes
            assert used >= 0.97 * geometry.slab_bytes, (name, unit)
        assert geometry.pool_bytes >= 0.97 * (64 << 30)


def test_for_spec_gives_a_small_pool_several_slabs_per_group() -> None:
    geometry = PoolGeometry.for_spec(small_spec(), block_size=4, pool_bytes=8192)
    assert geometry.num_slabs >= 8
    assert geometry.pool_bytes <= 8192


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 6}, "block_size is 6 tokens; it must be a multiple of the 4-token granule"),
        ({"block_size": 0}, "block_size is 0"),
        ({"pool_bytes": 200}, "1 slabs of 128 bytes .* 2 KV cache groups.* at least 256"),
        ({"pool_bytes": 0}, "0 slabs"),
        ({"slab_bytes": 64}, "slab_bytes is 64; .* at least 128"),
        ({"slab_bytes": 130}, "multiple of 64"),
        ({"slab_bytes": 0}, "slab_bytes is 0"),
    ],
)
def test_for_spec_refuses_with_numbers(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PoolGeometry.for_spec(small_spec(), **{"block_size": 4, "pool_bytes": 8192, **arguments})


def test_h03_a_block_that_can_never_be_complete_is_refused() -> None:
    spec = small_spec()
    with pytest.raises(ConfigError, match="8320 tokens and max_tokens is 4096"):
        PoolGeometry.for_spec(spec, block_size=8320, pool_bytes=1 << 20, max_tokens=4096)
    PoolGeometry.for_spec(spec, block_size=4096, pool_bytes=1 << 20, max_tokens=4096)


def test_a_slab_serves_one_group_and_returns_with_its_last_unit() -> None:
    allocator = SlabAllocator(small_geometry(num_slabs=2))
    blocks = allocator.allocate(FULL_GROUP, 3)
    slots = allocator.allocate(LINEAR_GROUP, 1)
    assert {block // 4 for block in blocks}.isdisjoint(slot // 2 for slot in slots)
    assert allocator.num_free_slabs == 0
    assert allocator.free(FULL_GROUP, blocks[:2]) == ()
    assert allocator.free(FULL_GROUP, blocks[2:]) == (blocks[0] // 4,)
    assert allocator.num_free_slabs == 1
    assert allocator.allocate(LINEAR_GROUP, 3)
    allocator.check()


def test_partly_used_slabs_are_filled_first() -> None:
    allocator = SlabAllocator(small_geometry(num_slabs=4))
    first = allocator.allocate(FULL_GROUP, 5)
    allocator.free(FULL_GROUP, first[1:3])
    assert set(allocator.allocate(FULL_GROUP, 5)) == {*first[1:3], *range(5, 8)}
    assert allocator.num_free_slabs == 2


def test_neighbouring_blocks_are_handed_out_in_order() -> None:
    blocks = SlabAllocator(small_geometry()).allocate(FULL_GROUP, 6)
    assert blocks == tuple(range(6))


def test_allocation_is_all_or_nothing() -> None:
    allocator = SlabAllocator(small_geometry(num_slabs=2))
    before = repr(allocator)
    with pytest.raises(CapacityError, match="3 more slabs, 2 of 2 are free"):
        allocator.allocate_many({FULL_GROUP: 5, LINEAR_GROUP: 1})
    with pytest.raises(CapacityError):
        allocator.allocate(FULL_GROUP, 9)
    with pytest.raises(ConfigError):
        allocator.allocate_many({FULL_GROUP: 1, LINEAR_GROUP: -1})
    assert repr(allocator) == before
    assert not allocator.can_allocate({FULL_GROUP: 9})
    assert allocator.can_allocate({FULL_GROUP: 8})
    assert len(allocator.allocate(FULL_GROUP, 8)) == 8
    allocator.check()


def test_a_double_free_is_refused_before_anything_changes() -> None:
    allocator = SlabAllocator(small_geometry())
    blocks = allocator.allocate(FULL_GROUP, 3)
    allocator.free(FULL_GROUP, blocks[:1])
    before = repr(allocator)
    for wrong in (blocks[:2], (blocks[1], blocks[1]), (BlockId(60),)):
        with pytest.raises(LocalProtocolError, match="freed twice or were never allocated"):
            allocator.free(FULL_GROUP, wrong)
    with pytest.raises(LocalProtocolError):
        allocator.free(LINEAR_GROUP, blocks[1:2])
    assert repr(allocator) == before
    allocator.check()


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 7), st.booleans())))
def test_units_are_never_handed_out_twice(steps: list[tuple[int, int, bool]]) -> None:
    geometry = small_geometry(num_slabs=3)
    allocator = SlabAllocator(geometry)
    held: dict[GroupId, list[BlockId]] = {FULL_GROUP: [], LINEAR_GROUP: []}
    for group, amount, is_free in steps:
        group_id = GroupId(group)
        if is_free:
            allocator.free(group_id, held[group_id][:amount])
            del held[group_id][:amount]
        elif allocator.can_allocate({group_id: amount}):
            held[group_id] += allocator.allocate(group_id, amount)
        allocator.check()
        offsets = set()
        for group_id, blocks in held.items():
            assert allocator.taken(group_id) == set(blocks)
            size = geometry.units[group_id].unit_stride_bytes
            for block in blocks:
                start = geometry.unit_offset(group_id, block)
                offsets.update(range(start, start + size, 64))
        assert len(offsets) * 64 == sum(
            len(blocks) * geometry.units[g].unit_stride_bytes for g, blocks in held.items()
        )
