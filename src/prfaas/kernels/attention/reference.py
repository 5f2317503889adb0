"""Paged attention in float64, one query token at a time."""

from __future__ import annotations

import torch

from prfaas.kernels.page_table import PageTable
from prfaas.kernels.sequences import Sequences


def attention_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: PageTable,
    sequences: Sequences,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """float64 [num_tokens, heads, value_dim]; a token that sees no key gives zeros."""
    heads = q.shape[1]
    group = heads // key_cache.shape[2]
    output = q.new_zeros(q.shape[0], heads, value_cache.shape[-1], dtype=torch.float64)
    for request, (begin, length) in enumerate(
        zip(sequences.offsets, sequences.lengths, strict=False)
    ):
        kv_len = int(table.kv_lens[request])
        keys, values = (
            torch.stack(
                [
                    cache[int(table.pages[request, n // table.page_size]), n % table.page_size]
                    for n in range(kv_len)
                ]
            )
            .double()
            .repeat_interleave(group, 1)
            if kv_len
            else None
            for cache in (key_cache, value_cache)
        )
        if keys is None or values is None:
            continue
        for row in range(length):
            position = kv_len - length + row
            low = 0 if window is None else max(0, position - window + 1)
            seen = slice(low, position + 1)
            logits = scale * torch.einsum("hd,nhd->hn", q[begin + row].double(), keys[seen])
            output[begin + row] = torch.einsum("hn,nhv->hv", logits.softmax(-1), values[seen])
    return output
