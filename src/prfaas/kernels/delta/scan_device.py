"""The part of a chunk that needs the state before it, chunk after chunk. See `launches`."""

import triton
import triton.language as tl

from prfaas.kernels.device import offset64


@triton.jit
def slab_of(state, index, SLAB: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Rows ``index * SLAB`` onwards of a [BLOCK_K, BLOCK_V] state in registers: [SLAB, BLOCK_V]."""
    slabs = tl.reshape(state, (BLOCK_K // SLAB, SLAB, BLOCK_V))
    is_wanted = tl.arange(0, BLOCK_K // SLAB)[:, None, None] == index
    return tl.sum(tl.where(is_wanted, slabs, 0.0), axis=0)


@triton.jit
def add_to_slab(
    state, index, change, SLAB: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    """The state with [SLAB, BLOCK_V] added to its rows ``index * SLAB`` onwards."""
    slabs = tl.reshape(state, (BLOCK_K // SLAB, SLAB, BLOCK_V))
    is_wanted = tl.arange(0, BLOCK_K // SLAB)[:, None, None] == index
    slabs += tl.where(is_wanted, change[None, :, :], 0.0)
    return tl.reshape(slabs, (BLOCK_K, BLOCK_V))


@triton.jit
def scan(
    q,
    k,
    w,
    u,
    p,
    factors,
    decay,
    initial,
    output,
    final,
    checkpoints,
    starts,
    lengths,
    checkpoint_rows,
    first_chunks,
    final_rows,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    IS_MAP: tl.constexpr,
    V_TILES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLAB: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """One program: some columns of the state of one head, through the chunks of one run of chunks.

    A run is a sequence, or a segment of one. With IS_MAP it writes the run's affine map instead of
    outputs: the first tiles hold the state that a start from zero leads to, the others that of a
    start from the identity with values of zero.
    """
    tile = tl.program_id(0) % TILES
    head = (tl.program_id(0) // TILES) % HEADS
    run = tl.program_id(0) // (TILES * HEADS)
    final_row = tl.cast(run, tl.int64)
    if final_rows is not None:
        final_row = tl.cast(tl.load(final_rows + offset64(run, 1)), tl.int64)
    if IS_MAP:
        if final_row >= 0:  # nothing follows a sequence's last run
            return
        final_row = tl.cast(run, tl.int64)
    first = tl.load(first_chunks + offset64(run, 1))
    last = tl.load(first_chunks + offset64(run, 1) + 1)

    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_K)
    is_channel = channels < K
    is_value = True
    WIDTH: tl.constexpr = V + K if IS_MAP else V
    if IS_MAP:
        is_value = tile < V_TILES
        columns = tl.where(is_value, tile, tile - V_TILES) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column = columns < tl.where(is_value, V, K)
        written = tl.where(is_value, columns, columns + V)
    else:
        columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column = columns < V
        written = columns
    in_state = is_channel[:, None] & is_column[None, :]
    state_places = channels[:, None] * WIDTH + written[None, :]

    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if IS_MAP:
        is_one = in_state & (channels[:, None] == columns[None, :])
        state = tl.where(is_one & (tile >= V_TILES), 1.0, state)
    if initial is not None:
        initial += (offset64(run, HEADS) + head) * (K * V)
        state = tl.load(initial + state_places, in_state, 0.0).to(tl.float32)

    q += offset64(head // GROUP, Q_HEAD)
    k += offset64(head // GROUP, K_HEAD)
    w += offset64(head, K)
    u += offset64(head, V)
    if not IS_MAP:
        p += offset64(head, ROWS)
        output += offset64(head, V)
    for chunk in tl.range(first, last):
        start = tl.load(starts + offset64(chunk, 1))
        is_row = rows < tl.load(lengths + offset64(chunk, 1))
        place = offset64(chunk, HEADS) + head
        in_values = is_row[:, None] & is_column[None, :]
        if IS_MAP:  # a select: 3.9 interprets no mask that is made with a scalar
            in_values = tl.where(is_value, in_values, False)
        value_places = rows[:, None] * (HEADS * V) + columns[None, :]
        change = tl.load(u + offset64(start, HEADS * V) + value_places, in_values, 0.0)
        change = change.to(tl.float32)
        found = tl.zeros((ROWS, BLOCK_V), tl.float32)
        for slab in tl.range(0, BLOCK_K // SLAB):
            sources = slab * SLAB + tl.arange(0, SLAB)
            in_keys = is_row[:, None] & (sources < K)[None, :]
            before = slab_of(state, slab, SLAB, BLOCK_K, BLOCK_V).to(DOT_TYPE)
            w_rows = tl.load(
                w + offset64(start, HEADS * K) + (rows[:, None] * (HEADS * K) + sources[None, :]),
                in_keys,
                0.0,
            )
            change -= tl.dot(w_rows.to(DOT_TYPE), before, input_precision=DOT_PRECISION)
            if not IS_MAP:
                q_rows = tl.load(
                    q + offset64(start, Q_TOKEN) + (rows[:, None] * Q_TOKEN + sources[None, :]),
                    in_keys,
                    0.0,
                )
                found = tl.dot(q_rows.to(DOT_TYPE), before, found, input_precision=DOT_PRECISION)
        if not IS_MAP:
            scores = tl.load(
                p
                + offset64(start, HEADS * ROWS)
                + (rows[:, None] * (HEADS * ROWS) + rows[None, :]),
                is_row[:, None],
                0.0,
            )
            q_factor = tl.load(factors + place * (2 * ROWS) + rows)
            found = tl.dot(
                scores.to(DOT_TYPE),
                change.to(DOT_TYPE),
                found * q_factor[:, None],
                input_precision=DOT_PRECISION,
            )
            tl.store(
                output + offset64(start, HEADS * V) + value_places,
                found.to(output.dtype.element_ty),
                in_values,
            )
        if IS_PER_CHANNEL:
            kept = tl.load(decay + place * K + channels, is_channel, 0.0)
            state *= kept[:, None]
        else:
            state *= tl.load(decay + place)
        k_factor = tl.load(factors + place * (2 * ROWS) + (ROWS + rows))
        change = (change * k_factor[:, None]).to(DOT_TYPE)
        for slab in tl.range(0, BLOCK_K // SLAB):
            sources = slab * SLAB + tl.arange(0, SLAB)
            k_rows = tl.load(
                k + offset64(start, K_TOKEN) + (rows[:, None] * K_TOKEN + sources[None, :]),
                is_row[:, None] & (sources < K)[None, :],
                0.0,
            )
            keys = tl.trans(k_rows).to(DOT_TYPE)
            if SLAB == BLOCK_K:
                state = tl.dot(keys, change, state, input_precision=DOT_PRECISION)
            else:
                added = tl.dot(keys, change, input_precision=DOT_PRECISION)
                state = add_to_slab(state, slab, added, SLAB, BLOCK_K, BLOCK_V)
        if checkpoint_rows is not None:
            row = tl.load(checkpoint_rows + offset64(chunk, 1))
            there = checkpoints + (offset64(row, HEADS) + head) * (K * V)
            tl.store(there + state_places, state, tl.where(row >= 0, in_state, False))
    if final_row >= 0:
        final += (final_row * HEADS + head) * (K * WIDTH)
        tl.store(final + state_places, state, in_state)
