"""Launches of the convolutions. Imports triton: import it where a kernel is launched."""

from __future__ import annotations

import torch
import triton

from prfaas.kernels.arch import Arch
from prfaas.kernels.conv1d import device, step_device
from prfaas.kernels.launch import Launch
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Checkpoints, Sequences
from prfaas.kernels.step.launches import num_warps, stride

TOKENS = 64
"""Tokens of a chunk: the attention beside a convolution cuts its sequences alike, and shares the
table."""

CHANNELS = 64
"""Channels of a program of the prefill: 128 bytes of a bfloat16 row."""

STEP_CHANNELS = 256
SPAN = 128
"""Sequences that a program looks through at once for its own."""


def prefill_launch(
    arch: Arch,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    sequences: Sequences,
    checkpoints: Checkpoints | None,
    result: PrefillResult,
    *,
    activation: str | None,
) -> Launch:
    """Shapes as in `prfaas.kernels.conv1d.causal_conv1d`, into the tensors of ``result``."""
    channels, width = weight.shape
    chunks = sequences.chunks(TOKENS, x.device, checkpoints)
    tile = min(CHANNELS, max(16, triton.next_power_of_2(channels)))
    return Launch(
        kernel=device.conv_prefill,
        grid=(sequences.num_sequences + chunks.num_chunks, triton.cdiv(channels, tile)),
        arguments={
            "x": x,
            "weight": weight,
            "bias": bias,
            "initial": initial_state,
            "output": result.output,
            "finals": result.final_state,
            "saved": result.checkpoints,
            "starts": chunks.starts,
            "lengths": chunks.lengths,
            "checkpoint_rows": chunks.checkpoint_rows,
            "offsets": sequences.offset_tensor(x.device),
            "num_sequences": sequences.num_sequences,
        },
        constants={
            "X_ROW": stride(x, 0),
            "CHANNELS": channels,
            "WIDTH": width,
            "BT": TOKENS,
            "BC": tile,
            "SPAN": SPAN,
            "SILU": activation == "silu",
        },
        num_warps=num_warps(arch, TOKENS * tile),
        num_stages=1,
    )


def step_launch(
    arch: Arch,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    output: torch.Tensor,
    *,
    activation: str | None,
) -> Launch:
    """Shapes as in `prfaas.kernels.conv1d.causal_conv1d_step`; ``output`` is contiguous."""
    channels, width = weight.shape
    tile = min(STEP_CHANNELS, max(16, triton.next_power_of_2(channels)))
    return Launch(
        kernel=step_device.conv_step,
        grid=(x.shape[0], triton.cdiv(channels, tile)),
        arguments={
            "x": x,
            "weight": weight,
            "bias": bias,
            "pool": pool,
            "slots": slots,
            "output": output,
        },
        constants={
            "X_ROW": stride(x, 0),
            "SLOT": stride(pool, 0),
            "CHANNELS": channels,
            "WIDTH": width,
            "BC": tile,
            "COLUMNS": triton.next_power_of_2(width - 1),
            "SILU": activation == "silu",
        },
        num_warps=max(1, tile // (2 * arch.warp_size)),
        num_stages=1,
    )
