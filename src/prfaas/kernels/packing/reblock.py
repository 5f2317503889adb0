"""Rows of tokens between caches whose blocks have different sizes, on one device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arguments import check_tensor
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.packing.copies import copy_pieces, copy_slices
from prfaas.kernels.packing.pack import check_apart, open_regions
from prfaas.kernels.packing.pieces import Pieces


def reblock(
    source: torch.Tensor,
    source_blocks: Iterable[int],
    target: torch.Tensor,
    target_blocks: Iterable[int],
    num_tokens: int,
    *,
    path: str | None = None,
) -> None:
    """Copies the first tokens of a request into blocks of another size, in one launch.

    Neither size has to divide the other. Rows of the target's blocks beyond ``num_tokens`` stay as
    they are. Layers that share their block ids also share the table behind this.

    Args:
        source: [num_blocks, block_size, ...], contiguous, any dtype.
        source_blocks: at least ``ceil(num_tokens / block_size)`` block ids in the order of tokens.
        target: [num_blocks, other_block_size, ...], same dtype and rows, memory of its own.
        target_blocks: as for the source; none twice.
        num_tokens: rows to copy.
        path: see `prfaas.kernels.dispatch`.

    Raises:
        ConfigError: other rows or dtypes, ids outside of the cache, too few blocks, a target block
            twice, shared memory.
    """
    _check_cache("source", source)
    _check_cache("target", target)
    rows = ("num_blocks", "block_size", *source.shape[2:])
    check_tensor("target", target, shape=rows, dtypes=[source.dtype], device=source.device)
    if type(num_tokens) is not int or num_tokens < 0:
        raise ConfigError(f"num_tokens is {num_tokens!r}; use a whole number from 0")
    row_bytes = source.itemsize * source[0, 0].numel() if source.numel() else 0
    pieces = _plan(
        _ids("source", source, source_blocks, num_tokens),
        source.shape[1],
        _check_unique(_ids("target", target, target_blocks, num_tokens)),
        target.shape[1],
        num_tokens,
        row_bytes,
    )
    regions = open_regions(target, pieces)
    run = source.detach().reshape(-1).view(torch.uint8)
    check_apart("source", run, regions, pieces)
    chosen = choose("reblock", source.device, path)
    if chosen is Path.TRITON:
        from prfaas.kernels.packing import launches

        launches.copy(regions, pieces, run, to_packed=False).run()
    elif chosen is Path.TORCH:
        copy_pieces(regions, pieces, run, to_packed=False)
    else:
        copy_slices(regions, pieces, run, to_packed=False)


@functools.lru_cache(maxsize=32)
def _plan(
    source_blocks: tuple[int, ...],
    source_size: int,
    target_blocks: tuple[int, ...],
    target_size: int,
    num_tokens: int,
    row_bytes: int,
) -> Pieces:
    """Runs of tokens that stay inside one block on both sides; the source is the packed run."""
    ends = {
        *range(source_size, num_tokens, source_size),
        *range(target_size, num_tokens, target_size),
    }
    cuts = torch.tensor(sorted({0, num_tokens} | ends), dtype=torch.int64)
    first, sizes = cuts[:-1], cuts.diff()

    def rows(blocks: tuple[int, ...], size: int) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64)[first // size] * size + first % size

    return Pieces(
        rows(target_blocks, target_size) * row_bytes,
        sizes * row_bytes,
        wire_offsets=rows(source_blocks, source_size) * row_bytes,
    )


def _check_cache(name: str, cache: object) -> None:
    if not isinstance(cache, torch.Tensor):
        raise ConfigError(f"{name} is a {type(cache).__name__}; pass a torch.Tensor")
    row = (f"row_{axis}" for axis in range(cache.ndim - 2))
    shape = ("num_blocks", "block_size", *row)
    check_tensor(name, cache, shape=shape, dtypes=[cache.dtype], contiguous="all")


def _check_unique(target_blocks: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(target_blocks)) < len(target_blocks):
        twice = next(block for block in target_blocks if target_blocks.count(block) > 1)
        raise ConfigError(f"target_blocks holds {twice} twice; a block has one place in a request")
    return target_blocks


def _ids(name: str, cache: torch.Tensor, blocks: Iterable[int], num_tokens: int) -> tuple[int, ...]:
    """The blocks that hold the tokens, checked."""
    size = cache.shape[1]
    needed = -(-num_tokens // size)
    ids = tuple(itertools.islice(blocks, needed))
    if len(ids) < needed:
        raise ConfigError(
            f"{name}_blocks has {len(ids)} blocks of {size} tokens; {num_tokens} tokens take "
            f"{needed} of them"
        )
    for index, block in enumerate(ids):
        if type(block) is not int or not 0 <= block < cache.shape[0]:
            raise ConfigError(
                f"{name}_blocks holds {block!r} at entry {index}; {name} has blocks 0 to "
                f"{cache.shape[0] - 1}"
            )
    return ids
