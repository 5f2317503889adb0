"""How attention is cut for a GPU: pure functions of the processor, the sizes and the dtype."""

from __future__ import annotations

import attrs
import torch

from prfaas.kernels.arch import KIB, Arch

MAX_SPLITS = 128
"""Most parts that the keys of one decode are cut into."""

_PROGRAMS_WANTED = 2 * 132
"""Two decode programs per multiprocessor of an H100 or H200 hide each other's waits."""

_KEYS_PER_SPLIT = 256
"""Fewer keys than this are not worth a partial result that is written and read again."""


@attrs.frozen(kw_only=True)
class Tiles:
    """Tile sizes and compiler options of one kernel.

    Attributes:
        rows: query tokens of a prefill program, query heads of a decode program.
        keys: keys per step.
        num_warps, num_stages: options of the compiler.
        query_part: columns of the queries that are read and multiplied at a time; 0 keeps all in
            registers.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    query_part: int = 0


def padded(width: int) -> int:
    """The least power of two that holds ``width`` elements and that a dot takes."""
    return max(16, 1 << (width - 1).bit_length())


def head_parts(width: int) -> tuple[int, int]:
    """Cuts a head dimension in two where that pads less: 192 is 128 and 64, but 100 is 100."""
    body = 1 << (width.bit_length() - 1)
    rest = width - body
    if rest and body >= 16 and body + padded(rest) < padded(width):
        return body, rest
    return width, 0


def count_splits(num_programs: int, num_keys: int) -> int:
    """Into how many parts a decode cuts the keys of each request.

    Args:
        num_programs: programs without a split: requests x key heads x blocks of query heads.
        num_keys: most keys that a request sees.
    """
    to_fill = -(-_PROGRAMS_WANTED // max(num_programs, 1))
    worth = -(-num_keys // _KEYS_PER_SPLIT)
    return max(1, min(to_fill, worth, MAX_SPLITS))


def prefill_tiles(arch: Arch, key_width: int, value_width: int, dtype: torch.dtype) -> Tiles:
    """Of `paged_prefill`."""
    widest = _widest(key_width, value_width)
    if dtype == torch.float32:
        return _float32_tiles(widest)
    if arch.is_amd:
        return Tiles(rows=64, keys=32, num_warps=4, num_stages=1)
    if widest <= 64 or (widest <= 128 and arch.max_shared_bytes >= 200 * KIB):
        return Tiles(rows=128, keys=64, num_warps=8, num_stages=2)
    if arch.max_shared_bytes < 200 * KIB:
        warps = 4 if widest <= 192 else 8
        return Tiles(rows=64, keys=32, num_warps=warps, num_stages=2)
    return Tiles(rows=128, keys=64 if widest <= 192 else 32, num_warps=8, num_stages=2)


def _float32_tiles(widest: int) -> Tiles:
    if widest <= 64:
        return Tiles(rows=32, keys=32, num_warps=8, num_stages=1)
    if widest <= 128:
        return Tiles(rows=16, keys=64, num_warps=8, num_stages=1)
    return Tiles(rows=16, keys=32, num_warps=8, num_stages=1, query_part=32)


def decode_tiles(arch: Arch, key_width: int, value_width: int, dtype: torch.dtype) -> Tiles:
    """Of `paged_decode`."""
    widest = _widest(key_width, value_width)
    if dtype == torch.float32:
        if widest <= 128:
            return Tiles(rows=16, keys=32, num_warps=4, num_stages=1)
        return _float32_tiles(widest)
    if arch.is_amd:
        return Tiles(rows=16, keys=64 if widest <= 128 else 32, num_warps=4, num_stages=1)
    if widest <= 128:
        return Tiles(rows=16, keys=64, num_warps=4, num_stages=3)
    return Tiles(rows=16, keys=32, num_warps=4, num_stages=2)


def mla_tiles(arch: Arch, num_heads: int, latent: int, dtype: torch.dtype) -> Tiles:
    """Of `mla_decode`."""
    if dtype == torch.float32:
        if latent <= 64:
            return Tiles(rows=16, keys=32, num_warps=4, num_stages=1)
        return Tiles(rows=16, keys=16, num_warps=8, num_stages=1, query_part=64)
    if num_heads > 16 and arch.max_shared_bytes >= 160 * KIB:
        return Tiles(rows=32, keys=64, num_warps=8, num_stages=2)
    return Tiles(rows=16, keys=32, num_warps=4, num_stages=1 if arch.is_amd else 2)


def _widest(key_width: int, value_width: int) -> int:
    """Columns of the widest row of a program, with padding."""
    return max(sum(padded(part) for part in head_parts(key_width) if part), padded(value_width))
