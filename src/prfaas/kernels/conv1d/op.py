"""Causal depthwise convolution of packed sequences."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prfaas.kernels.arch import arch_of
from prfaas.kernels.arguments import check_tensor
from prfaas.kernels.conv1d import reference, torch_path
from prfaas.kernels.conv1d.arguments import check_filter
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Checkpoints, Sequences


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: Sequences | Iterable[int] | None = None,
    checkpoints: Checkpoints | None = None,
    path: str | None = None,
) -> PrefillResult:
    """Filters each channel over the tokens of its sequence::

        y[t, c] = act(bias[c] + sum_j weight[c, width - 1 - j] x[t - j, c]),   j < width

    where ``x[t - j]`` before the first token comes from the initial state. Sums are float32. States
    are the last ``width - 1`` inputs of a sequence, oldest first: copies, in the dtype of ``x``,
    exact on every path; the oldest are still the initial state's where a sequence is shorter.

    Args:
        x: [num_tokens, channels]; tokens may lie apart (a slice of a fused projection).
        weight: [channels, width], width 2 to 8; the last column meets the newest token.
        bias: [channels], or None.
        activation: ``"silu"``, y sigmoid(y), or None.
        initial_state: [num_sequences, channels, width - 1] in the dtype of ``x``; None for zeros,
            with which a request's first call starts.
        cu_seqlens: where the sequences are; None for one.
        checkpoints: per sequence, positions whose states are wanted.
        path: see `prfaas.kernels.dispatch`.

    Returns:
        Output [num_tokens, channels] in the dtype of ``x`` (float64 from the reference), final
        states [num_sequences, channels, width - 1] and checkpoints [num_checkpoints, channels,
        width - 1], in the dtype of ``x``.

    Raises:
        ConfigError: an argument does not fit.
    """
    channels, width = check_filter(x, weight, bias, activation)
    sequences = Sequences.of(cu_seqlens, x.shape[0])
    wanted = sequences.check_checkpoints(checkpoints)
    state_shape = (sequences.num_sequences, channels, width - 1)
    if initial_state is not None:
        check_tensor(
            "initial_state",
            initial_state,
            shape=state_shape,
            dtypes=(x.dtype,),
            device=x.device,
            contiguous="all",
        )

    chosen = choose("causal_conv1d", x.device, path)
    with torch.no_grad():
        if chosen is not Path.TRITON:
            run = torch_path.convolve if chosen is Path.TORCH else reference.convolve
            return run(x, weight, bias, activation, initial_state, sequences, wanted)
        from prfaas.kernels.conv1d.launches import prefill_launch

        count = sum(len(positions) for positions in wanted)
        result = PrefillResult(
            output=torch.empty((x.shape[0], channels), dtype=x.dtype, device=x.device),
            final_state=torch.empty(state_shape, dtype=x.dtype, device=x.device),
            checkpoints=torch.empty((count, *state_shape[1:]), dtype=x.dtype, device=x.device),
        )
        prefill_launch(
            arch_of(x.device),
            *(x, weight, bias, initial_state, sequences, wanted, result),
            activation=activation,
        ).run()
        return result
