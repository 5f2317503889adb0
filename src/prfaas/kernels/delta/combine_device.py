"""The states between the segments of a sequence, from the segments' affine maps."""

import triton
import triton.language as tl

from prfaas.kernels.device import offset64


@triton.jit
def combine(
    maps,
    initial,
    states,
    first_segments,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    V_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLAB: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FLOAT32_DOT: tl.constexpr,
):
    """One program: some columns of the states of one head before each segment of one sequence."""
    tile = tl.program_id(0) % V_TILES
    head = (tl.program_id(0) // V_TILES) % HEADS
    sequence = tl.program_id(0) // (V_TILES * HEADS)
    first = tl.load(first_segments + offset64(sequence, 1))
    last = tl.load(first_segments + offset64(sequence, 1) + 1)
    channels = tl.arange(0, BLOCK_K)
    columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (channels < K)[:, None] & (columns < V)[None, :]
    places = channels[:, None] * V + columns[None, :]
    in_slab = tl.arange(0, SLAB)
    slabs = tl.arange(0, BLOCK_K // SLAB)[:, None, None]

    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if initial is not None:
        initial += (offset64(sequence, HEADS) + head) * (K * V)
        state = tl.load(initial + places, in_state, 0.0).to(tl.float32)
    there = states + (offset64(first, HEADS) + head) * (K * V)
    tl.store(there + places, state, in_state)
    for segment in tl.range(first, last - 1):
        segment_map = maps + (offset64(segment, HEADS) + head) * (K * (V + K))
        before = tl.reshape(state, (BLOCK_K // SLAB, SLAB, BLOCK_V))
        state = tl.load(
            segment_map + (channels[:, None] * (V + K) + columns[None, :]), in_state, 0.0
        )
        for slab in tl.range(0, BLOCK_K // SLAB):
            part = tl.sum(tl.where(slabs == slab, before, 0.0), axis=0)
            sources = slab * SLAB + in_slab
            factor = tl.load(
                segment_map + (channels[:, None] * (V + K) + (V + sources)[None, :]),
                (channels < K)[:, None] & (sources < K)[None, :],
                0.0,
            )
            state = tl.dot(factor, part, state, input_precision=FLOAT32_DOT)
        there = states + (offset64(segment + 1, HEADS) + head) * (K * V)
        tl.store(there + places, state, in_state)
