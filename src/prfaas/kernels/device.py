"""Device functions that every kernel shares."""

import triton
import triton.language as tl


@triton.jit
def offset64(index, stride):
    """``index * stride`` in 64 bits, whatever the types: 32 bits wrap at 2^31 elements."""
    return tl.cast(index, tl.int64) * tl.cast(stride, tl.int64)
