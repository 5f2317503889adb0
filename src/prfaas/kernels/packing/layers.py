"""Requests in servers that keep one tensor, or several, per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from prfaas.core import BlockId, GroupId
from prfaas.errors import ConfigError
from prfaas.kernels.packing.pieces import Pieces
from prfaas.spec import KVCacheGroup, LinearStateSpec, SlidingWindowSpec
from prfaas.transfer import EntryLayout, LayerPart


def layer_pieces(
    layout: EntryLayout,
    regions: Mapping[int, Sequence[int]],
    block_tables: Mapping[GroupId, Sequence[BlockId]],
    slots: Mapping[GroupId, BlockId],
    *,
    block_size: int,
) -> Pieces:
    """The blocks and states of one request whose layers have tensors of their own.

    Packed, they are the canonical form of ``layout``, the same as `entry_pieces` gives of a pool.
    A layer has either one tensor that holds whole rows (or states), or one for each of the parts
    that its spec lists: key and value, latent and rope, recurrent and conv. A contiguous tensor is

    - [num_blocks, block_size, ...] of a token kind,
    - [num_slots, ...] of a state,
    - [num_slots, window_tokens, ...] of a sliding window, oldest row first.

    Rows that follow each other on both sides become one piece: a block, where a tensor holds whole
    rows. Separate keys and values are interleaved on the wire, so each row is a piece of its own.

    Args:
        layout: what is shipped.
        regions: per model layer that has a cache, the positions of its tensors in the list that
            `pack` will be given: one, or one per part in the order of the spec.
        block_tables: per token group, at least ``ceil(num_tokens / block_size)`` block ids.
        slots: per slot group, the slot of the state at ``num_tokens``.
        block_size: tokens per block.

    Raises:
        ConfigError: a layer without tensors or with another number of them, a group without blocks
            or slot, too few blocks.
    """
    if type(block_size) is not int or block_size < 1:
        raise ConfigError(f"block_size is {block_size!r}; use a whole number of tokens from 1")
    rows = {
        group.group_id: _rows_of(layout, group, block_size, block_tables, slots)
        for group in layout.spec.groups
    }
    columns = [
        _runs(part, rows[part.group_id], tensor)
        for part in layout.parts
        for tensor in _tensors_of(layout, part, regions)
    ]
    regions_, offsets, sizes, wire = (torch.cat(made) for made in zip(*columns, strict=True))
    return Pieces(offsets, sizes, regions=regions_, wire_offsets=wire)


@attrs.frozen
class _Tensor:
    """One tensor of a layer: ``num_bytes`` of each row, from byte ``first`` of it."""

    region: int
    first: int
    num_bytes: int
    row_bytes: int


def _tensors_of(
    layout: EntryLayout, part: LayerPart, regions: Mapping[int, Sequence[int]]
) -> list[_Tensor]:
    layer = layout.spec.layers[part.layer_index]
    assert layer is not None  # or it had no part of the entry
    given = regions.get(part.layer_index, ())
    sizes = [piece.num_bytes for piece in layer.parts]
    if len(given) not in (1, len(sizes)):
        names = ", ".join(piece.name for piece in layer.parts)
        raise ConfigError(
            f"regions names {len(given)} tensors for layer {part.layer_index}; name one, or one "
            f"for each of {names}"
        )
    if len(given) == 1:
        sizes = [sum(sizes)]
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        _Tensor(region, first, size, sum(sizes))
        for region, first, size in zip(given, firsts, sizes, strict=True)
    ]


def _rows_of(
    layout: EntryLayout,
    group: KVCacheGroup,
    block_size: int,
    block_tables: Mapping[GroupId, Sequence[BlockId]],
    slots: Mapping[GroupId, BlockId],
) -> torch.Tensor:
    """Where each row that travels lies in a layer's tensor, counted in rows."""
    group_id, num_tokens = group.group_id, layout.num_tokens
    if group.is_token_kind:
        table = block_tables.get(group_id, ())
        needed = -(-num_tokens // block_size)
        if len(table) < needed:
            raise ConfigError(
                f"block_tables: group {group_id} ({group.name}) has {len(table)} blocks for "
                f"{num_tokens} tokens; give {needed} of {block_size} tokens"
            )
        tokens = torch.arange(layout.start_token, num_tokens)
        blocks = torch.tensor(list(table), dtype=torch.int64)
        return blocks[tokens // block_size] * block_size + tokens % block_size
    if group_id not in slots:
        raise ConfigError(
            f"slots: group {group_id} ({group.name}) has no slot; give that of the state at token "
            f"{num_tokens}"
        )
    spec = group.layer_spec
    if isinstance(spec, SlidingWindowSpec):
        kept = torch.arange(min(num_tokens, spec.window_tokens))
        return slots[group_id] * spec.window_tokens + kept
    assert isinstance(spec, LinearStateSpec)
    return torch.tensor([slots[group_id]])


def _runs(part: LayerPart, rows: torch.Tensor, tensor: _Tensor) -> tuple[torch.Tensor, ...]:
    """Columns of the pieces: a piece goes on while rows are adjacent in memory and on the wire."""
    goes_on = torch.zeros(len(rows), dtype=torch.bool)
    if tensor.num_bytes == tensor.row_bytes:
        goes_on[1:] = rows.diff() == 1
    starts = (~goes_on).nonzero()[:, 0]
    lengths = torch.cat((starts, torch.tensor([len(rows)]))).diff()
    return (
        torch.full_like(starts, tensor.region),
        rows[starts] * tensor.num_bytes,
        lengths * tensor.num_bytes,
        part.offset + starts * tensor.row_bytes + tensor.first,
    )
