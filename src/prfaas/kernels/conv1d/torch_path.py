"""The convolution as shifted multiply-adds over blocks of tokens that stay in cache.

On CPUs this beats ``torch.nn.functional.conv1d`` with one group per channel several times over, in
the layout that the projections around it have: channels adjacent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Sequences

BLOCK = 131_072
"""Elements of a block, 512 KiB of float32: what a core's cache holds with its output."""


SMALL_STEP = 8192
"""Elements of a batch of steps below which calls cost more than what they do."""


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
    finals = x.new_empty((sequences.num_sequences, channels, width - 1))
    saved = x.new_empty((sum(map(len, checkpoints)), channels, width - 1))
    output = x.new_empty(x.shape)
    taps = weight.float().t().contiguous()
    offset = None if bias is None else bias.float()
    row = 0
    for index, (begin, end) in enumerate(itertools.pairwise(sequences.offsets)):
        before = x.new_zeros((width - 1, channels))
        if initial_state is not None:
            before = initial_state[index].t()
        _filter_sequence(x[begin:end], before, taps, offset, activation, output[begin:end])
        for position in checkpoints[index]:
            _save(x[begin : begin + position], before, saved[row])
            row += 1
        _save(x[begin:end], before, finals[index])
    return PrefillResult(output=output, final_state=finals, checkpoints=saved)


def _filter_sequence(
    x: torch.Tensor,
    before: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    output: torch.Tensor,
) -> None:
    lead = before.shape[0]
    size = max(16, BLOCK // x.shape[1])
    for begin in range(0, x.shape[0], size):
        target = output[begin : begin + size]
        if begin == 0:
            rows = torch.cat((before, x[:size])).float()
        else:
            rows = x[begin - lead : begin + size].float()
        count = target.shape[0]
        total = target if target.dtype is torch.float32 else None
        if bias is None:
            total = torch.mul(rows[:count], taps[0], out=total)
        else:
            total = torch.addcmul(bias, rows[:count], taps[0], out=total)
        for tap in range(1, taps.shape[0]):
            total.addcmul_(rows[tap : tap + count], taps[tap])
        if activation == "silu":
            F.silu(total, inplace=True)
        if total is not target:
            target.copy_(total)


def _save(x: torch.Tensor, before: torch.Tensor, target: torch.Tensor) -> None:
    """The state after the tokens ``x`` that follow ``before``."""
    lead = before.shape[0]
    if x.shape[0] < lead:
        x = torch.cat((before, x))
    target.copy_(x[x.shape[0] - lead :].t())


def step(
    weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Of `prfaas.kernels.conv1d.causal_conv1d_step`: what
    `prfaas.kernels.step.pool.update_slots` calls. Inputs pass through float32 unchanged."""

    def advance(states: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        newest = x.float()
        move = _step_window if x.numel() < SMALL_STEP else _step_columns
        total = move(states, newest, weight.float())
        if bias is not None:
            total += bias.float()
        if activation == "silu":
            F.silu(total, inplace=True)
        return total.to(x.dtype)

    return advance


def _step_window(states: torch.Tensor, newest: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In the fewest operations."""
    window = torch.cat((states, newest.unsqueeze(2)), 2)
    states.copy_(window[:, :, 1:])
    return window.mul_(weight).sum(2)


def _step_columns(states: torch.Tensor, newest: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Without copies, and without sums over rows of a few elements."""
    total = newest * weight[:, -1]
    columns = states.unbind(2)
    for column, taps in zip(columns, weight.unbind(1), strict=False):
        total.addcmul_(column, taps)
    for older, newer in zip(columns, (*columns[1:], newest), strict=True):
        older.copy_(newer)
    return total
