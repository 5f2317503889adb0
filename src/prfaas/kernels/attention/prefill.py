"""Attention of new tokens over a paged cache that already holds them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arch import arch_of
from prfaas.kernels.attention import caches
from prfaas.kernels.attention.gathered import gathered_prefill
from prfaas.kernels.attention.reference import attention_reference
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.page_table import PageTable
from prfaas.kernels.sequences import Sequences


def paged_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: PageTable,
    *,
    cu_seqlens: Sequences | Iterable[int] | None = None,
    scale: float | None = None,
    window: int | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Causal softmax attention of a packed batch of new tokens, each over its request's pages.

    Token r of a sequence with n new tokens and ``kv_len`` tokens in the cache stands at position
    ``kv_len - n + r`` and sees the keys up to itself; with a window of W the last W of these. Runs
    as one pass of softmax over tiles of keys (FlashAttention-2, arXiv 2307.08691). What is in slots
    that no visible token of a request fills is never read.

    Args:
        q: [num_tokens, heads, head_dim], the new tokens; last dimension contiguous.
        key_cache: [num_pages, page_size, kv_heads, head_dim], the new tokens' keys included;
            last dimension contiguous, other strides free (a view of a pool). ``heads`` is a
            multiple of ``kv_heads``; query head h uses key head ``h // (heads // kv_heads)``.
        value_cache: [num_pages, page_size, kv_heads, value_dim], likewise. Both have ``q``'s dtype.
        page_table: pages of each sequence, made for these caches.
        cu_seqlens: how the packed tokens are cut into sequences, one per request of the table;
            None is one sequence. A sequence may have no new token.
        scale: factor of the logits, positive; None is ``head_dim ** -0.5``.
        window: keys that a token sees at most, itself included; None for all.
        path: ``"reference"``, ``"torch"`` or ``"triton"``; None for the rule of
            `prfaas.kernels.dispatch`. The kernels take head dimensions up to 256.

    Returns:
        [num_tokens, heads, value_dim] in ``q``'s dtype (float64 from the reference).

    Raises:
        ConfigError: an argument that does not fit the others, or fewer tokens in the cache than
            the call brings.
    """
    caches.check_caches(q, key_cache, value_cache, page_table)
    sequences = Sequences.of(cu_seqlens, q.shape[0])
    caches.check_requests(page_table, sequences.num_sequences, "cu_seqlens")
    _check_lengths(page_table, sequences)
    factor = caches.check_scale(scale, q.shape[2])
    caches.check_count("window", window)
    if window is not None and window >= page_table.max_kv_len:
        window = None  # nobody has as many keys
    refusal = caches.refuse_heads(q.shape[2], value_cache.shape[3])
    chosen = choose("paged_prefill", q.device, path, refusal=refusal)
    if chosen is Path.TRITON:
        from prfaas.kernels.attention.launches import prefill_launch

        output = q.new_empty(*q.shape[:2], value_cache.shape[3])
        prefill_launch(
            arch_of(q.device),
            q,
            key_cache,
            value_cache,
            page_table,
            sequences,
            output,
            scale=factor,
            window=window,
        ).run()
        return output
    run = attention_reference if chosen is Path.REFERENCE else gathered_prefill
    return run(q, key_cache, value_cache, page_table, sequences, scale=factor, window=window)


def _check_lengths(table: PageTable, sequences: Sequences) -> None:
    if table.host_kv_lens is None:
        return
    for index, (held, new) in enumerate(zip(table.host_kv_lens, sequences.lengths, strict=True)):
        if held < new:
            raise ConfigError(
                f"kv_lens of request {index} is {held}, cu_seqlens gives it {new} new tokens; "
                "write the new tokens to the cache first, and count them in kv_lens"
            )
