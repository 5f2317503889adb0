"""Program that appends rows to a paged cache."""

import triton
import triton.language as tl

from prfaas.kernels.device import offset64


@triton.jit(do_not_specialize=["table_stride"])
def paged_write_kernel(
    rows,
    cache,
    pages,
    kv_lens,
    offsets,
    sequence_ids,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROW_TOKEN: tl.constexpr,
    ROW_HEAD: tl.constexpr,
    CACHE_PAGE: tl.constexpr,
    CACHE_SLOT: tl.constexpr,
    CACHE_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens, tiles of BLOCK elements of a row)."""
    token = tl.program_id(0)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < HEADS * DIM
    element = offset64(element, 1)  # heads may lie far apart: head-major caches
    head, dim = element // DIM, element % DIM
    owner = tl.load(sequence_ids + offset64(token, 1))
    end = tl.load(offsets + offset64(owner, 1) + 1)
    position = tl.load(kv_lens + offset64(owner, 1)) - end + token
    column = position // PAGE_SIZE
    page = tl.load(pages + offset64(owner, table_stride) + column)
    source = rows + offset64(token, ROW_TOKEN) + head * ROW_HEAD + dim
    values = tl.load(source, mask=inside)
    base = cache + offset64(page, CACHE_PAGE) + offset64(position - column * PAGE_SIZE, CACHE_SLOT)
    tl.store(base + head * CACHE_HEAD + dim, values, mask=inside)
