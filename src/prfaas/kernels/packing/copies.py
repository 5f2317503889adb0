"""Copies of pieces without Triton: slice by slice, as rows of a matrix, or by address."""

from __future__ import annotations

import collections
import ctypes
import math
from collections.abc import Sequence

import torch

from prfaas.kernels.packing.pieces import Pieces

_LONG_BYTES = 16 * 1024
"""From here on one call per piece costs less than what indexing loses against ``memcpy``."""

_ROWS_PER_PIECE = 4
_ROWS_PER_PIECE_ON_DEVICE = 256
"""Above this many rows per piece the index itself is what costs."""


def copy_slices(
    regions: Sequence[torch.Tensor], pieces: Pieces, packed: torch.Tensor, *, to_packed: bool
) -> None:
    """One slice after the other: the truth, at some microseconds a piece."""
    for region, offset, size, wire in zip(*_lists(pieces), strict=True):
        memory = regions[region][offset : offset + size]
        if to_packed:
            packed[wire : wire + size] = memory
        else:
            memory.copy_(packed[wire : wire + size])


def copy_pieces(
    regions: Sequence[torch.Tensor], pieces: Pieces, packed: torch.Tensor, *, to_packed: bool
) -> None:
    """Few large copies, on any device.

    Args:
        regions: uint8 [bytes] each, all on one device.
        pieces: inside of the regions.
        packed: uint8 [pieces.num_bytes].
        to_packed: from the regions into ``packed``, or back.
    """
    num_bytes = pieces.num_piece_bytes
    if not num_bytes:
        return
    is_on_host = packed.device.type == "cpu"
    unit = _unit(pieces, regions, packed)
    limit = _ROWS_PER_PIECE if is_on_host else _ROWS_PER_PIECE_ON_DEVICE
    is_long = is_on_host and num_bytes >= _LONG_BYTES * pieces.num_pieces
    if not is_long and num_bytes // unit <= limit * pieces.num_pieces:
        _copy_rows(regions, pieces, packed, unit, to_packed)
    elif is_on_host:
        _copy_by_address(regions, pieces, packed, to_packed)
    else:
        copy_slices(regions, pieces, packed, to_packed=to_packed)


def _copy_by_address(
    regions: Sequence[torch.Tensor], pieces: Pieces, packed: torch.Tensor, to_packed: bool
) -> None:
    """``memmove`` per piece: a tensor operation per piece costs several times as much."""
    bases = torch.tensor([region.data_ptr() for region in regions], dtype=torch.int64)
    memory = (bases[pieces.regions] + pieces.offsets).tolist()
    wire = (pieces.wire_offsets + packed.data_ptr()).tolist()
    targets, sources = (wire, memory) if to_packed else (memory, wire)
    calls = map(ctypes.memmove, targets, sources, pieces.sizes.tolist())
    collections.deque(calls, maxlen=0)


def _copy_rows(
    regions: Sequence[torch.Tensor],
    pieces: Pieces,
    packed: torch.Tensor,
    unit: int,
    to_packed: bool,
) -> None:
    """Every piece is some rows of ``unit`` bytes; one indexed copy per region moves them all."""
    counts = pieces.sizes // unit
    piece = torch.arange(pieces.num_pieces).repeat_interleave(counts)
    inside = torch.arange(len(piece)) - (counts.cumsum(0) - counts)[piece]
    wire_rows = (pieces.wire_offsets // unit)[piece] + inside
    region_rows = (pieces.offsets // unit)[piece] + inside
    owners = pieces.regions[piece]
    wire = _rows(packed, unit)
    for index, region in enumerate(regions):
        # Into parts of its own source, torch only copies by way of a third tensor.
        is_apart = region.untyped_storage().data_ptr() != packed.untyped_storage().data_ptr()
        mine = owners == index
        memory = _rows(region, unit)
        at_memory, at_wire = (rows[mine].to(packed.device) for rows in (region_rows, wire_rows))
        is_whole = is_apart and len(at_wire) == len(wire) and bool((at_wire.diff() == 1).all())
        if not to_packed:
            rows = wire if is_whole else wire.index_select(0, at_wire)
            memory.index_copy_(0, at_memory, rows)
        elif is_whole:
            torch.index_select(memory, 0, at_memory, out=wire)
        else:
            wire.index_copy_(0, at_wire, memory.index_select(0, at_memory))


def _rows(data: torch.Tensor, unit: int) -> torch.Tensor:
    word = next(kind for kind in _WORDS if unit % kind.itemsize == 0)
    whole = data[: len(data) // unit * unit]
    return whole.view(word).view(-1, unit // word.itemsize)


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _unit(pieces: Pieces, regions: Sequence[torch.Tensor], packed: torch.Tensor) -> int:
    """Bytes that divide every offset and size; words of them are aligned in every tensor."""
    starts = math.gcd(*(data.storage_offset() for data in (packed, *regions)))
    return pieces.unit if starts % 8 == 0 else math.gcd(pieces.unit, starts)


def _lists(pieces: Pieces) -> tuple[list[int], ...]:
    return (
        pieces.regions.tolist(),
        pieces.offsets.tolist(),
        pieces.sizes.tolist(),
        pieces.wire_offsets.tolist(),
    )
