"""Launches of the causal convolutions."""

from __future__ import annotations

import functools

import torch

from prfaas.kernels.arch import Arch
from prfaas.kernels.conv1d.launches import prefill_launch, step_launch
from prfaas.kernels.launch import Launch
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Sequences


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _prefill(
    arch: Arch,
    *,
    channels: int,
    width: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    has_bias: bool = False,
    has_initial: bool = True,
) -> Launch:
    sequences = Sequences.of_lengths((100, 0, 33))
    state = (3, channels, width - 1)
    return prefill_launch(
        arch,
        _empty(sequences.num_tokens, 2 * channels, dtype=dtype)[:, :channels],
        _empty(channels, width, dtype=dtype),
        _empty(channels, dtype=dtype) if has_bias else None,
        _empty(*state, dtype=dtype) if has_initial else None,
        sequences,
        ((10,), (), ()),
        PrefillResult(
            output=_empty(sequences.num_tokens, channels, dtype=dtype),
            final_state=_empty(*state, dtype=dtype),
            checkpoints=_empty(1, *state[1:], dtype=dtype),
        ),
        activation="silu",
    )


def _step(
    arch: Arch,
    *,
    channels: int,
    width: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    has_bias: bool = False,
) -> Launch:
    return step_launch(
        arch,
        _empty(5, 2 * channels, dtype=dtype)[:, :channels],
        _empty(channels, width, dtype=dtype),
        _empty(channels, dtype=dtype) if has_bias else None,
        _empty(9, 2, channels, width - 1, dtype=dtype)[:, 0],
        _empty(5, dtype=torch.int64),
        _empty(5, channels, dtype=dtype),
        activation="silu",
    )


LAUNCHES = {
    "prefill_8192": functools.partial(_prefill, channels=8192),
    "prefill_8192_from_zeros": functools.partial(_prefill, channels=8192, has_initial=False),
    "prefill_8192_float32": functools.partial(
        _prefill, channels=8192, dtype=torch.float32, has_bias=True
    ),
    "prefill_1000_width_8": functools.partial(_prefill, channels=1000, width=8, has_bias=True),
    "prefill_20_width_2": functools.partial(_prefill, channels=20, width=2),
    "step_8192": functools.partial(_step, channels=8192),
    "step_8192_float32": functools.partial(
        _step, channels=8192, dtype=torch.float32, has_bias=True
    ),
    "step_1000_width_8": functools.partial(_step, channels=1000, width=8, has_bias=True),
    "step_20_width_2": functools.partial(_step, channels=20, width=2),
}
