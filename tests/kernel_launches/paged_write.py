"""Launches of `paged_write`."""

from __future__ import annotations

import torch

from prfaas.kernels.attention.write_launches import build
from prfaas.kernels.launch import Launch
from prfaas.kernels.page_table import PageTable
from prfaas.kernels.sequences import Sequences

META = torch.device("meta")


def _build(dtype: torch.dtype, heads: int, dim: int) -> Launch:
    table = PageTable.trusted(
        torch.empty(2, 5, dtype=torch.int32, device=META),
        torch.empty(2, dtype=torch.int32, device=META),
        page_size=16,
        num_pages=9,
        max_kv_len=80,
    )
    rows = torch.empty(3, heads, dim, dtype=dtype, device=META)
    cache = torch.empty(9, 16, heads, dim, dtype=dtype, device=META)
    return build(rows, cache, table, Sequences.of_lengths((1, 2)))


LAUNCHES = {
    "bf16_8x256": lambda arch: _build(torch.bfloat16, 8, 256),
    "fp32_1x576": lambda arch: _build(torch.float32, 1, 576),
    "int8_3x60": lambda arch: _build(torch.int8, 3, 60),
}
