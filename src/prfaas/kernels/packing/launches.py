"""The launches of this room: tables, alignment and tiles, all decided on the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton.language as tl

from prfaas.kernels.launch import Launch
from prfaas.kernels.packing import device
from prfaas.kernels.packing.pieces import VECTOR_BYTES, Pieces, power_of_two_from
from prfaas.kernels.packing.quantize import Code

LARGEST_TILE_BYTES = 16 * 1024
SMALLEST_TILE_BYTES = 2 * 1024
TILE_ELEMENTS = 4096
"""Of a tile that is quantised or transposed: 32 a thread."""

KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def copy(
    regions: Sequence[torch.Tensor], pieces: Pieces, packed: torch.Tensor, *, to_packed: bool
) -> Launch:
    """One program per tile of a piece; regions and ``packed`` as bytes."""
    align = min(_power_in(pieces.unit), alignment_of(packed, *regions))
    tile_bytes = copy_tile_bytes(pieces)
    tiles = _on_stream(pieces.tiles(tile_bytes, packed.device))
    return Launch(
        kernel=device.copy_tiles,
        grid=(len(tiles),),
        arguments={"tiles": tiles, "bases": bases_of(regions), "packed": packed},
        constants={
            "TO_PACKED": to_packed,
            "TILE": tile_bytes,
            "ALIGNED": align == VECTOR_BYTES,
            "WORD": 4 if align >= 4 else 1,
        },
    )


def copy_tile_bytes(pieces: Pieces) -> int:
    """Bytes per program: 16 KiB keep 8 loads of a thread in flight; short pieces need less."""
    mean = pieces.num_piece_bytes // max(1, pieces.num_pieces)
    return min(LARGEST_TILE_BYTES, max(SMALLEST_TILE_BYTES, power_of_two_from(mean)))


def quantize_pieces(
    regions: Sequence[torch.Tensor],
    pieces: Pieces,
    packed: torch.Tensor,
    *,
    to_packed: bool,
    dtype: torch.dtype,
    row_elements: int,
    scales_at: int,
    code: Code,
) -> Launch:
    """One program per tile of whole rows."""
    block, rows = row_tile(row_elements)
    tile_bytes = rows * row_elements * dtype.itemsize
    align = min(_power_in(pieces.unit), alignment_of(packed, *regions), _power_in(tile_bytes))
    tiles = _on_stream(pieces.tiles(tile_bytes, packed.device))
    return Launch(
        kernel=device.quantize_tiles,
        grid=(len(tiles),),
        arguments={
            "tiles": tiles,
            "bases": bases_of(regions),
            "packed": packed,
            "scales_at": scales_at,
        },
        constants={
            "TO_PACKED": to_packed,
            "KIND": KINDS[dtype],
            "ITEM": dtype.itemsize,
            "DIM": row_elements,
            "BLOCK": block,
            "ROWS": rows,
            "ALIGN": align,
            "LARGEST": code.largest,
            "IS_FP8": code is Code.FP8_E4M3,
        },
        num_warps=_warps(block * rows),
    )


def quantize_matrix(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    encode: bool,
    code: Code,
) -> Launch:
    """``x`` [outer, inner, dim] with adjacent elements; ``codes`` int8 or float8, contiguous."""
    outer, inner, dim = x.shape
    block, rows = row_tile(dim)
    num_rows = outer * inner
    return Launch(
        kernel=device.quantize_matrix,
        grid=((num_rows + rows - 1) // rows,),
        arguments={
            "x": x,
            "codes": codes.view(torch.int8),
            "scales": scales,
            "num_rows": num_rows,
        },
        constants={
            "ENCODE": encode,
            "INNER": inner,
            "OUTER_STRIDE": x.stride(0),
            "INNER_STRIDE": x.stride(1),
            "DIM": dim,
            "BLOCK": block,
            "ROWS": rows,
            "LARGEST": code.largest,
            "IS_FP8": code is Code.FP8_E4M3,
        },
        num_warps=_warps(block * rows),
    )


def transpose(source: torch.Tensor, target: torch.Tensor) -> Launch:
    """``source`` [num, heads, a, b] with adjacent elements, ``target`` [num, heads, b, a]."""
    num, heads, a, b = source.shape
    tile_a, tile_b = transpose_tile(a, b)
    return Launch(
        kernel=device.transpose_matrices,
        grid=(num * heads * -(-a // tile_a) * -(-b // tile_b),),
        arguments={"source": source, "target": target},
        constants={
            "HEADS": heads,
            "A": a,
            "B": b,
            "NUM_STRIDE": source.stride(0),
            "HEAD_STRIDE": source.stride(1),
            "A_STRIDE": source.stride(2),
            "TILE_A": tile_a,
            "TILE_B": tile_b,
        },
    )


def row_tile(dim: int) -> tuple[int, int]:
    """(columns, rows) of a tile of whole rows: columns padded to a power of two."""
    block = max(16, power_of_two_from(dim))
    return block, max(1, TILE_ELEMENTS // block)


def transpose_tile(a: int, b: int) -> tuple[int, int]:
    """(rows, columns): 64 x 64 where both are long, and a longer strip where one is short."""
    tile_a, tile_b = (min(64, power_of_two_from(size)) for size in (a, b))
    if tile_b < 64:
        tile_a = min(TILE_ELEMENTS // tile_b, power_of_two_from(a))
    elif tile_a < 64:
        tile_b = min(TILE_ELEMENTS // tile_a, power_of_two_from(b))
    return tile_a, tile_b


def alignment_of(*data: torch.Tensor) -> int:
    """The largest power of two up to 16 that divides the address of every tensor."""
    return min(_power_in(tensor.data_ptr()) for tensor in data)


def bases_of(regions: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [regions]: their addresses now. A pool that stays in place is looked up, not copied to
    the device again; a tensor that moved has another address, so another table."""
    addresses = tuple(region.data_ptr() for region in regions)
    return _on_stream(_address_table(addresses, regions[0].device))


@functools.lru_cache(maxsize=64)
def _address_table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _on_stream(table: torch.Tensor) -> torch.Tensor:
    """A kept table whose memory is not reused before the current stream is done with it."""
    if table.is_cuda:
        table.record_stream(torch.cuda.current_stream(table.device))
    return table


def _power_in(number: int) -> int:
    return min(VECTOR_BYTES, number & -number) if number else VECTOR_BYTES


def _warps(num_elements: int) -> int:
    return min(16, max(1, num_elements // 1024))
