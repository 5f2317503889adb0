"""Device programs of the decode steps: a state is read once and written once."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NORM_EPSILON = tl.constexpr(1e-6)


@triton.jit
def recurrent_step(
    q,
    k,
    v,
    g,
    beta,
    pool,
    slots,
    output,
    scale,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    G_ROW: tl.constexpr,
    G_HEAD: tl.constexpr,
    BETA_ROW: tl.constexpr,
    BETA_HEAD: tl.constexpr,
    SLOT: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Value columns of one head of one request: all key rows of them fit one program.

    With the delta rule, u = beta (v - S'^T k); else u = v. The output is taken from the state
    before the update, S'^T q + (q . k) u, so that both sums over rows are made at once.
    """
    place = tl.cast(tl.program_id(0), tl.int64)  # offsets of 32 bits would wrap
    request = place // HEADS
    head = place % HEADS
    rows = tl.arange(0, BK)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    row_ok = rows < KEY_DIM
    column_ok = columns < VALUE_DIM

    slot = tl.load(slots + request)
    target = output + place * VALUE_DIM + columns
    if slot < 0:
        tl.store(target, tl.zeros((BV,), output.dtype.element_ty), mask=column_ok)
        return

    key_head = head // GROUP
    query_at = q + request * Q_ROW + key_head * Q_HEAD
    key_at = k + request * K_ROW + key_head * K_HEAD
    value_at = v + request * V_ROW + head * V_HEAD
    gate_at = g + request * G_ROW + head * G_HEAD
    state_at = pool + slot * SLOT + head * (KEY_DIM * VALUE_DIM)
    state_at += rows[:, None] * VALUE_DIM + columns[None, :]
    ok = row_ok[:, None] & column_ok[None, :]

    state = tl.load(state_at, mask=ok, other=0.0).to(tl.float32)
    query = tl.load(query_at + rows, mask=row_ok, other=0.0).to(tl.float32)
    key = tl.load(key_at + rows, mask=row_ok, other=0.0).to(tl.float32)
    value = tl.load(value_at + columns, mask=column_ok, other=0.0).to(tl.float32)
    if NORMALIZE:
        query = query / tl.sqrt(tl.sum(query * query, 0) + NORM_EPSILON)
        key = key / tl.sqrt(tl.sum(key * key, 0) + NORM_EPSILON)
    if PER_CHANNEL:
        gate = tl.load(gate_at + rows, mask=row_ok, other=0.0).to(tl.float32)
        state = state * tl.exp2(gate * LOG2_E)[:, None]
    else:
        state = state * tl.exp2(tl.load(gate_at).to(tl.float32) * LOG2_E)

    if IS_DELTA:
        strength = tl.load(beta + request * BETA_ROW + head * BETA_HEAD)
        update = (value - tl.sum(state * key[:, None], 0)) * strength.to(tl.float32)
    else:
        update = value
    result = tl.sum(state * query[:, None], 0) + tl.sum(query * key, 0) * update
    state += key[:, None] * update[None, :]

    tl.store(state_at, state.to(pool.dtype.element_ty), mask=ok)
    tl.store(target, (result * scale).to(output.dtype.element_ty), mask=column_ok)


@triton.jit
def ssd_step(
    x,
    dt,
    a,
    b,
    c,
    d,
    pool,
    slots,
    output,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    DT_ROW: tl.constexpr,
    DT_HEAD: tl.constexpr,
    A_HEAD: tl.constexpr,
    B_ROW: tl.constexpr,
    B_GROUP: tl.constexpr,
    C_ROW: tl.constexpr,
    C_GROUP: tl.constexpr,
    D_HEAD: tl.constexpr,
    SLOT: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """Rows of the state of one head of one request: a row is adjacent in memory, and whole here."""
    place = tl.cast(tl.program_id(0), tl.int64)  # offsets of 32 bits would wrap
    request = place // HEADS
    head = place % HEADS
    rows = tl.program_id(1) * BP + tl.arange(0, BP)
    columns = tl.arange(0, BN)
    row_ok = rows < HEAD_DIM
    column_ok = columns < STATE_DIM

    slot = tl.load(slots + request)
    target = output + place * HEAD_DIM + rows
    if slot < 0:
        tl.store(target, tl.zeros((BP,), output.dtype.element_ty), mask=row_ok)
        return

    group = head // GROUP
    state_at = pool + slot * SLOT + head * (HEAD_DIM * STATE_DIM)
    state_at += rows[:, None] * STATE_DIM + columns[None, :]
    ok = row_ok[:, None] & column_ok[None, :]
    x_at = x + request * X_ROW + head * X_HEAD + rows
    b_at = b + request * B_ROW + group * B_GROUP + columns
    c_at = c + request * C_ROW + group * C_GROUP + columns

    state = tl.load(state_at, mask=ok, other=0.0).to(tl.float32)
    value = tl.load(x_at, mask=row_ok, other=0.0).to(tl.float32)
    into = tl.load(b_at, mask=column_ok, other=0.0).to(tl.float32)
    out_of = tl.load(c_at, mask=column_ok, other=0.0).to(tl.float32)
    step = tl.load(dt + request * DT_ROW + head * DT_HEAD).to(tl.float32)
    rate = tl.load(a + head * A_HEAD).to(tl.float32)

    state = state * tl.exp2(step * rate * LOG2_E) + (step * value)[:, None] * into[None, :]
    result = tl.sum(state * out_of[None, :], 1)
    if d is not None:
        result += tl.load(d + head * D_HEAD).to(tl.float32) * value

    tl.store(state_at, state.to(pool.dtype.element_ty), mask=ok)
    tl.store(target, result.to(output.dtype.element_ty), mask=row_ok)
