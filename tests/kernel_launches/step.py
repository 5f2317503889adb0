"""Launches of the decode steps."""

from __future__ import annotations

import functools
import itertools

import torch

from prfaas.kernels.arch import Arch
from prfaas.kernels.launch import Launch
from prfaas.kernels.step.launches import recurrent_launch, ssd_launch

REQUESTS, SLOTS, HEADS, GROUPS = 4, 9, 8, 2


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _pool(*inner: int, dtype: torch.dtype) -> torch.Tensor:
    """Slots with another part of as many elements in between."""
    return _empty(SLOTS, 2, *inner, dtype=dtype)[:, 0]


def _recurrent(
    arch: Arch,
    *,
    kind: str,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    pool_dtype: torch.dtype = torch.float32,
) -> Launch:
    gate = (REQUESTS, HEADS, key_dim) if kind == "kda" else (REQUESTS, HEADS)
    return recurrent_launch(
        arch,
        _empty(REQUESTS, GROUPS, key_dim, dtype=dtype),
        _empty(REQUESTS, GROUPS, key_dim, dtype=dtype),
        _empty(REQUESTS, HEADS, value_dim, dtype=dtype),
        _empty(*gate),
        None if kind == "decay" else _empty(REQUESTS, HEADS, dtype=dtype),
        _pool(HEADS, key_dim, value_dim, dtype=pool_dtype),
        _empty(REQUESTS, dtype=torch.int64),
        _empty(REQUESTS, HEADS, value_dim, dtype=dtype),
        scale=0.1,
        normalize_qk=kind != "decay",
    )


def _ssd(
    arch: Arch,
    *,
    head_dim: int,
    state_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    pool_dtype: torch.dtype = torch.float32,
    has_skip: bool = True,
) -> Launch:
    return ssd_launch(
        arch,
        _empty(REQUESTS, HEADS, head_dim, dtype=dtype),
        _empty(REQUESTS, HEADS),
        _empty(HEADS),
        _empty(REQUESTS, GROUPS, state_dim, dtype=dtype),
        _empty(REQUESTS, GROUPS, state_dim, dtype=dtype),
        _empty(HEADS) if has_skip else None,
        _pool(HEADS, head_dim, state_dim, dtype=pool_dtype),
        _empty(REQUESTS, dtype=torch.int64),
        _empty(REQUESTS, HEADS, head_dim, dtype=dtype),
    )


LAUNCHES = {
    f"{kind}_{key_dim}x{value_dim}": functools.partial(
        _recurrent, kind=kind, key_dim=key_dim, value_dim=value_dim
    )
    for kind, (key_dim, value_dim) in itertools.product(
        ("gdn", "kda", "decay"), ((128, 128), (256, 256), (60, 100), (16, 16))
    )
} | {
    "kda_float32": functools.partial(
        _recurrent, kind="kda", key_dim=128, value_dim=128, dtype=torch.float32
    ),
    "gdn_bfloat16_pool": functools.partial(
        _recurrent, kind="gdn", key_dim=128, value_dim=128, pool_dtype=torch.bfloat16
    ),
    "ssd_64x128": functools.partial(_ssd, head_dim=64, state_dim=128),
    "ssd_64x256": functools.partial(_ssd, head_dim=64, state_dim=256),
    "ssd_60x100_float32": functools.partial(
        _ssd, head_dim=60, state_dim=100, dtype=torch.float32, has_skip=False
    ),
    "ssd_16x16_bfloat16_pool": functools.partial(
        _ssd, head_dim=16, state_dim=16, pool_dtype=torch.bfloat16
    ),
}
