"""Device functions of paged attention: where keys lie, and one pass of softmax over them."""

import triton
import triton.language as tl

from prfaas.kernels.device import offset64


@triton.jit
def load_queries(
    q, offsets, is_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_AGAIN: tl.constexpr
):
    """A tile [rows, BLOCK] of vectors of WIDTH elements; zero outside. IS_AGAIN: read it where it
    is used; the compiler would else keep it in registers from before the loop."""
    columns = tl.arange(0, BLOCK)
    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    return tl.load(q + offsets[:, None] + columns[None, :], mask=mask, other=0.0, volatile=IS_AGAIN)


@triton.jit
def load_rows(
    cache, offsets, is_key, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_MASKED: tl.constexpr
):
    """A tile [keys, BLOCK] of the WIDTH elements of cache rows. What no token of this request
    wrote is never read: it may hold NaN, and zero times NaN is NaN."""
    columns = tl.arange(0, BLOCK)
    pointers = cache + offsets[:, None] + columns[None, :]
    if IS_MASKED:
        if WIDTH >= BLOCK:
            tile = tl.load(pointers, mask=is_key[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=is_key[:, None] & (columns < WIDTH)[None, :], other=0.0)
    else:
        if WIDTH >= BLOCK:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def attend(
    summed,  # [rows, BLOCK_VALUE], weighted sum of values so far
    total,  # [rows], sum of weights so far
    peak,  # [rows], largest logit so far, in log2
    queries,  # [rows, BLOCK_KEY]; not read with BLOCK_PART
    queries_tail,  # [rows, BLOCK_TAIL]
    q,  # the same in memory: read again in every step with BLOCK_PART
    q_at,  # [rows]
    is_row,  # [rows]
    lowest,  # [rows], first key that a row sees; read with HAS_LOWEST
    highest,  # [rows], last key that a row sees
    begin,  # first key that any row sees
    end,  # one past the last key that any row sees
    first,  # first key of the pass, a multiple of BLOCK_N
    last,  # one past the last key of the pass
    gap_begin,  # with HAS_GAP: the pass jumps from this key ...
    gap_size,  # ... over so many
    page_row,  # page ids of the request
    key_cache,  # at the row of slot 0 of page 0 of this head; so are the next two
    key_tail,
    value_cache,
    log2_scale,
    PAGE_SIZE: tl.constexpr,
    KEY_PAGE: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    VALUE_PAGE: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    TAIL_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_LOWEST: tl.constexpr,
    HAS_GAP: tl.constexpr,
    SHARES_VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds keys ``first`` to ``last - 1`` to a running softmax.

    Without IS_MASKED every row sees every key of the pass. With SHARES_VALUES the first part of the
    key rows is also the values, loaded once. With BLOCK_PART the queries are read and multiplied in
    parts of so many columns: three tf32 products keep every operand twice, and wide float32 queries
    would fill the registers.
    """
    for step in range(first, last, BLOCK_N):
        start = step
        if HAS_GAP:
            start = step + tl.where(step >= gap_begin, gap_size, 0)
        keys = start + tl.arange(0, BLOCK_N)
        is_key = (keys >= begin) & (keys < end)
        if PAGE_SIZE % BLOCK_N == 0:  # a tile never leaves its page
            page = tl.load(page_row + start // PAGE_SIZE)
            slots = start % PAGE_SIZE + tl.arange(0, BLOCK_N)
        else:
            if IS_MASKED:
                page = tl.load(page_row + keys // PAGE_SIZE, mask=is_key, other=0)
            else:
                page = tl.load(page_row + keys // PAGE_SIZE)
            slots = keys % PAGE_SIZE
        at = offset64(page, KEY_PAGE) + offset64(slots, KEY_TOKEN)
        if BLOCK_PART > 0:
            scores = tl.zeros([summed.shape[0], BLOCK_N], tl.float32)
            for part in tl.static_range(0, BLOCK_KEY, BLOCK_PART):
                if part < KEY_WIDTH:
                    q_part = load_queries(
                        q, q_at + part, is_row, KEY_WIDTH - part, BLOCK_PART, True
                    )
                    k_part = load_rows(
                        key_cache, at + part, is_key, KEY_WIDTH - part, BLOCK_PART, IS_MASKED
                    )
                    scores = tl.dot(q_part, tl.trans(k_part), scores, input_precision=PRECISION)
        else:
            k = load_rows(key_cache, at, is_key, KEY_WIDTH, BLOCK_KEY, IS_MASKED)
            scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
        if TAIL_WIDTH > 0:
            k_tail = load_rows(key_tail, at, is_key, TAIL_WIDTH, BLOCK_TAIL, IS_MASKED)
            scores = tl.dot(queries_tail, tl.trans(k_tail), scores, input_precision=PRECISION)
        if IS_MASKED:
            sees = is_key[None, :] & (keys[None, :] <= highest[:, None])
            if HAS_LOWEST:
                sees = sees & (keys[None, :] >= lowest[:, None])
            scores = tl.where(sees, scores, -1e30)
        new_peak = tl.maximum(peak, tl.max(scores, 1) * log2_scale)
        weights = tl.exp2(scores * log2_scale - new_peak[:, None])
        # A row that has seen no key yet may weigh hidden ones; its first key makes the decay zero.
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
        summed = summed * decay[:, None]
        if SHARES_VALUES:
            v = k
        else:
            at_value = offset64(page, VALUE_PAGE) + offset64(slots, VALUE_TOKEN)
            v = load_rows(value_cache, at_value, is_key, VALUE_WIDTH, BLOCK_VALUE, IS_MASKED)
        summed = tl.dot(weights.to(v.dtype), v, summed, input_precision=PRECISION)
    return summed, total, peak
