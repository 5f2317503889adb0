"""Rows as 8-bit codes and one float32 scale each, for links that are slower than memory."""

from __future__ import annotations

import enum

import attrs
import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arch import arch_of, is_interpreting
from prfaas.kernels.arguments import FLOATS, check_tensor
from prfaas.kernels.dispatch import Path, choose

MAX_ROW_ELEMENTS = 8192
"""Longest row that a Triton program takes; longer ones run in torch."""

SMALLEST_SCALE = 2.0**-100
"""Rows below it are coded in steps of it, so that nothing is divided by 0."""


class Code(enum.StrEnum):
    """What a value becomes. On Gaussian rows of a cache the relative error of ``INT8`` is about
    0.6 %, that of ``FP8_E4M3`` 2.5 %: at equal size float8 only wins when a row's values differ by
    orders of magnitude."""

    INT8 = "int8"
    FP8_E4M3 = "fp8_e4m3"

    @property
    def largest(self) -> float:
        return 127.0 if self is Code.INT8 else 448.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self is Code.INT8 else torch.float8_e4m3fn


@attrs.frozen(kw_only=True, eq=False)
class QuantizedRows:
    """Values as codes; ``codes * scales[..., None]`` is close to what they were.

    Attributes:
        codes: int8 or float8_e4m3fn [..., dim].
        scales: float32 [...]; NaN where a row held something that is not finite.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def quantize_rows(
    x: torch.Tensor, *, code: Code | str = Code.INT8, path: str | None = None
) -> QuantizedRows:
    """Codes each row of the last dimension by itself, symmetrically.

    In float32, the same bits on every path: ``scale = max(amax(|x|) / largest, 2^-100)`` with
    ``largest`` 127 or 448, ``code = round(x / scale)`` to the nearest, ties to even. A row of zeros
    comes back as zeros. A row with NaN or infinity gets the scale NaN and codes 0, so that it comes
    back as NaN throughout: what went wrong before the wire is seen behind it.

    Args:
        x: float32, bfloat16 or float16 [..., dim]; adjacent elements, other strides free.
        code: ``"int8"`` or ``"fp8_e4m3"``.
        path: see `prfaas.kernels.dispatch`.

    Raises:
        ConfigError: another dtype, or an unknown code.
    """
    code = check_code(code)
    check_tensor("x", x, shape=_free_shape(x))
    chosen = choose("quantize_rows", x.device, path, refusal=refusal(x.device, code, x.shape[-1]))
    if chosen is not Path.TRITON:
        return encode(x, code, chosen)
    from prfaas.kernels.packing import launches

    codes = torch.empty(x.shape, dtype=code.dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    launches.quantize_matrix(three_dimensions(x), codes, scales, encode=True, code=code).run()
    return QuantizedRows(codes=codes, scales=scales)


def dequantize_rows(
    rows: QuantizedRows, *, dtype: torch.dtype, path: str | None = None
) -> torch.Tensor:
    """``codes * scales`` in float32, rounded to ``dtype``.

    Args:
        rows: what `quantize_rows` returned.
        dtype: float32, bfloat16 or float16 of the result.
        path: see `prfaas.kernels.dispatch`.

    Returns:
        [..., dim], contiguous.

    Raises:
        ConfigError: another dtype, or codes and scales that do not belong together.
    """
    check_tensor(
        "codes",
        rows.codes,
        shape=_free_shape(rows.codes),
        dtypes=[code.dtype for code in Code],
        contiguous="all",
    )
    codes, scales = rows.codes, rows.scales
    check_tensor(
        "scales",
        scales,
        shape=codes.shape[:-1],
        dtypes=(torch.float32,),
        device=codes.device,
        contiguous="all",
    )
    check_dtype("dtype", dtype)
    code = next(code for code in Code if code.dtype == codes.dtype)
    why = refusal(codes.device, code, codes.shape[-1])
    chosen = choose("dequantize_rows", codes.device, path, refusal=why)
    if chosen is not Path.TRITON:
        return decode(rows, dtype)
    from prfaas.kernels.packing import launches

    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    launches.quantize_matrix(three_dimensions(out), codes, scales, encode=False, code=code).run()
    return out


def encode(x: torch.Tensor, code: Code, path: Path) -> QuantizedRows:
    """`quantize_rows` on a path other than Triton's."""
    codes, scales = (encode_rows if path is Path.TORCH else _encode_row_by_row)(x, code)
    return QuantizedRows(codes=codes, scales=scales)


def decode(rows: QuantizedRows, dtype: torch.dtype) -> torch.Tensor:
    """`dequantize_rows` on a path other than Triton's."""
    return (rows.codes.float() * rows.scales[..., None]).to(dtype)


def encode_rows(x: torch.Tensor, code: Code) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the rows of the last dimension, in torch."""
    values = x.float()
    size = values.abs().amax(dim=-1)  # NaN wins
    is_finite = size.isfinite()
    # A divisor in a tensor: on a GPU a plain number becomes a product with its inverse.
    scales = (size / size.new_full((), code.largest)).clamp(min=SMALLEST_SCALE)
    y = values / scales.where(is_finite, 1.0)[..., None]
    y = y.clamp(-code.largest, code.largest).where(is_finite[..., None], 0.0)
    codes = (y.round() if code is Code.INT8 else y).to(code.dtype)
    return codes, scales.where(is_finite, float("nan"))


def _encode_row_by_row(x: torch.Tensor, code: Code) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(x.shape, dtype=code.dtype, device=x.device)
    scales = torch.zeros(x.shape[:-1], device=x.device)
    flat_codes, flat_scales = codes.view(-1, x.shape[-1]), scales.view(-1)
    for index, row in enumerate(x.reshape(-1, x.shape[-1]).float()):
        if not bool(row.isfinite().all()):
            flat_scales[index] = float("nan")
            continue
        largest = torch.full((), code.largest, device=x.device)
        scale = max(row.abs().max() / largest, torch.full_like(largest, SMALLEST_SCALE))
        flat_scales[index] = scale
        y = row / scale
        flat_codes[index] = (y.round() if code is Code.INT8 else y).to(code.dtype)
    return codes, scales


def check_code(code: Code | str) -> Code:
    """A code by its name."""
    if code not in tuple(Code):
        raise ConfigError(f"code is {code!r}; use one of {', '.join(Code)}")
    return Code(code)


def check_dtype(name: str, dtype: object) -> torch.dtype:
    """Refuses what is not a dtype of activations."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise ConfigError(f"{name} is {dtype!r}; use torch.float32, torch.bfloat16 or float16")
    return dtype


def refusal(device: torch.device, code: Code, row_elements: int) -> str | None:
    """Why the Triton programs cannot code such rows on this device."""
    if row_elements > MAX_ROW_ELEMENTS:
        return f"rows of {row_elements} elements; programs take up to {MAX_ROW_ELEMENTS}"
    if code is Code.INT8 or (device.type != "cuda" and not is_interpreting()):
        return None
    try:
        arch = arch_of(device)
    except ConfigError as error:
        return str(error)
    if not arch.has_fp8:
        return f'{arch.name} has no float8_e4m3fn; use code="int8"'
    return None


def three_dimensions(x: torch.Tensor) -> torch.Tensor:
    """[outer, inner, dim] over the same memory where the strides allow it, else a copy."""
    if x.ndim <= 2 or not x.numel():
        return x.reshape(-1, 1, x.shape[-1])
    for inner in (1, x.shape[-2]):
        try:
            return x.view(-1, inner, x.shape[-1])
        except RuntimeError:
            continue
    return x.reshape(-1, 1, x.shape[-1])


def _free_shape(x: object) -> tuple[int | str, ...]:
    """Any number of rows, of at least one element each."""
    ndim = x.ndim if isinstance(x, torch.Tensor) else 1
    return (*(f"num_{axis}" for axis in range(ndim - 1)), "dim")
