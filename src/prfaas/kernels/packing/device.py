"""Triton programs that copy, quantise and transpose what goes over the wire."""

import triton
import triton.language as tl

from prfaas.kernels.device import offset64

SMALLEST_SCALE = tl.constexpr(2.0**-100)
ROUNDING = tl.constexpr(1.5 * 2.0**23)  # adding it leaves no bits below 1 in a float32


@triton.jit
def _move(source, target, num_bytes, TILE: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr):
    """Copies bytes between two addresses in words that are known to be aligned to ALIGN."""
    kind: tl.constexpr = tl.int32 if WORD == 4 else tl.uint8
    # The hints have to stand on both sides of the cast: the compiler forgets those before it.
    reads = tl.multiple_of(tl.multiple_of(source, ALIGN).to(tl.pointer_type(kind)), ALIGN)
    writes = tl.multiple_of(tl.multiple_of(target, ALIGN).to(tl.pointer_type(kind)), ALIGN)
    words = tl.arange(0, TILE // WORD)
    mask = words < tl.multiple_of(num_bytes // WORD, ALIGN // WORD)
    tl.store(writes + words, tl.load(reads + words, mask=mask), mask=mask)


@triton.jit
def copy_tiles(
    tiles,  # int64 [programs, 4]
    bases,  # int64 [regions]: addresses
    packed,  # uint8
    TO_PACKED: tl.constexpr,
    TILE: tl.constexpr,  # bytes
    ALIGNED: tl.constexpr,  # every address and size is a multiple of 16
    WORD: tl.constexpr,  # bytes that divide every address and size, 4 or 1
):
    row = tiles + offset64(tl.program_id(0), 4)
    memory = tl.load(bases + tl.load(row)) + tl.load(row + 1)
    wire = packed.to(tl.int64) + tl.load(row + 2)
    num_bytes = tl.load(row + 3).to(tl.int32)
    if TO_PACKED:
        source, target = memory, wire
    else:
        source, target = wire, memory
    if ALIGNED:
        _move(source, target, num_bytes, TILE, 4, 16)
    else:
        # One odd piece does not slow the others down.
        if (source | target | num_bytes) % 16 == 0:
            _move(source, target, num_bytes, TILE, 4, 16)
        else:
            STEP: tl.constexpr = 512 * WORD
            for at in range(0, num_bytes, STEP):
                left = tl.minimum(num_bytes - at, STEP)
                _move(source + at, target + at, left, STEP, WORD, WORD)


@triton.jit
def _encode(x, LARGEST: tl.constexpr, IS_FP8: tl.constexpr):
    """Codes (int8 bits) and scales of rows; float32 division rounds to nearest, as torch's does."""
    # Whatever is not finite counts as infinite: tl.max by itself loses NaN.
    size = tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))
    largest = tl.max(size, axis=1)
    is_finite = largest < float("inf")
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    scale = tl.where(is_finite, tl.maximum(scale, SMALLEST_SCALE), 1.0)
    y = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    y = tl.where(is_finite[:, None], tl.minimum(tl.maximum(y, -LARGEST), LARGEST), 0.0)
    if IS_FP8:
        codes = y.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        codes = ((y + ROUNDING) - ROUNDING).to(tl.int8)
    return codes, tl.where(is_finite, scale, float("nan"))


@triton.jit
def _decode(codes, scale, IS_FP8: tl.constexpr):
    """float32 values of codes (int8 bits)."""
    if IS_FP8:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        values = codes.to(tl.float32)
    return values * scale[:, None]


@triton.jit(do_not_specialize=["scales_at"])
def quantize_tiles(
    tiles,  # int64 [programs, 4]
    bases,  # int64 [regions]: addresses
    packed,  # uint8: codes, then scales
    scales_at,  # first byte of the scales
    TO_PACKED: tl.constexpr,
    KIND: tl.constexpr,  # dtype of the regions
    ITEM: tl.constexpr,  # bytes of it
    DIM: tl.constexpr,  # elements of a row
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,  # of every piece's first byte, in memory and on the wire
    LARGEST: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    row = tiles + offset64(tl.program_id(0), 4)
    memory = tl.load(bases + tl.load(row)) + tl.load(row + 1)
    element = tl.load(row + 2) // ITEM
    num_rows = (tl.load(row + 3) // (DIM * ITEM)).to(tl.int32)
    memory = tl.multiple_of(tl.multiple_of(memory, ALIGN).to(tl.pointer_type(KIND)), ALIGN)
    element = tl.multiple_of(element, ALIGN // ITEM)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = rows[:, None] * DIM + columns[None, :]
    is_row = rows < num_rows
    mask = is_row[:, None] & (columns < DIM)[None, :]
    codes_to = packed.to(tl.pointer_type(tl.int8)) + element + inside
    scales_to = (packed + tl.cast(scales_at, tl.int64)).to(tl.pointer_type(tl.float32)) + (
        element // DIM + rows
    )
    if TO_PACKED:
        x = tl.load(memory + inside, mask=mask, other=0.0).to(tl.float32)
        codes, scale = _encode(x, LARGEST, IS_FP8)
        tl.store(codes_to, codes, mask=mask)
        tl.store(scales_to, scale, mask=is_row)
    else:
        codes = tl.load(codes_to, mask=mask, other=0)
        scale = tl.load(scales_to, mask=is_row, other=0.0)
        tl.store(memory + inside, _decode(codes, scale, IS_FP8).to(KIND), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def quantize_matrix(
    x,  # [num_rows // INNER, INNER, DIM], with strides
    codes,  # int8 bits [num_rows, DIM]
    scales,  # float32 [num_rows]
    num_rows,
    ENCODE: tl.constexpr,  # from x, or back
    INNER: tl.constexpr,
    OUTER_STRIDE: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    rows = offset64(tl.program_id(0), ROWS) + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_row = rows < num_rows
    mask = is_row[:, None] & (columns < DIM)[None, :]
    starts = offset64(rows // INNER, OUTER_STRIDE) + offset64(rows % INNER, INNER_STRIDE)
    values_at = x + starts[:, None] + columns[None, :]
    codes_at = codes + offset64(rows, DIM)[:, None] + columns[None, :]
    if ENCODE:
        values = tl.load(values_at, mask=mask, other=0.0).to(tl.float32)
        made, scale = _encode(values, LARGEST, IS_FP8)
        tl.store(codes_at, made, mask=mask)
        tl.store(scales + rows, scale, mask=is_row)
    else:
        read = tl.load(codes_at, mask=mask, other=0)
        scale = tl.load(scales + rows, mask=is_row, other=0.0)
        values = _decode(read, scale, IS_FP8)
        tl.store(values_at, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def transpose_matrices(
    source,  # [num, HEADS, A, B], with strides
    target,  # [num, HEADS, B, A], contiguous
    HEADS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    NUM_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    TILE_A: tl.constexpr,
    TILE_B: tl.constexpr,
):
    TILES_B: tl.constexpr = (B + TILE_B - 1) // TILE_B
    TILES: tl.constexpr = (A + TILE_A - 1) // TILE_A * TILES_B
    program = tl.program_id(0)
    matrix, tile = program // TILES, program % TILES
    a = tile // TILES_B * TILE_A + tl.arange(0, TILE_A)
    b = tile % TILES_B * TILE_B + tl.arange(0, TILE_B)
    source += offset64(matrix // HEADS, NUM_STRIDE) + offset64(matrix % HEADS, HEAD_STRIDE)
    target += offset64(matrix, A * B)
    mask = (a < A)[:, None] & (b < B)[None, :]
    x = tl.load(source + offset64(a, A_STRIDE)[:, None] + b[None, :], mask=mask)
    mask = (b < B)[:, None] & (a < A)[None, :]
    x = tl.trans(x).to(target.dtype.element_ty)
    tl.store(target + b[:, None] * A + a[None, :], x, mask=mask)
