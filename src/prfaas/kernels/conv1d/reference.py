"""The convolution in float64, token by token."""

from __future__ import annotations

import itertools

import torch

from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Sequences
from prfaas.kernels.slots import Slots


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    initial_state: torch.Tensor | None,
    sequences: Sequences,
    checkpoints: tuple[tuple[int, ...], ...],
) -> PrefillResult:
    """Of `prfaas.kernels.conv1d.causal_conv1d`."""
    channels, width = weight.shape
    finals = x.new_zeros((sequences.num_sequences, channels, width - 1))
    if initial_state is not None:
        finals.copy_(initial_state)
    output = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    saved = []
    for index, (begin, end) in enumerate(itertools.pairwise(sequences.offsets)):
        for token in range(begin, end):
            window = torch.cat((finals[index], x[token].unsqueeze(1)), 1)
            output[token] = _filter(window, weight, bias, activation)
            finals[index] = window[:, 1:]
            if token + 1 - begin in checkpoints[index]:
                saved.append(finals[index].clone())
    stacked = torch.stack(saved) if saved else x.new_empty((0, channels, width - 1))
    return PrefillResult(output=output, final_state=finals, checkpoints=stacked)


def step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    pool: torch.Tensor,
    slots: Slots,
) -> torch.Tensor:
    """Of `prfaas.kernels.conv1d.causal_conv1d_step`."""
    output = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row, slot in enumerate(slots.ids.tolist()):
        if slot >= 0:
            window = torch.cat((pool[slot], x[row].unsqueeze(1)), 1)
            output[row] = _filter(window, weight, bias, activation)
            pool[slot] = window[:, 1:]
    return output


def _filter(
    window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """One output token from [channels, width] inputs."""
    total = (window.double() * weight.double()).sum(1)
    if bias is not None:
        total = total + bias.double()
    return total / (1 + (-total).exp()) if activation == "silu" else total
