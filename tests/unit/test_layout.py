"""The wire form of an entry, and its place in a pool."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pools import FULL, HYBRID, MLA, STATE, WINDOW, Pool, gather, scatter, tiny_spec
from prfaas.cache.geometry import PoolGeometry
from prfaas.core import BlockId, DType, GroupId
from prfaas.errors import ConfigError
from prfaas.seams.transport import Span
from prfaas.spec import FullAttentionSpec, LayerSpec, LinearStateSpec, ModelSpec, preset
from prfaas.transfer import EntryLayout, EntryPlace, Geometry, place

SHORT_CONV = LinearStateSpec.delta_rule(
    num_heads=0, key_dim=1, value_dim=1, conv_channels=3, conv_columns=2
)
LAYERS = st.lists(
    st.sampled_from([FULL, MLA, WINDOW, STATE, SHORT_CONV, None]), min_size=1, max_size=7
)
SPECS = LAYERS.filter(any).map(lambda layers: tiny_spec(*layers))


@st.composite
def layouts(draw: st.DrawFn) -> EntryLayout:
    num_tokens = draw(st.integers(0, 40))
    return EntryLayout(draw(SPECS), num_tokens, draw(st.integers(0, num_tokens)))


@given(layouts())
def test_parts_tile_the_entry_group_by_group(layout: EntryLayout) -> None:
    num_tokens, start_token = layout.num_tokens, layout.start_token
    assert layout.num_bytes == layout.spec.kv_bytes_delta(num_tokens, start_token)
    offset = 0
    order = []
    for part in layout.parts:
        assert part.offset == offset
        assert layout.part(part.layer_index) is part
        group = layout.spec.groups[part.group_id]
        assert group.layer_indices[part.layer_position] == part.layer_index
        spec = layout.spec.layers[part.layer_index]
        assert spec is not None
        held = spec.entry_bytes(start_token) if spec.is_token_kind else 0
        assert part.num_bytes == spec.entry_bytes(num_tokens) - held
        order.append((part.group_id, part.layer_index))
        offset += part.num_bytes
    assert offset == layout.num_bytes
    assert order == sorted(order)
    assert len(order) == sum(layer is not None for layer in layout.spec.layers)


@given(layouts(), st.data())
def test_ranges_of_rows_and_states_are_where_the_parts_say(
    layout: EntryLayout, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, layout.num_tokens))
    stop = data.draw(st.integers(first, layout.num_tokens))
    for part in layout.parts:
        if part.row_bytes is None:
            assert layout.state_range(part.layer_index) == (part.offset, part.num_bytes)
            continue
        offset, num_bytes = layout.rows_range(part.layer_index, first, stop)
        shipped = [t for t in range(first, stop) if t >= layout.start_token]
        assert num_bytes == len(shipped) * part.row_bytes
        if shipped:
            assert offset == part.offset + (shipped[0] - layout.start_token) * part.row_bytes


@given(layouts(), st.data())
def test_parts_in_a_range_are_those_that_share_a_byte_with_it(
    layout: EntryLayout, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, layout.num_bytes))
    num_bytes = data.draw(st.integers(0, layout.num_bytes - offset))
    touched = set(range(offset, offset + num_bytes))
    expected = tuple(
        part
        for part in layout.parts
        if touched & set(range(part.offset, part.offset + part.num_bytes))
    )
    assert layout.parts_in(offset, num_bytes) == expected


def test_wrong_questions_are_refused() -> None:
    layout = EntryLayout(HYBRID, 19, 8)
    with pytest.raises(ConfigError, match="layer 3 has no cache"):
        layout.part(3)
    with pytest.raises(ConfigError, match="use state_range"):
        layout.rows_range(0, 0, 1)
    with pytest.raises(ConfigError, match="use rows_range"):
        layout.state_range(2)
    with pytest.raises(ConfigError, match=r"\[5, 20\) are not inside the entry's 19"):
        layout.rows_range(2, 5, 20)
    with pytest.raises(ConfigError, match="not inside"):
        layout.parts_in(layout.num_bytes, 1)
    with pytest.raises(ConfigError, match="num_held_tokens is 20"):
        EntryLayout(HYBRID, 19, 20)
    with pytest.raises(ConfigError, match="num_tokens is -1"):
        EntryLayout(HYBRID, -1)


@given(layouts(), st.sampled_from([4, 8, 12, 16]), st.integers(0, 2**32), st.data())
def test_spans_are_the_bytes_of_the_layers_in_order(
    layout: EntryLayout, block_size: int, seed: int, data: st.DataObject
) -> None:
    """The truth is spelled out row by row."""
    pool = Pool(layout.spec, layout.num_tokens, block_size, 0, random.Random(seed))
    pool.memory[:] = random.Random(seed + 1).randbytes(len(pool.memory))
    truth = b""
    for part in layout.parts:
        if part.row_bytes is None:
            slot = pool.slots[part.group_id]
            offset, _ = pool.geometry.slot_span(part.group_id, slot, part.layer_position)
            truth += pool.memory[offset : offset + part.num_bytes]
            continue
        for token in range(layout.start_token, layout.num_tokens):
            block = pool.tables[part.group_id][token // block_size]
            offset, size = pool.geometry.layer_span(
                part.group_id, block, part.layer_position, token % block_size, 1
            )
            truth += pool.memory[offset : offset + size]

    placed = pool.place(layout)
    whole = placed.spans_all()
    assert gather(pool.memory, whole) == truth
    offset = data.draw(st.integers(0, layout.num_bytes))
    num_bytes = data.draw(st.integers(0, layout.num_bytes - offset))
    spans = placed.spans(offset, num_bytes)
    assert gather(pool.memory, spans) == truth[offset : offset + num_bytes]
    for some in (whole, spans):
        assert all(span.num_bytes > 0 for span in some)
        ends = [span.offset + span.num_bytes for span in some]
        assert all(end != span.offset for end, span in zip(ends, some[1:], strict=False))


@given(layouts(), st.permutations([4, 8, 16]), st.integers(0, 2**32), st.integers(1, 64))
def test_entries_are_equal_on_the_wire_for_any_two_block_sizes(
    layout: EntryLayout, block_sizes: list[int], seed: int, chunk_bytes: int
) -> None:
    rng = random.Random(seed)
    pools = [Pool(layout.spec, layout.num_tokens, size, size, rng) for size in block_sizes[:2]]
    entry = rng.randbytes(layout.num_bytes)
    scatter(pools[0].memory, pools[0].place(layout).spans_all(), entry)
    for offset in range(0, layout.num_bytes, chunk_bytes):
        num_bytes = min(chunk_bytes, layout.num_bytes - offset)
        pools[1].write(layout, offset, pools[0].read(layout, offset, num_bytes))
    assert gather(pools[1].memory, pools[1].place(layout).spans_all()) == entry


def test_block_sizes_64_and_128_exchange_a_long_entry() -> None:
    attention = FullAttentionSpec(num_kv_heads=1, key_dim=2, value_dim=2, dtype=DType.BFLOAT16)
    spec = ModelSpec(name="long", layers=(attention, STATE, attention, WINDOW, STATE))
    layout = EntryLayout(spec, 1000, 64)
    entry = random.Random(1).randbytes(layout.num_bytes)
    places, memories = [], []
    for block_size in (64, 128):
        geometry = PoolGeometry.for_spec(spec, block_size=block_size, pool_bytes=1 << 16)
        blocks = [BlockId(b) for b in random.Random(block_size).sample(range(16), 16)]
        # Slot groups take slabs that no block of the ids above lies in.
        slots = {
            g: BlockId((geometry.num_slabs - 1 - g) * geometry.units[g].units_per_slab)
            for g in geometry.slot_groups
        }
        places.append(place(layout, geometry, {GroupId(0): blocks}, slots))
        memories.append(bytearray(geometry.pool_bytes))
    scatter(memories[0], places[0].spans_all(), entry)
    wire = gather(memories[0], places[0].spans_all())
    scatter(memories[1], places[1].spans_all(), wire)
    assert gather(memories[1], places[1].spans_all()) == entry


def test_adjacent_spans_are_merged() -> None:
    spec = tiny_spec(FULL)
    geometry = PoolGeometry.for_spec(spec, block_size=64, pool_bytes=1 << 14)
    layout = EntryLayout(spec, 300, 10)
    (group,) = spec.groups
    unit = geometry.units[0]
    assert unit.layer_bytes == unit.unit_stride_bytes
    table = [BlockId(b) for b in (3, 4, 5, 9, 8)]
    placed = place(layout, geometry, {group.group_id: table}, {})
    row = group.row_bytes
    assert placed.spans_all() == [
        Span(geometry.unit_offset(group.group_id, BlockId(3)) + 10 * row, (3 * 64 - 10) * row),
        Span(geometry.unit_offset(group.group_id, BlockId(9)), 64 * row),
        Span(geometry.unit_offset(group.group_id, BlockId(8)), (300 - 256) * row),
    ]


def test_layers_that_lie_side_by_side_are_one_span() -> None:
    row_of_16 = FullAttentionSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype=DType.FLOAT8)
    spec = tiny_spec(row_of_16, row_of_16, row_of_16)
    layout = EntryLayout(spec, 4)
    pool = Pool(spec, 4, 4, 0, random.Random(0))
    start = pool.geometry.unit_offset(GroupId(0), pool.tables[GroupId(0)][0])
    assert pool.place(layout).spans_all() == [Span(start, 3 * 4 * 16)]
    assert pool.place(layout).spans(60, 10) == [Span(start + 60, 10)]


def test_an_empty_part_in_the_middle_is_in_no_range() -> None:
    layout = EntryLayout(tiny_spec(STATE, WINDOW, SHORT_CONV), 0)
    assert [part.num_bytes > 0 for part in layout.parts] == [True, False, True]
    assert layout.parts_in(0, layout.num_bytes) == (layout.parts[0], layout.parts[2])
    pool = Pool(layout.spec, 0, 4, 0, random.Random(0))
    assert all(span.num_bytes for span in pool.place(layout).spans_all())


def test_an_entry_of_no_tokens_needs_no_blocks() -> None:
    layout = EntryLayout(HYBRID, 0)
    pool = Pool(HYBRID, 0, 4, 0, random.Random(0))
    placed = place(layout, pool.geometry, {GroupId(0): [], GroupId(1): []}, pool.slots)
    assert sum(span.num_bytes for span in placed.spans_all()) == layout.num_bytes > 0


def test_a_sliding_window_ships_its_valid_rows_only() -> None:
    spec = tiny_spec(WINDOW)
    for num_tokens, num_rows in ((0, 0), (1, 1), (6, 6), (40, 6)):
        layout = EntryLayout(spec, num_tokens, min(num_tokens, 5))
        assert layout.num_bytes == num_rows * WINDOW.row_bytes
        pool = Pool(spec, num_tokens, 4, 0, random.Random(0))
        sizes = [span.num_bytes for span in pool.place(layout).spans_all()]
        assert sizes == [num_rows * WINDOW.row_bytes][: num_rows > 0]


def test_a_place_needs_blocks_and_slots_of_every_group() -> None:
    layout = EntryLayout(HYBRID, 19)
    pool = Pool(HYBRID, 19, 8, 0, random.Random(0))
    with pytest.raises(ConfigError, match=r"group 0 \(full_attention\) has 2 blocks for 19 tokens"):
        place(layout, pool.geometry, {**pool.tables, GroupId(0): pool.tables[GroupId(0)][:2]}, {})
    with pytest.raises(ConfigError, match=r"group 1 \(mla\) has 0 blocks"):
        place(layout, pool.geometry, {GroupId(0): pool.tables[GroupId(0)]}, pool.slots)
    slots = dict(pool.slots)
    del slots[GroupId(2)]
    with pytest.raises(ConfigError, match=r"group 2 \(linear_state\) has no slot"):
        place(layout, pool.geometry, pool.tables, slots)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"), [(FULL, MLA, "rows of group 0"), (WINDOW, STATE, "a slot of")]
)
def test_a_pool_of_another_model_is_refused(
    ours: LayerSpec, theirs: LayerSpec, message: str
) -> None:
    """Only a smaller unit can be told from the outside; a bigger slot has room."""
    small, big = sorted([ours, theirs], key=lambda layer: layer.entry_bytes(8))
    pool = Pool(tiny_spec(small), 8, 4, 0, random.Random(0))
    with pytest.raises(ConfigError, match=message):
        place(EntryLayout(tiny_spec(big), 8), pool.geometry, pool.tables, pool.slots)


def test_a_long_entry_of_a_real_model_is_placed_block_by_block() -> None:
    """As many spans as blocks times layers, and not one call of the pool per layer and block."""
    spec = preset("kimi-linear-48b")
    geometry = PoolGeometry.for_spec(spec, block_size=64, pool_bytes=8 << 30)
    layout = EntryLayout(spec, 131_072)
    blocks = {g: [BlockId(2 * b) for b in range(2048)] for g in geometry.token_groups}
    counting = CountingGeometry(geometry)
    slots = {g: BlockId(0) for g in geometry.slot_groups}
    placed: EntryPlace = place(layout, counting, blocks, slots)
    num_layers = sum(g.num_layers for g in spec.groups if g.is_token_kind)
    num_state_layers = sum(g.num_layers for g in spec.groups if not g.is_token_kind)
    spans = placed.spans_all()
    assert 2048 * num_layers <= len(spans) <= 2048 * num_layers + num_state_layers
    assert sum(span.num_bytes for span in spans) == layout.num_bytes
    assert counting.num_calls < 2048 + 200


class CountingGeometry(Geometry):
    def __init__(self, geometry: PoolGeometry) -> None:
        self._geometry = geometry
        self.num_calls = 0

    @property
    def block_size(self) -> int:
        return self._geometry.block_size

    def layer_span(
        self,
        group_id: GroupId,
        block_id: BlockId,
        layer_position: int,
        first_row: int,
        num_rows: int,
    ) -> tuple[int, int]:
        self.num_calls += 1
        return self._geometry.layer_span(group_id, block_id, layer_position, first_row, num_rows)

    def slot_span(
        self, group_id: GroupId, slot_id: BlockId, layer_position: int
    ) -> tuple[int, int]:
        self.num_calls += 1
        return self._geometry.slot_span(group_id, slot_id, layer_position)
