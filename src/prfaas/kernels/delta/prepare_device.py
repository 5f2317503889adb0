"""Everything of a chunk that needs no state: scores, the inverse, W and U. See `launches`."""

import triton
import triton.language as tl

from prfaas.kernels.device import offset64

LOG2_E = tl.constexpr(1.4426950408889634)
EPSILON = tl.constexpr(1e-6)


@triton.jit
def _block_columns(matrix, BACK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, ROWS] to [ROWS, SIZE]: of each row the columns of its block of SIZE, or of the block
    ``BACK`` before it; zeros where there is none."""
    COUNT: tl.constexpr = ROWS // SIZE
    wanted = tl.arange(0, ROWS)[:, None, None] // SIZE - BACK
    blocks = tl.reshape(matrix, (ROWS, COUNT, SIZE))
    return tl.sum(tl.where(wanted == tl.arange(0, COUNT)[None, :, None], blocks, 0.0), axis=1)


@triton.jit
def _unit_lower_inverse(a, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular [64, 64] in float32.

    The four 16 x 16 blocks of the diagonal at once by forward substitution, row after row. Then
    inverses of neighbours are joined, pairs of 16 rows and then of 32: [[X, 0], [-Y L X, Y]]
    inverts [[X^-1, 0], [L, Y^-1]]. A power series of ``a`` would be shorter, and wrong where keys
    are alike: its terms grow as binomials do, and cancel.
    """
    rows = tl.arange(0, 64)
    pair = tl.arange(0, 2)
    blocks = tl.reshape(_block_columns(a, 0, 16, 64), (4, 16, 16))
    columns = tl.trans(blocks, (0, 2, 1))  # of a row, the coefficients lie along dimension 1
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros((4, 16, 16), tl.float32)
    for index in tl.range(1, 16):
        coefficients = tl.sum(tl.where(column == index, columns, 0.0), axis=2)
        below = tl.sum(coefficients[:, :, None] * inverse, axis=1)
        inverse = tl.where(row == index, inverse - below[:, None, :], inverse)

    inverse = tl.reshape(inverse, (64, 16))
    is_own = (rows // 16 % 2)[:, None, None] == pair[None, :, None]
    inverse = tl.reshape(tl.where(is_own, inverse[:, None, :], 0.0), (2, 32, 32))
    half = tl.arange(0, 32) // 16
    is_lower = half[None, :, None] > half[None, None, :]
    lower = tl.where(is_lower, tl.reshape(_block_columns(a, 0, 32, 64), (2, 32, 32)), 0.0)
    lower = tl.dot(inverse, lower, input_precision=PRECISION)
    inverse -= tl.dot(lower, inverse, input_precision=PRECISION)

    is_first = pair[:, None, None] == 0
    first = tl.sum(tl.where(is_first, inverse, 0.0), axis=0)
    second = tl.sum(tl.where(is_first, 0.0, inverse), axis=0)
    lower = tl.sum(tl.reshape(_block_columns(a, 1, 32, 64), (2, 32, 32)), axis=0)
    lower = tl.dot(second, lower, input_precision=PRECISION)
    lower = tl.dot(lower, first, input_precision=PRECISION)
    lower = tl.reshape(tl.where(is_first, 0.0, -lower[None, :, :]), (64, 32))
    inverse = tl.reshape(inverse, (64, 32))
    is_own = (rows // 32)[:, None, None] == pair[None, :, None]
    return tl.reshape(tl.where(is_own, inverse[:, None, :], lower[:, None, :]), (64, 64))


@triton.jit
def prepare(
    q,
    k,
    v,
    g,
    beta,
    w,
    u,
    p,
    q_decayed,
    k_decayed,
    factors,
    decay,
    starts,
    lengths,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    G_TOKEN: tl.constexpr,
    G_HEAD: tl.constexpr,
    BETA_TOKEN: tl.constexpr,
    BETA_HEAD: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    IS_NARROW: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    FLOAT32_DOT: tl.constexpr,
):
    """One program: one chunk of one value head."""
    chunk = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start = tl.load(starts + offset64(chunk, 1))
    length = tl.load(lengths + offset64(chunk, 1))
    rows = tl.arange(0, ROWS)
    is_row = rows < length
    k_columns = tl.arange(0, BLOCK_K)
    v_columns = tl.arange(0, BLOCK_V)

    q += offset64(start, Q_TOKEN) + offset64(head // GROUP, Q_HEAD)
    k += offset64(start, K_TOKEN) + offset64(head // GROUP, K_HEAD)
    v += offset64(start, V_TOKEN) + offset64(head, V_HEAD)
    g += offset64(start, G_TOKEN) + offset64(head, G_HEAD)
    beta += offset64(start, BETA_TOKEN) + offset64(head, BETA_HEAD)
    w += offset64(start, HEADS * K) + offset64(head, K)
    u += offset64(start, HEADS * V) + offset64(head, V)
    p += offset64(start, HEADS * ROWS) + offset64(head, ROWS)
    place = offset64(chunk, HEADS) + head
    factors += place * (2 * ROWS)

    # Scores between rows, without betas and norms.
    a = tl.zeros((ROWS, ROWS), tl.float32)
    scores = tl.zeros((ROWS, ROWS), tl.float32)
    q_squares = tl.zeros((ROWS,), tl.float32)
    k_squares = tl.zeros((ROWS,), tl.float32)
    own_scores = tl.zeros((ROWS,), tl.float32)
    for slab in tl.range(0, K, BLOCK_K):
        columns = slab + k_columns
        is_inside = is_row[:, None] & (columns < K)[None, :]
        q_rows = tl.load(q + (rows[:, None] * Q_TOKEN + columns[None, :]), is_inside, 0.0)
        k_rows = tl.load(k + (rows[:, None] * K_TOKEN + columns[None, :]), is_inside, 0.0)
        q_wide = q_rows.to(tl.float32)
        k_wide = k_rows.to(tl.float32)
        if NORMALIZES:
            q_squares += tl.sum(q_wide * q_wide, axis=1)
            k_squares += tl.sum(k_wide * k_wide, axis=1)
        if IS_PER_CHANNEL:
            # Row i and column j < i meet in one level: the smallest aligned block that holds both
            # has i in its second half and j in its first. Decay from j to i is that from j to the
            # end of the first half, times that from there to i: both at most 1, for any gate.
            own_scores += tl.sum(q_wide * k_wide, axis=1)
            gates = tl.load(g + (rows[:, None] * G_TOKEN + columns[None, :]), is_inside, 0.0)
            prefix = gates.to(tl.float32) * LOG2_E  # sum within the half, this row included
            suffix = tl.zeros((ROWS, BLOCK_K), tl.float32)  # sum of later rows within the half
            for level in tl.range(0, LEVELS):
                half = rows >> level
                is_second = (half % 2 == 1)[:, None]
                meets = is_second & (half[:, None] - 1 == half[None, :])
                factor = tl.exp2(tl.where(is_second, prefix, suffix))
                k_part = (k_wide * factor).to(DOT_TYPE)
                found = tl.dot(k_part, tl.trans(k_part), input_precision=DOT_PRECISION)
                a += tl.where(meets, found, 0.0)
                q_part = (q_wide * factor).to(DOT_TYPE)
                found = tl.dot(q_part, tl.trans(k_part), input_precision=DOT_PRECISION)
                scores += tl.where(meets, found, 0.0)
                # All rows of a half know its sum; each takes that of the other half.
                other = tl.broadcast_to((rows ^ (1 << level))[:, None], (ROWS, BLOCK_K))
                other = tl.gather(prefix + suffix, other, axis=0)
                prefix += tl.where(is_second, other, 0.0)
                suffix += tl.where(is_second, 0.0, other)
        else:
            q_part = q_rows.to(DOT_TYPE)
            k_part = k_rows.to(DOT_TYPE)
            a = tl.dot(k_part, tl.trans(k_part), a, input_precision=DOT_PRECISION)
            scores = tl.dot(q_part, tl.trans(k_part), scores, input_precision=DOT_PRECISION)

    # Betas, norms and scalar gates.
    is_earlier = rows[:, None] > rows[None, :]
    betas = tl.load(beta + rows * BETA_TOKEN, is_row, 0.0).to(tl.float32)
    k_norm = tl.where(is_row, 1.0, 0.0)
    q_norm = k_norm * scale
    if NORMALIZES:
        k_norm *= tl.rsqrt(k_squares + EPSILON)
        q_norm *= tl.rsqrt(q_squares + EPSILON)
    a *= (betas * k_norm)[:, None] * k_norm[None, :]
    scores *= q_norm[:, None] * k_norm[None, :]
    weights = betas * k_norm
    if IS_PER_CHANNEL:
        scores += tl.where(
            rows[:, None] == rows[None, :], (own_scores * q_norm * k_norm)[:, None], 0.0
        )
        q_factor = q_norm
        k_factor = k_norm
    else:
        gates = tl.load(g + rows * G_TOKEN, is_row, 0.0).to(tl.float32) * LOG2_E
        # Sums of the gates between two rows, not differences of sums: exact after a strong gate.
        between = tl.where(is_earlier, gates[:, None], 0.0)
        suffix = tl.sum(between, axis=0)
        factor = tl.exp2(tl.cumsum(between, axis=0))
        a *= factor
        scores = tl.where(rows[:, None] >= rows[None, :], scores * factor, 0.0)
        prefix = tl.exp2(tl.cumsum(gates, axis=0))
        weights *= prefix
        q_factor = q_norm * prefix
        k_factor = k_norm * tl.exp2(suffix)
        tl.store(decay + place, tl.exp2(tl.sum(gates, axis=0)))
    a = tl.where(is_earlier, a, 0.0)
    tl.store(factors + rows, q_factor)
    tl.store(factors + ROWS + rows, k_factor)
    tl.store(
        p + (rows[:, None] * (HEADS * ROWS) + rows[None, :]),
        scores.to(p.dtype.element_ty),
        is_row[:, None],
    )

    inverse = _unit_lower_inverse(a, FLOAT32_DOT)

    # W and U: what is constant in a row is folded into the inverse's columns before rounding. What
    # rounding to 16 bits takes away is a second product: where keys are alike, much cancels.
    folded = inverse * weights[None, :]
    coarse = folded.to(DOT_TYPE)
    fine = (folded - coarse.to(tl.float32)).to(DOT_TYPE)
    if IS_PER_CHANNEL:
        q_decayed += offset64(start, HEADS * K) + offset64(head, K)
        k_decayed += offset64(start, HEADS * K) + offset64(head, K)
        decay += place * K
    for slab in tl.range(0, K, BLOCK_K):
        columns = slab + k_columns
        is_inside = is_row[:, None] & (columns < K)[None, :]
        places = rows[:, None] * (HEADS * K) + columns[None, :]
        k_rows = tl.load(k + (rows[:, None] * K_TOKEN + columns[None, :]), is_inside, 0.0)
        if IS_PER_CHANNEL:
            kind = q_decayed.dtype.element_ty
            gates = tl.load(g + (rows[:, None] * G_TOKEN + columns[None, :]), is_inside, 0.0)
            gates = gates.to(tl.float32) * LOG2_E
            tl.store(decay + columns, tl.exp2(tl.sum(gates, axis=0)), columns < K)
            factor = tl.exp2(tl.cumsum(gates, axis=0))
            q_rows = tl.load(q + (rows[:, None] * Q_TOKEN + columns[None, :]), is_inside, 0.0)
            tl.store(q_decayed + places, (q_rows.to(tl.float32) * factor).to(kind), is_inside)
            k_part = (k_rows.to(tl.float32) * factor).to(DOT_TYPE)
            is_inside = (rows + 1 < length)[:, None] & (columns < K)[None, :]
            gates = tl.load(g + ((rows[:, None] + 1) * G_TOKEN + columns[None, :]), is_inside, 0.0)
            factor = tl.exp2(tl.cumsum(gates.to(tl.float32) * LOG2_E, axis=0, reverse=True))
            is_inside = is_row[:, None] & (columns < K)[None, :]
            tl.store(k_decayed + places, (k_rows.to(tl.float32) * factor).to(kind), is_inside)
        else:
            k_part = k_rows.to(DOT_TYPE)
        found = tl.dot(coarse, k_part, input_precision=DOT_PRECISION)
        if IS_NARROW:
            found = tl.dot(fine, k_part, found)
        tl.store(w + places, found.to(w.dtype.element_ty), is_inside)
    folded = inverse * betas[None, :]
    coarse = folded.to(DOT_TYPE)
    fine = (folded - coarse.to(tl.float32)).to(DOT_TYPE)
    for slab in tl.range(0, V, BLOCK_V):
        columns = slab + v_columns
        is_inside = is_row[:, None] & (columns < V)[None, :]
        v_rows = tl.load(v + (rows[:, None] * V_TOKEN + columns[None, :]), is_inside, 0.0)
        found = tl.dot(coarse, v_rows.to(DOT_TYPE), input_precision=DOT_PRECISION)
        if IS_NARROW:
            found = tl.dot(fine, v_rows.to(DOT_TYPE), found)
        places = rows[:, None] * (HEADS * V) + columns[None, :]
        tl.store(u + places, found.to(u.dtype.element_ty), is_inside)
