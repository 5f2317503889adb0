"""Softmax attention over pages, and writing to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from kernel_bench import floors
from kernel_bench.cases import Build, Case, Peer, Sizes
from kernel_bench.inputs import Inputs, contiguous
from prfaas.kernels import PageTable, Sequences
from prfaas.kernels.attention import mla_decode, paged_decode, paged_prefill, paged_write

HEADS, KV_HEADS, DIM = 32, 8, 128
LATENT, ROPE = 512, 64
MLA_SCALE = 192**-0.5
"""Of the heads of 128 + 64 before the absorption."""

WORKSPACE_BYTES = 512 << 20


def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _flat_pages(table: PageTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The page table as flashinfer takes it: ends of the rows, ids of all rows, tokens on each
    last page. Lengths are equal here, so no row has unused entries."""
    requests, width = table.pages.shape
    ends = torch.arange(requests + 1, dtype=torch.int32, device=table.pages.device) * width
    last = (table.kv_lens - 1) % table.page_size + 1
    return ends, table.pages.flatten(), last.int()


def prefill(sizes: Sizes, device: torch.device, *, is_cached: bool) -> Case:
    """32 query and 8 key heads of 128: a whole prompt, or new tokens after a cached prefix."""
    total = sizes.num_tokens
    new = min(sizes.new_tokens, total) if is_cached else total
    heads, kv_heads, dim = sizes.heads(HEADS), sizes.heads(KV_HEADS), sizes.dim(DIM)
    make = Inputs(device, sizes.dtype)
    table = make.pages([total], sizes.page_size)
    q = make.normal(new, heads, dim)
    key, value = (make.normal(table.num_pages, sizes.page_size, kv_heads, dim) for _ in range(2))
    sequences = Sequences.of_lengths([new])

    def sdpa() -> Callable[[], torch.Tensor]:
        from torch.nn.attention.bias import causal_lower_right

        plain = (contiguous(key, table, total), contiguous(value, table, total))
        mine = q.transpose(0, 1)[None].contiguous()
        mask = {"attn_mask": causal_lower_right(new, total)} if new < total else {"is_causal": True}

        def run() -> torch.Tensor:
            made = F.scaled_dot_product_attention(mine, *plain, **mask, enable_gqa=True)
            return made[0].transpose(0, 1)

        return run

    def flashinfer() -> Callable[[], torch.Tensor]:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "NHD")
        starts = torch.tensor([0, new], dtype=torch.int32, device=device)
        wrapper.plan(
            starts,
            *_flat_pages(table),
            *(heads, kv_heads, dim, sizes.page_size),
            causal=True,
            q_data_type=sizes.dtype,
            kv_data_type=sizes.dtype,
        )
        return lambda: wrapper.run(q, (key, value))

    return Case(
        op="paged_prefill",
        work=floors.prefill(
            new_tokens=new,
            cached_tokens=total - new,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            value_dim=dim,
            itemsize=sizes.dtype.itemsize,
        ),
        run=lambda path: (paged_prefill(q, key, value, table, cu_seqlens=sequences, path=path),),
        peers=(
            Peer(name="sdpa", package="torch", build=sdpa),
            Peer(name="flashinfer", package="flashinfer", build=flashinfer),
        ),
    )


def decode(sizes: Sizes, device: torch.device, *, is_one: bool) -> Case:
    """One token per request, 32 query and 8 key heads of 128."""
    requests, length = 1 if is_one else sizes.requests, sizes.num_tokens
    heads, kv_heads, dim = sizes.heads(HEADS), sizes.heads(KV_HEADS), sizes.dim(DIM)
    make = Inputs(device, sizes.dtype)
    table = make.pages([length] * requests, sizes.page_size)
    q = make.normal(requests, heads, dim)
    key, value = (make.normal(table.num_pages, sizes.page_size, kv_heads, dim) for _ in range(2))

    def sdpa() -> Callable[[], torch.Tensor]:
        plain = (contiguous(key, table, length), contiguous(value, table, length))
        return lambda: F.scaled_dot_product_attention(q[:, :, None], *plain, enable_gqa=True)

    def flashinfer() -> Callable[[], torch.Tensor]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            _workspace(device), "NHD", use_tensor_cores=True
        )
        wrapper.plan(
            *_flat_pages(table),
            *(heads, kv_heads, dim, sizes.page_size),
            q_data_type=sizes.dtype,
            kv_data_type=sizes.dtype,
        )
        return lambda: wrapper.run(q, (key, value))

    return Case(
        op="paged_decode",
        work=floors.decode(
            requests=requests,
            kv_len=length,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            itemsize=sizes.dtype.itemsize,
        ),
        run=lambda path: (paged_decode(q, key, value, table, path=path),),
        peers=(
            Peer(name="sdpa", package="torch", build=sdpa),
            Peer(name="flashinfer", package="flashinfer", build=flashinfer),
        ),
    )


def latent_decode(sizes: Sizes, device: torch.device, *, is_one: bool) -> Case:
    """One token per request over latents of 512 + 64, 32 heads."""
    requests, length = 1 if is_one else sizes.requests, sizes.num_tokens
    heads, latent, rope = sizes.heads(32), sizes.dim(LATENT), sizes.dim(ROPE)
    make = Inputs(device, sizes.dtype)
    table = make.pages([length] * requests, sizes.page_size)
    q_latent, q_rope = make.normal(requests, heads, latent), make.normal(requests, heads, rope)
    cache = make.normal(table.num_pages, sizes.page_size, latent + rope)

    def flashinfer() -> Callable[[], torch.Tensor]:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        wrapper = BatchMLAPagedAttentionWrapper(_workspace(device))
        ends, pages, _ = _flat_pages(table)
        starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
        wrapper.plan(
            *(starts, ends, pages, table.kv_lens),
            *(heads, latent, rope, sizes.page_size),
            *(False, MLA_SCALE, sizes.dtype, sizes.dtype),
        )
        parts = cache[..., :latent], cache[..., latent:]
        return lambda: wrapper.run(q_latent, q_rope, *parts)

    return Case(
        op="mla_decode",
        work=floors.mla_decode(
            requests=requests,
            kv_len=length,
            heads=heads,
            latent_dim=latent,
            rope_dim=rope,
            itemsize=sizes.dtype.itemsize,
        ),
        run=lambda path: (mla_decode(q_latent, q_rope, cache, table, scale=MLA_SCALE, path=path),),
        peers=(Peer(name="flashinfer", package="flashinfer", build=flashinfer),),
    )


def write(sizes: Sizes, device: torch.device) -> Case:
    """The keys of a whole prompt to its pages."""
    make = Inputs(device, sizes.dtype)
    kv_heads, dim = sizes.heads(KV_HEADS), sizes.dim(DIM)
    table = make.pages([sizes.num_tokens], sizes.page_size)
    rows = make.normal(sizes.num_tokens, kv_heads, dim)
    cache = make.normal(table.num_pages, sizes.page_size, kv_heads, dim)
    sequences = Sequences.of_lengths([sizes.num_tokens])

    def run(path: str) -> tuple[torch.Tensor, ...]:
        paged_write(rows, cache, table, cu_seqlens=sequences, path=path)
        return (cache,)

    def copy() -> Callable[[], torch.Tensor]:
        target = torch.empty_like(rows)
        return lambda: target.copy_(rows)

    return Case(
        op="paged_write",
        work=floors.copied(read_bytes=rows.numel() * rows.itemsize),
        run=run,
        peers=(Peer(name="memcpy", package="torch", build=copy, compares=False),),
    )


CASES: dict[str, Build] = {
    "paged_prefill": partial(prefill, is_cached=False),
    "paged_prefill_cached": partial(prefill, is_cached=True),
    "paged_decode_1": partial(decode, is_one=True),
    "paged_decode": partial(decode, is_one=False),
    "mla_decode_1": partial(latent_decode, is_one=True),
    "mla_decode": partial(latent_decode, is_one=False),
    "paged_write": write,
}
