"""The launch that appends rows to a paged cache."""

from __future__ import annotations

import torch
import triton

from prfaas.kernels.attention.write_device import paged_write_kernel
from prfaas.kernels.launch import Launch
from prfaas.kernels.page_table import PageTable
from prfaas.kernels.sequences import Sequences

MAX_BLOCK = 1024


def build(
    rows: torch.Tensor, cache: torch.Tensor, page_table: PageTable, sequences: Sequences
) -> Launch:
    """One program per token and 1,024 elements: a row of 2 KiB in bf16 is one pass of 4 warps."""
    _, heads, dim = rows.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(heads * dim))
    return Launch(
        kernel=paged_write_kernel,
        grid=(sequences.num_tokens, -(-heads * dim // block)),
        arguments={
            "rows": rows,
            "cache": cache,
            "pages": page_table.pages,
            "kv_lens": page_table.kv_lens,
            "offsets": sequences.offset_tensor(rows.device),
            "sequence_ids": sequences.sequence_ids(rows.device),
            "table_stride": page_table.pages.stride(0),
        },
        constants={
            "PAGE_SIZE": page_table.page_size,
            "HEADS": heads,
            "DIM": dim,
            "ROW_TOKEN": rows.stride(0),
            "ROW_HEAD": rows.stride(1),
            "CACHE_PAGE": cache.stride(0),
            "CACHE_SLOT": cache.stride(1),
            "CACHE_HEAD": cache.stride(2),
            "BLOCK": block,
        },
        num_warps=4 if block >= 512 else 1,
        num_stages=1,
    )
