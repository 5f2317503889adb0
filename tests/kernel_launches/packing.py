"""Copies in both directions and at every alignment; codes, states and rows of models' sizes."""

from __future__ import annotations

import functools

import torch

from kernel_launches import Build
from prfaas.kernels.arch import Arch
from prfaas.kernels.launch import Launch
from prfaas.kernels.packing import Code, Pieces, launches

SIZES = {"2KiB": 2048, "4KiB": 4096, "8KiB": 8192, "16KiB": 65536}
"""Pieces that make tiles of the size in the name."""

ALIGNMENTS = {"": 0, "_by4": 4, "_by1": 1}
"""Bytes that the last piece is off a multiple of 16."""

ROWS = {64: torch.bfloat16, 128: torch.float32, 256: torch.bfloat16, 576: torch.bfloat16}
LONGEST_ROW = 8192
STATES = {"128x128": (4, 32, 128, 128), "100x60": (3, 2, 100, 60), "conv": (4, 1, 8192, 3)}


def _on_meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _copy(arch: Arch, *, size: int, off: int, to_packed: bool) -> Launch:
    pieces = Pieces([0, size + off], [size, size])
    packed = _on_meta(pieces.num_bytes)
    return launches.copy([_on_meta(4 * size)], pieces, packed, to_packed=to_packed)


def _pieces(arch: Arch, *, dim: int, code: Code, to_packed: bool) -> Launch | None:
    if code is Code.FP8_E4M3 and not arch.has_fp8:
        return None
    dtype = ROWS.get(dim, torch.bfloat16)
    size = 64 * dim * dtype.itemsize
    return launches.quantize_pieces(
        [_on_meta(4 * size)],
        Pieces([0, 2 * size], [size, size]),
        _on_meta(4 * size),
        to_packed=to_packed,
        dtype=dtype,
        row_elements=dim,
        scales_at=128 * dim,
        code=code,
    )


def _matrix(arch: Arch, *, dim: int, code: Code, encode: bool) -> Launch | None:
    if code is Code.FP8_E4M3 and not arch.has_fp8:
        return None
    x = _on_meta(100, 4, dim + 16, dtype=ROWS.get(dim, torch.bfloat16))[..., :dim]
    codes, scales = _on_meta(400, dim, dtype=code.dtype), _on_meta(400, dtype=torch.float32)
    return launches.quantize_matrix(x, codes, scales, encode=encode, code=code)


def _states(
    arch: Arch, *, shape: tuple[int, ...], source: torch.dtype, target: torch.dtype
) -> Launch:
    *outer, a, b = shape
    return launches.transpose(_on_meta(*shape, dtype=source), _on_meta(*outer, b, a, dtype=target))


def _all() -> dict[str, Build]:
    found: dict[str, Build] = {}
    for to_packed in (True, False):
        word = "pack" if to_packed else "unpack"
        for name, num_bytes in SIZES.items():
            suffixes = ALIGNMENTS if name in ("2KiB", "16KiB") else ("",)
            for suffix in suffixes:
                found[f"{word}_{name}{suffix}"] = functools.partial(
                    _copy, size=num_bytes, off=ALIGNMENTS[suffix], to_packed=to_packed
                )
        for code in Code:
            for dim in ROWS:
                found[f"{word}_{code}_{dim}"] = functools.partial(
                    _pieces, dim=dim, code=code, to_packed=to_packed
                )
            for dim in (64, 128, LONGEST_ROW):
                found[f"{'quantize' if to_packed else 'dequantize'}_{code}_{dim}"] = (
                    functools.partial(_matrix, dim=dim, code=code, encode=to_packed)
                )
    for name, shape in STATES.items():
        for source, target in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            found[f"states_{name}_{source.itemsize}to{target.itemsize}"] = functools.partial(
                _states, shape=shape, source=source, target=target
            )
    return found


LAUNCHES = _all()
