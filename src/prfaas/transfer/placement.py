"""Where the bytes of a shipped entry lie in one side's pool."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs

from prfaas.core import BlockId, GroupId, cdiv
from prfaas.errors import ConfigError
from prfaas.seams.transport import Span
from prfaas.spec import KVCacheGroup
from prfaas.transfer.layout import EntryLayout


class Geometry(Protocol):
    """Where blocks and slots lie in a pool.

    Contract: a block holds its layers at fixed distances and the rows of a layer back to back, so
    ``layer_span(g, b, p, r, n)`` is ``start(g, b) + distance(g, p) + r * row_bytes``.
    """

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    def layer_span(
        self,
        group_id: GroupId,
        block_id: BlockId,
        layer_position: int,
        first_row: int,
        num_rows: int,
    ) -> tuple[int, int]:
        """(offset, bytes) of rows of one layer of a block."""
        ...

    def slot_span(
        self, group_id: GroupId, slot_id: BlockId, layer_position: int
    ) -> tuple[int, int]:
        """(offset, bytes) of one layer of a state slot."""
        ...


@attrs.frozen(eq=False, repr=False)
class _Runs:
    """Contiguous pieces of a layer.

    ``begins`` are in the layer's part, ``offsets`` in the pool for the group's first layer; every
    other layer lies at a fixed distance, so all layers of a group share one list.
    """

    begins: list[int]
    offsets: list[int]
    sizes: list[int]


class EntryPlace:
    """Memory spans of an entry in one pool, for any range of its wire form. Made by `place`."""

    __slots__ = ("_distances", "_runs", "layout")

    def __init__(
        self, layout: EntryLayout, runs: Sequence[_Runs], distances: Sequence[int]
    ) -> None:
        self.layout = layout
        self._runs = runs
        self._distances = distances

    def spans_all(self) -> list[Span]:
        """Spans of the whole entry, in wire order."""
        return self.spans(0, self.layout.num_bytes)

    def spans(self, offset: int, num_bytes: int) -> list[Span]:
        """Spans whose concatenation is a range of the entry; neighbours in memory are merged.

        Raises:
            ConfigError: the range is not inside the entry.
        """
        first, last = self.layout.part_indices(offset, num_bytes)
        spans: list[Span] = []
        for index in range(first, last):
            part = self.layout.parts[index]
            begin = max(offset - part.offset, 0)
            end = min(offset + num_bytes - part.offset, part.num_bytes)
            if begin < end:
                self._extend(spans, index, begin, end)
        return spans

    def _extend(self, spans: list[Span], index: int, begin: int, end: int) -> None:
        runs, distance = self._runs[index], self._distances[index]
        first = bisect_right(runs.begins, begin) - 1
        last = bisect_right(runs.begins, end - 1) - 1
        skipped = begin - runs.begins[first]
        offset = runs.offsets[first] + distance + skipped
        num_bytes = min(runs.sizes[first] - skipped, end - begin)
        if spans and spans[-1].offset + spans[-1].num_bytes == offset:
            before = spans.pop()
            offset, num_bytes = before.offset, before.num_bytes + num_bytes
        spans.append(Span(offset, num_bytes))
        if first < last:
            whole = slice(first + 1, last)
            spans += [
                Span(start + distance, size)
                for start, size in zip(runs.offsets[whole], runs.sizes[whole], strict=True)
            ]
            spans.append(Span(runs.offsets[last] + distance, end - runs.begins[last]))


def place(
    layout: EntryLayout,
    geometry: Geometry,
    block_tables: Mapping[GroupId, Sequence[BlockId]],
    slots: Mapping[GroupId, BlockId],
) -> EntryPlace:
    """Lays an entry over the blocks and slots of one side.

    Args:
        layout: what is shipped.
        geometry: the pool, with this side's own block size.
        block_tables: per token group, at least ``ceil(num_tokens / block_size)`` block ids.
        slots: per slot group, the slot of the state at ``num_tokens``.

    Raises:
        ConfigError: a group without blocks or slot, too few blocks, or a pool of another model.
    """
    runs: list[_Runs] = []
    distances: list[int] = []
    for group in layout.spec.groups:
        if group.is_token_kind:
            table = block_tables.get(group.group_id)
            group_runs, group_distances = _place_rows(layout, geometry, group, table)
        else:
            slot = slots.get(group.group_id)
            group_runs, group_distances = _place_state(layout, geometry, group, slot)
        runs += [group_runs] * group.num_layers
        distances += group_distances
    return EntryPlace(layout, runs, distances)


def _place_rows(
    layout: EntryLayout,
    geometry: Geometry,
    group: KVCacheGroup,
    table: Sequence[BlockId] | None,
) -> tuple[_Runs, list[int]]:
    size = geometry.block_size
    num_blocks = cdiv(layout.num_tokens, size)
    if table is None or len(table) < num_blocks:
        raise ConfigError(
            f"group {group.group_id} ({group.name}) has {len(table or ())} blocks for "
            f"{layout.num_tokens} tokens; reserve {num_blocks} blocks of {size} tokens"
        )
    row_bytes = group.row_bytes // group.num_layers
    runs = _Runs([], [], [])
    if layout.start_token == layout.num_tokens:
        return runs, [0] * group.num_layers
    begin, run_stop = 0, -1
    span_of, group_id = geometry.layer_span, group.group_id
    for index in range(layout.start_token // size, num_blocks):
        first = max(layout.start_token - index * size, 0)
        num_rows = min(layout.num_tokens - index * size, size) - first
        offset, num_bytes = span_of(group_id, table[index], 0, first, num_rows)
        if num_bytes != num_rows * row_bytes:
            raise ConfigError(
                f"{num_rows} rows of group {group.group_id} ({group.name}) take {num_bytes} bytes "
                f"in the pool, {num_rows * row_bytes} in the model; make the pool from this model"
            )
        if offset == run_stop:
            runs.sizes[-1] += num_bytes
        else:
            runs.begins.append(begin)
            runs.offsets.append(offset)
            runs.sizes.append(num_bytes)
        begin += num_bytes
        run_stop = offset + num_bytes
    last = table[num_blocks - 1]
    start = span_of(group_id, last, 0, 0, 1)[0]
    distances = [span_of(group_id, last, p, 0, 1)[0] - start for p in range(group.num_layers)]
    return runs, distances


def _place_state(
    layout: EntryLayout, geometry: Geometry, group: KVCacheGroup, slot: BlockId | None
) -> tuple[_Runs, list[int]]:
    if slot is None:
        raise ConfigError(
            f"group {group.group_id} ({group.name}) has no slot; reserve one for the state at "
            f"token {layout.num_tokens}"
        )
    num_bytes = group.layer_entry_bytes(layout.num_tokens)
    offsets: list[int] = []
    for position in range(group.num_layers):
        offset, room = geometry.slot_span(group.group_id, slot, position)
        if room < num_bytes:
            raise ConfigError(
                f"a slot of group {group.group_id} ({group.name}) has {room} bytes per layer, the "
                f"state needs {num_bytes}; make the pool from this model"
            )
        offsets.append(offset)
    return _Runs([0], offsets[:1], [num_bytes]), [offset - offsets[0] for offset in offsets]
