"""The fused scan in Triton's language."""

import triton
import triton.language as tl

from prfaas.kernels.device import offset64


@triton.jit
def _load_states(base, values, STRIDE_K, STRIDE_V, K, V, BLOCK_K: tl.constexpr):
    """Key channels in parts of BLOCK_K, so that no operand of a dot product is large."""
    states = ()
    for part in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        keys = part * BLOCK_K + tl.arange(0, BLOCK_K)
        places = (base + keys * STRIDE_K)[:, None] + (values * STRIDE_V)[None, :]
        mask = (keys < K)[:, None] & (values < V)[None, :]
        states += (tl.load(places, mask=mask, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return states


@triton.jit
def _store_states(base, values, states, STRIDE_K, STRIDE_V, K, V, BLOCK_K: tl.constexpr):
    for part in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        keys = part * BLOCK_K + tl.arange(0, BLOCK_K)
        places = (base + keys * STRIDE_K)[:, None] + (values * STRIDE_V)[None, :]
        mask = (keys < K)[:, None] & (values < V)[None, :]
        tl.store(places, states[part], mask=mask)


@triton.jit(do_not_specialize=["scale"])
def decay_scan_kernel(
    q,
    k,
    v,
    gate,
    rate,
    skip,
    output,
    initial,
    final,
    checkpoints,
    starts,
    lengths,
    checkpoint_rows,
    first_chunks,
    scale,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    GATE_TOKEN: tl.constexpr,
    GATE_HEAD: tl.constexpr,
    RATE_HEAD: tl.constexpr,
    SKIP_HEAD: tl.constexpr,
    INITIAL_SEQUENCE: tl.constexpr,
    INITIAL_HEAD: tl.constexpr,
    INITIAL_K: tl.constexpr,
    INITIAL_V: tl.constexpr,
    STATE_K: tl.constexpr,
    STATE_V: tl.constexpr,
    IS_PER_TOKEN: tl.constexpr,
    IS_EXACT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCORE_TYPE: tl.constexpr,
    STATE_TYPE: tl.constexpr,
    SCORE_PRECISION: tl.constexpr,
    STATE_PRECISION: tl.constexpr,
):
    """One program per sequence, head and tile of value channels goes through all its chunks.

    ``STATE_K`` and ``STATE_V`` are strides of the contiguous results [.., HEADS, K * V].
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    RESET: tl.constexpr = -160.0  # 2^-160 is 0 in float32; keeps sums where they are exact
    NUM_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    tile = program % NUM_TILES
    head = (program // NUM_TILES) % HEADS
    sequence = program // (NUM_TILES * HEADS)
    group = head // PER_GROUP

    tokens = tl.arange(0, CHUNK)
    keys = tl.arange(0, BLOCK_K)
    NUM_PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    values = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = values < V
    is_causal = tokens[:, None] >= tokens[None, :]

    if initial is None:
        states = ()
        for _ in tl.static_range(NUM_PARTS):
            states += (tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32),)  # type: ignore[assignment]
    else:
        before = initial + offset64(sequence, INITIAL_SEQUENCE) + offset64(head, INITIAL_HEAD)
        states = _load_states(before, values, INITIAL_K, INITIAL_V, K, V, BLOCK_K)
    if rate is not None:
        decay_rate = tl.load(rate + offset64(head, RATE_HEAD)).to(tl.float32)
    if skip is not None:
        skip_factor = tl.load(skip + offset64(head, SKIP_HEAD)).to(tl.float32)
    if not IS_PER_TOKEN:
        constant = tl.load(gate + offset64(head, GATE_HEAD)).to(tl.float32)
        constant = tl.maximum(constant * LOG2E, RESET)

    first = tl.load(first_chunks + offset64(sequence, 1))
    end = tl.load(first_chunks + offset64(sequence, 1) + 1)
    for chunk in range(first, end):
        start = tl.load(starts + offset64(chunk, 1))
        length = tl.load(lengths + offset64(chunk, 1))
        is_token = tokens < length

        q_base = q + offset64(start, Q_TOKEN) + offset64(group, Q_HEAD)
        k_base = k + offset64(start, K_TOKEN) + offset64(group, K_HEAD)
        v_base = v + offset64(start, V_TOKEN) + offset64(head, V_HEAD)
        scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        result = tl.zeros((CHUNK, BLOCK_V), dtype=tl.float32)
        for part in tl.static_range(NUM_PARTS):
            rows = part * BLOCK_K + keys
            mask = is_token[:, None] & (rows < K)[None, :]
            query = tl.load(
                q_base + tokens[:, None] * Q_TOKEN + rows[None, :], mask=mask, other=0.0
            )
            key = tl.load(k_base + tokens[:, None] * K_TOKEN + rows[None, :], mask=mask, other=0.0)
            scores = tl.dot(query, tl.trans(key), scores, input_precision=SCORE_PRECISION)
            result = tl.dot(
                query.to(STATE_TYPE),
                states[part].to(STATE_TYPE),
                result,
                input_precision=STATE_PRECISION,
            )
        mask = is_token[:, None] & is_value[None, :]
        value = tl.load(v_base + tokens[:, None] * V_TOKEN + values[None, :], mask=mask, other=0.0)

        if IS_PER_TOKEN:
            gate_base = gate + offset64(start, GATE_TOKEN) + offset64(head, GATE_HEAD)
            step = tl.load(gate_base + tokens * GATE_TOKEN, mask=is_token, other=0.0).to(tl.float32)
            decay = step if rate is None else step * decay_rate
            decay = tl.maximum(decay * LOG2E, RESET)
            if IS_EXACT:
                coarse_step = tl.floor(decay * 1024.0 + 0.5) * 0.0009765625
                fine_step = decay - coarse_step
                coarse, fine = tl.cumsum(coarse_step, 0), tl.cumsum(fine_step, 0)
                all_coarse, all_fine = tl.sum(coarse_step, 0), tl.sum(fine_step, 0)
                between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
                to_row = coarse + fine
                to_end = (all_coarse - coarse) + (all_fine - fine)
                whole = all_coarse + all_fine
            else:
                to_row = tl.cumsum(decay, 0)
                whole = tl.sum(decay, 0)
                between = to_row[:, None] - to_row[None, :]
                to_end = whole - to_row
        else:
            between = constant * (tokens[:, None] - tokens[None, :]).to(tl.float32)
            to_row = constant * (tokens + 1).to(tl.float32)
            to_end = constant * (length - 1 - tokens).to(tl.float32)
            whole = constant * length.to(tl.float32)

        # exponents are above 0 only where the result is not used; there they must not overflow
        weights = scores * tl.exp2(tl.minimum(between, 0.0)) * scale
        column = tl.exp2(tl.minimum(to_end, 0.0))
        if rate is not None:
            weights = weights * step[None, :]
            column = column * step
        weights = tl.where(is_causal, weights, 0.0).to(STATE_TYPE)

        result = result * (tl.exp2(to_row) * scale)[:, None]
        result = tl.dot(weights, value.to(STATE_TYPE), result, input_precision=STATE_PRECISION)
        wide = value.to(tl.float32)
        if skip is not None:
            result += wide * skip_factor
        out_base = output + (offset64(start, HEADS) + head) * V
        tl.store(
            out_base + tokens[:, None] * (HEADS * V) + values[None, :],
            result.to(output.dtype.element_ty),
            mask=mask,
        )

        update = (wide * column[:, None]).to(SCORE_TYPE)
        whole_decay = tl.exp2(whole)
        updated = ()
        for part in tl.static_range(NUM_PARTS):
            rows = part * BLOCK_K + keys
            mask = is_token[:, None] & (rows < K)[None, :]
            key = tl.load(k_base + tokens[:, None] * K_TOKEN + rows[None, :], mask=mask, other=0.0)
            state = tl.dot(
                tl.trans(key), update, states[part] * whole_decay, input_precision=SCORE_PRECISION
            )
            updated += (state,)  # type: ignore[assignment]
        states = updated
        if checkpoints is not None:
            row = tl.load(checkpoint_rows + offset64(chunk, 1))
            if row >= 0:
                kept = checkpoints + (offset64(row, HEADS) + head) * (K * V)
                _store_states(kept, values, states, STATE_K, STATE_V, K, V, BLOCK_K)

    after = final + (offset64(sequence, HEADS) + head) * (K * V)
    _store_states(after, values, states, STATE_K, STATE_V, K, V, BLOCK_K)
