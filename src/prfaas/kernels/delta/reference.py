"""The delta rule as a loop over tokens in float64: the truth."""

from __future__ import annotations

import torch

from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Sequences

NORM_EPSILON = 1e-6
"""Added to the sum of squares where queries and keys are normalised."""


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    sequences: Sequences,
    checkpoints: tuple[tuple[int, ...], ...],
    normalize_qk: bool,
    dtype: torch.dtype = torch.float64,
) -> PrefillResult:
    """The formula of `prfaas.kernels.delta_rule`, token by token, on checked arguments.
    Sums and results are in ``dtype``."""
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if normalize_qk:
        q, k = (x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt() for x in (q, k))
    groups = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(groups, dim=1) for x in (q, k))
    decay = g.exp() if g.ndim == 3 else g.exp()[..., None]
    state_shape = (sequences.num_sequences, v.shape[1], q.shape[2], v.shape[2])
    if initial_state is None:
        states = torch.zeros(state_shape, dtype=dtype, device=q.device)
    else:
        states = initial_state.to(dtype, copy=True)
    output = torch.empty_like(v, memory_format=torch.contiguous_format)
    saved = []
    for index, wanted in enumerate(checkpoints):
        start, stop = sequences.offsets[index : index + 2]
        state = states[index]
        for t in range(start, stop):
            state.mul_(decay[t, :, :, None])
            error = v[t] - (state * k[t, :, :, None]).sum(1)
            state.add_(k[t, :, :, None] * (error * beta[t, :, None])[:, None, :])
            output[t] = scale * (state * q[t, :, :, None]).sum(1)
            if t + 1 - start in wanted:
                saved.append(state.clone())
    rows = torch.stack(saved) if saved else states.new_empty((0, *state_shape[1:]))
    return PrefillResult(output=output, final_state=states, checkpoints=rows)
