"""Builds the launches of the attention kernels."""

from __future__ import annotations

import math

import attrs
import torch

from prfaas.kernels.arch import Arch
from prfaas.kernels.attention.combine_device import combine_kernel
from prfaas.kernels.attention.decode_device import paged_decode_kernel
from prfaas.kernels.attention.prefill_device import paged_prefill_kernel
from prfaas.kernels.attention.tiles import (
    MAX_SPLITS,
    Tiles,
    count_splits,
    decode_tiles,
    head_parts,
    mla_tiles,
    padded,
    prefill_tiles,
)
from prfaas.kernels.launch import Launch
from prfaas.kernels.page_table import PageTable
from prfaas.kernels.sequences import Sequences

_LOG2_E = math.log2(math.e)


@attrs.frozen(kw_only=True, eq=False)
class Decode:
    """Launches of one decode, in order, and their result.

    Attributes:
        output: [num_requests, heads, value_dim].
        launches: the attention kernel, and the kernel that joins its splits if there are any.
    """

    output: torch.Tensor
    launches: tuple[Launch, ...]

    def run(self) -> torch.Tensor:
        for launch in self.launches:
            launch.run()
        return self.output


def prefill_launch(
    arch: Arch,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: PageTable,
    sequences: Sequences,
    output: torch.Tensor,
    *,
    scale: float,
    window: int | None,
) -> Launch:
    """Of `paged_prefill`; arguments are checked and ``output`` is contiguous."""
    heads, width = q.shape[1:]
    body, tail = head_parts(width)
    tiles = prefill_tiles(arch, width, value_cache.shape[-1], q.dtype)
    cut = sequences.chunks(tiles.rows, q.device)
    return Launch(
        kernel=paged_prefill_kernel,
        grid=(cut.num_chunks, heads),
        arguments={
            "output": output,
            "q": q,
            "q_tail": q[..., body:] if tail else None,
            "key_cache": key_cache,
            "key_tail": key_cache[..., body:] if tail else None,
            "value_cache": value_cache,
            "pages": table.pages,
            "kv_lens": table.kv_lens,
            "offsets": sequences.offset_tensor(q.device),
            "tile_starts": cut.starts,
            "tile_lengths": cut.lengths,
            "log2_scale": scale * _LOG2_E,
            "num_tiles": cut.num_chunks,
            "num_sequences": sequences.num_sequences,
            "pages_stride": table.pages.stride(0),
        },
        constants={
            "HEADS": heads,
            "GROUP": heads // key_cache.shape[2],
            "Q_TOKEN": q.stride(0),
            "Q_HEAD": q.stride(1),
            **_cache_constants(key_cache, value_cache),
            **_tile_constants(body, tail, value_cache.shape[-1], tiles),
            "PAGE_SIZE": table.page_size,
            "WINDOW": window or 0,
            "BLOCK_M": tiles.rows,
            "PRECISION": arch.float32_dot,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def decode_launches(
    arch: Arch,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: PageTable,
    *,
    scale: float,
    window: int | None,
    num_splits: int | None,
) -> Decode:
    """Of `paged_decode`; arguments are checked."""
    width = q.shape[-1]
    body, tail = head_parts(width)
    return _decode(
        arch,
        q,
        q[..., body:] if tail else None,
        key_cache,
        key_cache[..., body:] if tail else None,
        value_cache,
        table,
        widths=(body, tail, value_cache.shape[-1]),
        tiles=decode_tiles(arch, width, value_cache.shape[-1], q.dtype),
        scale=scale,
        window=window,
        num_splits=num_splits,
    )


def mla_launches(
    arch: Arch,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    table: PageTable,
    *,
    scale: float,
    num_splits: int | None,
) -> Decode:
    """Of `mla_decode`: one key head, whose first part is also the values. Arguments are checked."""
    heads, latent = q_latent.shape[1:]
    tiles = mla_tiles(arch, heads, latent, q_latent.dtype)
    rows = latent_cache[:, :, None]
    return _decode(
        arch,
        q_latent,
        q_rope,
        rows,
        rows[..., latent:],
        rows[..., :latent] if tiles.query_part else None,  # parts of keys are no values
        table,
        widths=(latent, q_rope.shape[-1], latent),
        tiles=tiles,
        scale=scale,
        window=None,
        num_splits=num_splits,
    )


def _decode(
    arch: Arch,
    q: torch.Tensor,
    q_tail: torch.Tensor | None,
    key_cache: torch.Tensor,
    key_tail: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    table: PageTable,
    *,
    widths: tuple[int, int, int],
    tiles: Tiles,
    scale: float,
    window: int | None,
    num_splits: int | None,
) -> Decode:
    requests, heads = q.shape[:2]
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    programs = requests * kv_heads * -(-group // tiles.rows)
    if num_splits is None:
        num_keys = min(table.max_kv_len, window or table.max_kv_len)
        num_splits = count_splits(programs, num_keys)
    is_split = num_splits > 1
    output = q.new_empty(requests, heads, widths[2])
    partials = log_sums = None
    if is_split:
        shape = (requests, heads, num_splits)
        partials = q.new_empty(*shape, widths[2], dtype=torch.float32)
        log_sums = q.new_empty(shape, dtype=torch.float32)
    attention = Launch(
        kernel=paged_decode_kernel,
        grid=(programs, num_splits),
        arguments={
            "output": output if partials is None else partials,
            "log_sums": log_sums,
            "q": q,
            "q_tail": q_tail,
            "key_cache": key_cache,
            "key_tail": key_tail,
            "value_cache": value_cache,
            "pages": table.pages,
            "kv_lens": table.kv_lens,
            "log2_scale": scale * _LOG2_E,
            "num_splits": num_splits,
            "pages_stride": table.pages.stride(0),
        },
        constants={
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "Q_TOKEN": q.stride(0),
            "Q_HEAD": q.stride(1),
            "TAIL_TOKEN": 0 if q_tail is None else q_tail.stride(0),
            "TAIL_HEAD": 0 if q_tail is None else q_tail.stride(1),
            **_cache_constants(key_cache, value_cache),
            **_tile_constants(*widths, tiles),
            "PAGE_SIZE": table.page_size,
            "WINDOW": window or 0,
            "BLOCK_H": tiles.rows,
            "IS_SPLIT": is_split,
            "SHARES_VALUES": value_cache is None,
            "PRECISION": arch.float32_dot,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if partials is None or log_sums is None:
        return Decode(output=output, launches=(attention,))
    return Decode(output=output, launches=(attention, _combine(output, partials, log_sums)))


def _combine(output: torch.Tensor, partials: torch.Tensor, log_sums: torch.Tensor) -> Launch:
    requests, heads, num_splits, width = partials.shape
    return Launch(
        kernel=combine_kernel,
        grid=(requests * heads,),
        arguments={
            "output": output,
            "partials": partials,
            "log_sums": log_sums,
            "num_splits": num_splits,
        },
        constants={
            "VALUE_WIDTH": width,
            "BLOCK_VALUE": padded(width),
            "BLOCK_SPLITS": MAX_SPLITS,
        },
        num_warps=4 if width > 128 else 1,
    )


def _cache_constants(key_cache: torch.Tensor, value_cache: torch.Tensor | None) -> dict[str, int]:
    values = (0, 0, 0) if value_cache is None else value_cache.stride()[:3]
    names = ("PAGE", "TOKEN", "HEAD")
    found = {f"KEY_{name}": step for name, step in zip(names, key_cache.stride(), strict=False)}
    return found | {f"VALUE_{name}": step for name, step in zip(names, values, strict=True)}


def _tile_constants(body: int, tail: int, value: int, tiles: Tiles) -> dict[str, int]:
    return {
        "KEY_WIDTH": body,
        "TAIL_WIDTH": tail,
        "VALUE_WIDTH": value,
        "BLOCK_KEY": padded(body),
        "BLOCK_TAIL": padded(tail) if tail else 16,
        "BLOCK_VALUE": padded(value),
        "BLOCK_N": tiles.keys,
        "BLOCK_PART": min(tiles.query_part, padded(body)),
    }
