"""Launches of decay attention and SSD."""

from __future__ import annotations

import functools

import torch

from kernel_launches import Build
from prfaas.kernels.arch import Arch
from prfaas.kernels.decay.launches import scan_launch
from prfaas.kernels.decay.problem import DecayProblem
from prfaas.kernels.launch import Launch
from prfaas.kernels.sequences import Sequences

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
HEADS, TOKENS = 4, 200


def _launch(
    arch: Arch, *, kind: str, key: int, value: int, dtype: torch.dtype, is_full: bool
) -> Launch:
    """``is_full``: with all optional arguments, else with none."""

    def new(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    is_ssd = kind == "ssd"
    shape = (1, HEADS, value, key) if is_ssd else (1, HEADS, key, value)
    initial = new(*shape, dtype=FP32) if is_full else None
    sequences = Sequences((0, TOKENS))
    problem = DecayProblem(
        q=new(TOKENS, 1, key),
        k=new(TOKENS, 1, key),
        v=new(TOKENS, HEADS, value),
        gate=new(HEADS, dtype=FP32) if kind == "constant" else new(TOKENS, HEADS, dtype=FP32),
        rate=new(HEADS, dtype=FP32) if is_ssd else None,
        skip=new(HEADS, dtype=FP32) if is_ssd and is_full else None,
        scale=1.0,
        initial=initial.mT if is_ssd and initial is not None else initial,
        is_value_first=is_ssd,
        sequences=sequences,
        checkpoints=sequences.check_checkpoints([[100]] if is_full else None),
    )
    return scan_launch(problem, problem.new_result(dtype, FP32), arch)


def _name(kind: str, key: int, value: int, dtype: torch.dtype, is_full: bool) -> str:
    rest = "full" if is_full else "bare"
    return f"{kind}-{key}x{value}-{str(dtype).removeprefix('torch.')}-{rest}"


_CASES = [
    ("constant", 128, 128, BF16, True),
    ("constant", 128, 128, BF16, False),
    ("constant", 128, 128, FP32, True),
    ("constant", 64, 64, BF16, True),
    ("token", 128, 128, BF16, True),
    ("token", 128, 128, FP32, True),
    ("token", 256, 64, BF16, True),
    ("token", 256, 64, FP32, True),
    ("token", 12, 24, BF16, True),
    ("ssd", 128, 64, BF16, True),
    ("ssd", 128, 64, BF16, False),
    ("ssd", 128, 64, FP32, True),
    ("ssd", 128, 64, FP16, True),
    ("ssd", 100, 60, BF16, True),
]

LAUNCHES: dict[str, Build] = {
    _name(*case): functools.partial(
        _launch, **dict(zip(("kind", "key", "value", "dtype", "is_full"), case, strict=True))
    )
    for case in _CASES
}

VARIANTS = {
    _name(*case)
    for case in (
        ("constant", 128, 128, BF16, False),
        ("token", 128, 128, BF16, True),
        ("token", 128, 128, FP32, True),
        ("token", 12, 24, BF16, True),
        ("ssd", 128, 64, BF16, False),
        ("ssd", 128, 64, FP16, True),
    )
}
