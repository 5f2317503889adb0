"""Triton program that joins the splits of a decode: one request and head."""

import triton
import triton.language as tl

from prfaas.kernels.device import offset64


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    output,  # [rows, value_dim]
    partials,  # float32 [rows, splits, value_dim], each split's own softmax
    log_sums,  # float32 [rows, splits], log2 of each split's sum of weights
    num_splits,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    row = offset64(tl.program_id(0), 1)
    columns = tl.arange(0, BLOCK_VALUE)
    is_column = columns < VALUE_WIDTH
    splits = tl.arange(0, BLOCK_SPLITS)
    log_sums += row * num_splits
    partials += row * num_splits * VALUE_WIDTH
    every = tl.load(log_sums + splits, mask=splits < num_splits, other=-1e30).to(tl.float32)
    peak = tl.max(every, 0)
    total = tl.sum(tl.exp2(every - peak), 0)  # padding has weight 0, or value 0 where all is empty
    summed = tl.zeros([BLOCK_VALUE], tl.float32)
    for split in range(0, num_splits):
        weight = tl.exp2(tl.load(log_sums + split) - peak)
        part = tl.load(partials + offset64(split, VALUE_WIDTH) + columns, mask=is_column, other=0.0)
        summed += weight * part.to(tl.float32)
    summed = summed / total
    tl.store(output + row * VALUE_WIDTH + columns, summed.to(output.dtype.element_ty), is_column)
