"""Makes Triton's interpreter compute bfloat16 and float8 as the hardware does.

As it comes (3.6 to 3.9) it multiplies bfloat16 as bit patterns, truncates instead of rounding, and
loses carries of float8. `install` replaces the conversions, the dot product, the element-wise
operations and the sum of these types; everything else is untouched, and so is the compiler.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_COMPARE = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
_BITS = {np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift}


def _widen(data: Any, dtype: Any) -> Any:
    array = np.ascontiguousarray(data)
    bits = array.view(np.int16 if array.itemsize == 2 else np.uint8)
    return torch.from_numpy(bits).view(_TORCH[dtype]).float().numpy().reshape(array.shape)


def _narrow(data: Any, dtype: Any) -> Any:
    """Rounds to nearest even; float8 saturates, as ``cvt.satfinite`` does."""
    values = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
    if dtype in _LARGEST:
        values = values.clamp(-_LARGEST[dtype], _LARGEST[dtype])
    values = values.to(_TORCH[dtype])
    if dtype is tl.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16).reshape(np.shape(data))
    return values.view(torch.uint8).numpy().reshape(np.shape(data))


def install() -> None:
    """Patches the interpreter of this process, once."""
    builder, reduce = interpreter.InterpreterBuilder, interpreter.ReduceOps
    handle = interpreter.TensorHandle
    if getattr(builder, "_is_patched", False):
        return
    builder._is_patched = True

    def converting(old: Any) -> Any:
        def convert(self: Any, source: Any, target: Any, *rest: Any) -> Any:
            have, want = source.dtype.scalar, target.scalar
            if have not in _TORCH and want not in _TORCH:
                return old(self, source, target, *rest)
            values = _widen(source.data, have) if have in _TORCH else source.data
            if want in _TORCH:
                return handle(_narrow(values, want), want)
            return handle(values.astype(interpreter._get_np_dtype(want)), want)

        return convert

    def dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, max_imprecise: Any) -> Any:
        left, right = (
            _widen(x.data, x.dtype.scalar) if x.dtype.scalar in _TORCH else x.data for x in (a, b)
        )
        kind = acc.data.dtype if acc.data.dtype in (np.float64, np.int32) else np.float32
        product = np.matmul(left.astype(kind), right.astype(kind)) + acc.data
        return handle(product.astype(acc.data.dtype), acc.dtype.scalar)

    old_binary, old_unary, old_sum = builder.binary_op, builder.unary_op, reduce.sum

    def binary(self: Any, a: Any, b: Any, op: Any) -> Any:
        is_bf16 = a.dtype.scalar is tl.bfloat16 and b.dtype.scalar is tl.bfloat16
        if not is_bf16 or op in _BITS:
            return old_binary(self, a, b, op)
        result = op(_widen(a.data, tl.bfloat16), _widen(b.data, tl.bfloat16))
        if op in _COMPARE:
            return handle(result, tl.int1)
        return handle(_narrow(result, tl.bfloat16), tl.bfloat16)

    def unary(self: Any, a: Any, op: Any) -> Any:
        if a.dtype.scalar is not tl.bfloat16:
            return old_unary(self, a, op)
        return handle(_narrow(op(_widen(a.data, tl.bfloat16)), tl.bfloat16), tl.bfloat16)

    def total(self: Any, x: Any) -> Any:
        if x.dtype.scalar is not tl.bfloat16:
            return old_sum(self, x)
        values = _widen(x.handle.data, tl.bfloat16)
        summed = np.sum(values, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(_narrow(summed, tl.bfloat16), tl.bfloat16)

    def constant(self: Any, value: float) -> Any:
        return handle(_narrow(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)

    builder.cast_impl = converting(builder.cast_impl)
    builder.create_fp_to_fp = converting(builder.create_fp_to_fp)
    builder.create_dot = dot
    builder.binary_op = binary
    builder.unary_op = unary
    builder.get_bf16 = constant
    reduce.sum = total
