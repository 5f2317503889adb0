"""Device program of the convolution's one-token step."""

import triton
import triton.language as tl

from prfaas.kernels.conv1d.device import silu


@triton.jit
def conv_step(
    x,
    weight,
    bias,
    pool,
    slots,
    output,
    X_ROW: tl.constexpr,
    SLOT: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BC: tl.constexpr,
    COLUMNS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Channels of one request: the state moves one column to the left in place."""
    lead: tl.constexpr = WIDTH - 1
    request = tl.cast(tl.program_id(0), tl.int64)  # offsets of 32 bits would wrap
    first = tl.cast(tl.program_id(1), tl.int64) * BC
    channel = tl.arange(0, BC)
    ok = channel < CHANNELS - first
    target = output + request * CHANNELS + first + channel
    slot = tl.load(slots + request)
    if slot < 0:
        tl.store(target, tl.zeros((BC,), output.dtype.element_ty), mask=ok)
        return

    column = tl.arange(0, COLUMNS)
    held = ok[:, None] & (column < lead)[None, :]
    newest = tl.load(x + request * X_ROW + first + channel, mask=ok, other=0.0)
    state_at = pool + slot * SLOT + first * lead + channel * lead
    old_at = state_at[:, None] + column[None, :]
    old = tl.load(old_at, mask=held, other=0.0)
    taps_at = weight + first * WIDTH + channel * WIDTH
    taps = tl.load(taps_at[:, None] + column[None, :], mask=held, other=0.0).to(tl.float32)
    total = tl.sum(old.to(tl.float32) * taps, 1)
    total += newest.to(tl.float32) * tl.load(taps_at + lead, mask=ok, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + first + channel, mask=ok, other=0.0).to(tl.float32)
    # The thread that replaces a column need not be the one that reads it for the sum: all have
    # read before the first writes.
    tl.debug_barrier()
    tl.store(old_at - 1, old, mask=held & (column > 0)[None, :])
    tl.store(state_at + (lead - 1), newest, mask=ok)
    if SILU:
        total = silu(total)
    tl.store(target, total.to(output.dtype.element_ty), mask=ok)
