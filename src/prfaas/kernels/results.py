"""What the prefill operations return."""

from __future__ import annotations

import attrs
import torch


@attrs.frozen(kw_only=True, eq=False)
class PrefillResult:
    """Output and states of one prefill call.

    Shapes are those of `delta_rule`; `ssd` keeps states [heads, value_dim, key_dim], and
    `causal_conv1d` [channels, width - 1] in the dtype of its input, as their docstrings say. The
    reference path returns float64.

    Attributes:
        output: [num_tokens, heads, value_dim], dtype of ``v``.
        final_state: float32 [num_sequences, heads, key_dim, value_dim], after the last token of
            each sequence; the initial state, or zeros, where a sequence has no tokens.
        checkpoints: float32 [num_checkpoints, heads, key_dim, value_dim], the states asked for,
            sequence after sequence, in the order of their positions.
    """

    output: torch.Tensor
    final_state: torch.Tensor
    checkpoints: torch.Tensor
