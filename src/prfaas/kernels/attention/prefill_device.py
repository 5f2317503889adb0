"""Triton program of `paged_prefill`: one tile of query tokens of one head."""

import triton
import triton.language as tl

from prfaas.kernels.attention.device import attend, load_queries
from prfaas.kernels.device import offset64


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "pages_stride"])
def paged_prefill_kernel(
    output,  # [num_tokens, heads, value_dim], contiguous
    q,
    q_tail,
    key_cache,
    key_tail,
    value_cache,
    pages,
    kv_lens,
    offsets,
    tile_starts,
    tile_lengths,
    log2_scale,
    num_tiles,
    num_sequences,
    pages_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The last tiles of a sequence see most keys: they start first, so that short ones fill the end.
    tile = num_tiles - 1 - tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(tile_starts + offset64(tile, 1))
    length = tl.load(tile_lengths + offset64(tile, 1))

    sequence = 0
    above = num_sequences
    while above - sequence > 1:  # the last sequence that begins at or before the tile
        middle = (sequence + above) // 2
        is_before = tl.load(offsets + offset64(middle, 1)) <= start
        sequence = tl.where(is_before, middle, sequence)
        above = tl.where(is_before, above, middle)
    stop = tl.load(offsets + offset64(sequence, 1) + 1)
    kv_len = tl.load(kv_lens + offset64(sequence, 1))
    page_row = pages + offset64(sequence, pages_stride)

    first_position = kv_len - tl.cast(stop - start, tl.int32)
    rows = tl.arange(0, BLOCK_M)
    is_row = rows < length
    positions = first_position + rows
    end = first_position + length
    # Tiles of keys from gap_begin to gap_end are seen by every row: these need no mask.
    gap_end = (first_position + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
        seen_by_all = tl.maximum(end - WINDOW, 0)
        gap_begin = (seen_by_all + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        gap_begin = tl.minimum(gap_begin, gap_end)
    else:
        begin = 0
        gap_begin = 0
    first = begin // BLOCK_N * BLOCK_N
    lowest = positions - WINDOW + 1

    tokens = start + rows
    q_at = offset64(tokens, Q_TOKEN) + offset64(head, Q_HEAD)
    queries = load_queries(q, q_at, is_row, KEY_WIDTH, BLOCK_KEY, False)
    queries_tail = queries
    if TAIL_WIDTH > 0:
        queries_tail = load_queries(q_tail, q_at, is_row, TAIL_WIDTH, BLOCK_TAIL, False)
    key_cache += offset64(head // GROUP, KEY_HEAD)
    value_cache += offset64(head // GROUP, VALUE_HEAD)
    if TAIL_WIDTH > 0:
        key_tail += offset64(head // GROUP, KEY_HEAD)

    summed = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -1e30, tl.float32)
    for is_masked in tl.static_range(2):
        if is_masked:
            pass_first = first if WINDOW > 0 else gap_end
            pass_last = end - (gap_end - gap_begin) if WINDOW > 0 else end
        else:
            pass_first = gap_begin
            pass_last = gap_end
        summed, total, peak = attend(
            summed,
            total,
            peak,
            queries,
            queries_tail,
            q,
            q_at,
            is_row,
            lowest,
            positions,
            begin,
            end,
            pass_first,
            pass_last,
            gap_begin,
            gap_end - gap_begin,
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
            IS_MASKED=is_masked,
            HAS_LOWEST=WINDOW > 0,
            HAS_GAP=is_masked and WINDOW > 0,
            SHARES_VALUES=False,
            PRECISION=PRECISION,
        )
    summed = summed / tl.where(total > 0.0, total, 1.0)[:, None]
    columns = tl.arange(0, BLOCK_VALUE)
    at = (offset64(tokens, HEADS) + head) * VALUE_WIDTH
    mask = is_row[:, None] & (columns < VALUE_WIDTH)[None, :]
    pointers = output + at[:, None] + columns[None, :]
    tl.store(pointers, summed.to(output.dtype.element_ty), mask=mask)
