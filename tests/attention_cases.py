"""Paged caches for tests: permuted pages, keys and values in one row, NaN where no token is."""

from __future__ import annotations

import attrs
import torch

from kernel_paths import DEVICE
from poison import PoisonedMemory
from prfaas.kernels import PageTable


@attrs.frozen(kw_only=True, eq=False)
class PagedCase:
    """A pool and what was written to it.

    Attributes:
        keys, values: views [num_pages, page_size, kv_heads, dim] of one pool, whose rows are the
            keys and then the values.
        rows: [num_pages, page_size, row], the pool itself.
        table: pages of each request, in no order.
        memory: the poison around the pool.
        request_keys, request_values: per request [kv_len, kv_heads, dim], in token order.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor
    table: PageTable
    memory: PoisonedMemory
    request_keys: list[torch.Tensor]
    request_values: list[torch.Tensor]


def paged_case(
    kv_lens: tuple[int, ...],
    *,
    page_size: int = 16,
    kv_heads: int = 1,
    key: int = 64,
    value: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    key_factor: float = 1.0,
    hidden_before: tuple[int, ...] | None = None,
) -> PagedCase:
    """Writes random keys and values of every request to a pool that is otherwise NaN.

    ``hidden_before`` gives per request the first position that is written: those before it stay
    NaN, as where a window has passed and the page belongs to someone else now.
    """
    value = key if value is None else value
    make = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in kv_lens]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=make).tolist()
    pages = [order[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]
    width = kv_heads * (key + value)
    bits = torch.full((num_pages, page_size, width * dtype.itemsize), 0xFF, dtype=torch.uint8)
    memory = PoisonedMemory()
    rows = memory.place(bits.view(dtype).to(DEVICE), row_padding=8)
    keys = rows[..., : kv_heads * key].unflatten(-1, (kv_heads, key))
    values = rows[..., kv_heads * key :].unflatten(-1, (kv_heads, value))
    request_keys, request_values = [], []
    for request, (length, own) in enumerate(zip(kv_lens, pages, strict=True)):
        shape = (length, kv_heads)
        k = (torch.randn(*shape, key, generator=make) * key_factor).to(dtype).to(DEVICE)
        v = torch.randn(*shape, value, generator=make).to(dtype).to(DEVICE)
        for n in range(hidden_before[request] if hidden_before else 0, length):
            page, slot = own[n // page_size], n % page_size
            keys[page, slot], values[page, slot] = k[n], v[n]
        request_keys.append(k)
        request_values.append(v)
    table = PageTable(pages, kv_lens, page_size=page_size, num_pages=num_pages, device=rows.device)
    return PagedCase(
        keys=keys,
        values=values,
        rows=rows,
        table=table,
        memory=memory,
        request_keys=request_keys,
        request_values=request_values,
    )


def random_queries(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 1, memory: PoisonedMemory | None
) -> torch.Tensor:
    """Normal numbers, inside poison with padded rows if there is ``memory``."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)
    return made if memory is None else memory.place(made, row_padding=8)
