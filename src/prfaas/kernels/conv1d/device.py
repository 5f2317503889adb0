"""Device programs of the convolution over packed sequences.

Offsets into the tensors are 64 bits wide: 32 bits would wrap. The channels of a program are
``first`` and the next ``BC``.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def silu(x):
    """x sigmoid(x); the exponent is held below where exp2 overflows."""
    return x / (1.0 + tl.exp2(tl.minimum(-x * LOG2_E, 126.0)))


@triton.jit
def sequence_at(offsets, num_sequences, token, SPAN: tl.constexpr):
    """The sequence that a token is in: the last whose first token is not after it."""
    started = 0
    for first in range(0, num_sequences + 1, SPAN):
        index = tl.cast(first, tl.int64) + tl.arange(0, SPAN)
        known = index <= num_sequences
        found = tl.load(offsets + index, mask=known, other=0)
        started += tl.sum(((found <= token) & known).to(tl.int32), 0)
    return tl.cast(started - 1, tl.int64)


@triton.jit
def store_state(
    target_at,
    x_at,
    initial_at,
    begin,
    end,
    channel_ok,
    X_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The last inputs before ``end`` of the sequence that starts at ``begin``, bit for bit.

    ``target_at`` and ``initial_at`` point to the oldest column of each channel.
    """
    lead: tl.constexpr = WIDTH - 1
    for column in tl.static_range(lead):
        token = end - lead + column
        # Selects: Triton 3.9 interprets no mask that is made with a scalar.
        is_new = tl.where(token >= begin, channel_ok, False)
        value = tl.load(x_at + token * X_ROW, mask=is_new, other=0.0)
        if initial_at is not None:
            old_at = initial_at + (lead + token - begin)
            old = tl.load(old_at, mask=tl.where(token < begin, channel_ok, False), other=0.0)
            value = tl.where(token >= begin, value, old)
        tl.store(target_at + column, value, mask=channel_ok)


@triton.jit
def store_head(
    output_at,
    x_at,
    weight_at,
    bias_at,
    initial_at,
    begin,
    end,
    channel_ok,
    X_ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
):
    """The first outputs of a sequence: those that see its initial state. Apart from the tiles of
    tokens, in which the second source of inputs would cost all registers."""
    lead: tl.constexpr = WIDTH - 1
    for token in tl.static_range(lead):
        ok = tl.where(begin + token < end, channel_ok, False)
        total = tl.zeros(channel_ok.shape, tl.float32)
        if bias_at is not None:
            total += tl.load(bias_at, mask=ok, other=0.0).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            if token + tap < lead:
                value = tl.load(initial_at + (token + tap), mask=ok, other=0.0)
            else:
                source = begin + (token + tap - lead)
                value = tl.load(x_at + source * X_ROW, mask=ok, other=0.0)
            factor = tl.load(weight_at + tap, mask=ok, other=0.0).to(tl.float32)
            total += value.to(tl.float32) * factor
        if SILU:
            total = silu(total)
        at = output_at + (begin + token) * CHANNELS
        tl.store(at, total.to(output_at.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_sequences"])
def conv_prefill(
    x,
    weight,
    bias,
    initial,
    output,
    finals,
    saved,
    starts,
    lengths,
    checkpoint_rows,
    offsets,
    num_sequences,
    X_ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    SPAN: tl.constexpr,
    SILU: tl.constexpr,
):
    """Channels of one sequence's final state and of the outputs that see its initial state; after
    the sequences, channels of one chunk of tokens.

    Sequences without tokens have no chunk, but a final state.
    """
    lead: tl.constexpr = WIDTH - 1
    pid = tl.cast(tl.program_id(0), tl.int64)
    first = tl.cast(tl.program_id(1), tl.int64) * BC
    channel = tl.arange(0, BC)
    channel_ok = channel < CHANNELS - first
    x_at = x + first + channel
    output_at = output + first + channel
    weight_at = weight + first * WIDTH + channel * WIDTH
    column_at = first * lead + channel * lead
    bias_at = None
    if bias is not None:
        bias_at = bias + first + channel

    if pid < num_sequences:
        sequence = pid
        begin = tl.load(offsets + sequence)
        end = tl.load(offsets + sequence + 1)
        initial_at = None
        if initial is not None:
            initial_at = initial + sequence * (CHANNELS * lead) + column_at
            store_head(
                output_at,
                x_at,
                weight_at,
                bias_at,
                initial_at,
                begin,
                end,
                channel_ok,
                X_ROW,
                CHANNELS,
                WIDTH,
                SILU,
            )
        final_at = finals + sequence * (CHANNELS * lead) + column_at
        store_state(final_at, x_at, initial_at, begin, end, channel_ok, X_ROW, WIDTH)
        return

    chunk = pid - num_sequences
    start = tl.load(starts + chunk)
    length = tl.load(lengths + chunk)
    sequence = sequence_at(offsets, num_sequences, start, SPAN)
    begin = tl.load(offsets + sequence)
    token = tl.arange(0, BT)
    token_ok = token < length

    total = tl.zeros((BT, BC), tl.float32)
    if bias is not None:
        total += tl.load(bias_at, mask=channel_ok, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):  # oldest input first, as in `store_head`: equal to the bit
        factor = tl.load(weight_at + tap, mask=channel_ok, other=0.0).to(tl.float32)
        source = start + (tap - lead)
        known = token_ok & (source + token >= begin)
        tile_at = x + source * X_ROW + first + token[:, None] * X_ROW + channel[None, :]
        tile = tl.load(tile_at, mask=known[:, None] & channel_ok[None, :], other=0.0)
        total += tile.to(tl.float32) * factor[None, :]
    if SILU:
        total = silu(total)
    if initial is not None:  # the sequence's own program writes what still sees the initial state
        token_ok = token_ok & (start + token - begin >= lead)
    at = output + start * CHANNELS + first + token[:, None] * CHANNELS + channel[None, :]
    ok = token_ok[:, None] & channel_ok[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=ok)

    row = tl.load(checkpoint_rows + chunk)
    if row >= 0:
        initial_at = None
        if initial is not None:
            initial_at = initial + sequence * (CHANNELS * lead) + column_at
        saved_at = saved + tl.cast(row, tl.int64) * (CHANNELS * lead) + column_at
        end = start + length
        store_state(saved_at, x_at, initial_at, begin, end, channel_ok, X_ROW, WIDTH)
