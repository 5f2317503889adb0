"""Triton program of `paged_decode` and `mla_decode`: one split of the keys of one request, for a
block of query heads that share a key head."""

import triton
import triton.language as tl

from prfaas.kernels.attention.device import attend, load_queries
from prfaas.kernels.device import offset64


@triton.jit(do_not_specialize=["num_splits", "pages_stride"])
def paged_decode_kernel(
    output,  # [requests, heads, value_dim]; IS_SPLIT: float32 [requests, heads, splits, value_dim]
    log_sums,  # IS_SPLIT: float32 [requests, heads, splits], in log2
    q,
    q_tail,
    key_cache,
    key_tail,
    value_cache,
    pages,
    kv_lens,
    log2_scale,
    num_splits,
    pages_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    TAIL_TOKEN: tl.constexpr,
    TAIL_HEAD: tl.constexpr,
    KEY_PAGE: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    VALUE_PAGE: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    TAIL_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SHARES_VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    split = tl.program_id(1)
    head_block = program % HEAD_BLOCKS
    kv_head = program // HEAD_BLOCKS % KV_HEADS
    request = program // (HEAD_BLOCKS * KV_HEADS)

    kv_len = tl.load(kv_lens + offset64(request, 1))
    page_row = pages + offset64(request, pages_stride)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(kv_len - WINDOW, 0)
    tiles_begin = begin // BLOCK_N
    num_tiles = (kv_len + BLOCK_N - 1) // BLOCK_N - tiles_begin
    tiles_each = (num_tiles + num_splits - 1) // num_splits
    first = (tiles_begin + split * tiles_each) * BLOCK_N
    last = tl.minimum(first + tiles_each * BLOCK_N, kv_len)

    in_group = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    is_row = in_group < GROUP
    heads = kv_head * GROUP + in_group
    q_at = offset64(request, Q_TOKEN) + offset64(heads, Q_HEAD)
    queries = load_queries(q, q_at, is_row, KEY_WIDTH, BLOCK_KEY, False)
    queries_tail = queries
    if TAIL_WIDTH > 0:
        at = offset64(request, TAIL_TOKEN) + offset64(heads, TAIL_HEAD)
        queries_tail = load_queries(q_tail, at, is_row, TAIL_WIDTH, BLOCK_TAIL, False)
        key_tail += offset64(kv_head, KEY_HEAD)
    key_cache += offset64(kv_head, KEY_HEAD)
    if not SHARES_VALUES:
        value_cache += offset64(kv_head, VALUE_HEAD)

    summed = tl.zeros([BLOCK_H, BLOCK_VALUE], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    peak = tl.full([BLOCK_H], -1e30, tl.float32)
    newest = tl.zeros([BLOCK_H], tl.int32) + (kv_len - 1)
    summed, total, peak = attend(
        summed,
        total,
        peak,
        queries,
        queries_tail,
        q,
        q_at,
        is_row,
        newest,
        newest,
        begin,
        kv_len,
        first,
        last,
        0,
        0,
        page_row,
        key_cache,
        key_tail,
        value_cache,
        log2_scale,
        PAGE_SIZE,
        KEY_PAGE,
        KEY_TOKEN,
        VALUE_PAGE,
        VALUE_TOKEN,
        KEY_WIDTH,
        TAIL_WIDTH,
        VALUE_WIDTH,
        BLOCK_KEY,
        BLOCK_TAIL,
        BLOCK_VALUE,
        BLOCK_N,
        BLOCK_PART,
        IS_MASKED=True,
        HAS_LOWEST=False,  # `begin` is the bound of all rows
        HAS_GAP=False,
        SHARES_VALUES=SHARES_VALUES,
        PRECISION=PRECISION,
    )
    # No key in this split: zeros, and a logarithm that gives it no weight.
    is_empty = total == 0.0
    safe = tl.where(is_empty, 1.0, total)
    summed = summed / safe[:, None]
    row = offset64(request, KV_HEADS * GROUP) + heads
    if IS_SPLIT:
        row = row * num_splits + split
        log_sum = tl.where(is_empty, -1e30, peak + tl.log2(safe))
        tl.store(log_sums + row, log_sum, mask=is_row)
    columns = tl.arange(0, BLOCK_VALUE)
    pointers = output + (row * VALUE_WIDTH)[:, None] + columns[None, :]
    mask = is_row[:, None] & (columns < VALUE_WIDTH)[None, :]
    tl.store(pointers, summed.to(output.dtype.element_ty), mask=mask)
