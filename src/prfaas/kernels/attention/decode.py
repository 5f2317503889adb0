"""Attention of one new token per request over a paged cache."""

from __future__ import annotations

import torch

from prfaas.kernels.arch import arch_of
from prfaas.kernels.attention import caches
from prfaas.kernels.attention.gathered import gathered_decode
from prfaas.kernels.attention.reference import attention_reference
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.page_table import PageTable
from prfaas.kernels.sequences import Sequences


def paged_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: PageTable,
    *,
    scale: float | None = None,
    window: int | None = None,
    num_splits: int | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Softmax attention of the newest token of each request over the request's pages.

    The kernel cuts the keys of a request into splits that run side by side and joins their results
    by their log-sums (Flash-Decoding). The number of splits changes the order of additions, so the
    same request in batches of different sizes may differ in the last bits: give ``num_splits``
    where results must repeat bit for bit.

    Args:
        q: [num_requests, heads, head_dim], one token each, which is already in the cache; last
            dimension contiguous.
        key_cache: [num_pages, page_size, kv_heads, head_dim]; last dimension contiguous, other
            strides free (a view of a pool). Query head h uses key head ``h // (heads //
            kv_heads)``.
        value_cache: [num_pages, page_size, kv_heads, value_dim], likewise. Both have ``q``'s dtype.
        page_table: pages of each request, made for these caches. A request with nothing in the
            cache gives zeros: a padding row of a captured graph.
        scale: factor of the logits, positive; None is ``head_dim ** -0.5``.
        window: keys that a token sees at most, itself included; None for all.
        num_splits: 1 to 128 parts of the keys; None chooses by batch, heads and length. Only the
            kernel looks at it.
        path: ``"reference"``, ``"torch"`` or ``"triton"``; None for the rule of
            `prfaas.kernels.dispatch`. The kernels take head dimensions up to 256.

    Returns:
        [num_requests, heads, value_dim] in ``q``'s dtype (float64 from the reference).

    Raises:
        ConfigError: an argument that does not fit the others.
    """
    caches.check_caches(q, key_cache, value_cache, page_table)
    caches.check_requests(page_table, q.shape[0], "q")
    factor = caches.check_scale(scale, q.shape[2])
    caches.check_count("window", window)
    if window is not None and window >= page_table.max_kv_len:
        window = None  # nobody has as many keys
    caches.check_splits(num_splits)
    refusal = caches.refuse_heads(q.shape[2], value_cache.shape[3])
    chosen = choose("paged_decode", q.device, path, refusal=refusal)
    if chosen is Path.TRITON:
        from prfaas.kernels.attention.launches import decode_launches

        return decode_launches(
            arch_of(q.device),
            q,
            key_cache,
            value_cache,
            page_table,
            scale=factor,
            window=window,
            num_splits=num_splits,
        ).run()
    if chosen is Path.REFERENCE:
        single = Sequences.of_lengths([1] * q.shape[0])
        return attention_reference(
            q, key_cache, value_cache, page_table, single, scale=factor, window=window
        )
    return gathered_decode(q, key_cache, value_cache, page_table, scale=factor, window=window)
