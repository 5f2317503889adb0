"""The constant decays of Lightning attention."""

from __future__ import annotations

import math

import torch

from prfaas.errors import ConfigError


def lightning_log_decay(num_heads: int, *, layer_index: int, num_layers: int) -> torch.Tensor:
    """Log decay per head of one layer: the ``g`` of `decay_attention` for MiniMax-01, Ring, Ling.

    ``g_h = -slope_h * (1 - layer_index / (num_layers - 1) + 1e-5)``: heads remember longer the
    higher they are, and layers the deeper they are. The slopes are those of ALiBi (Press et al.,
    arXiv 2108.12409): for a power of two H, ``2^(-8 (h + 1) / H)`` for h from 0. For other H, that
    paper's own rule: with P the largest power of two below H, first the P slopes for P heads, then
    every second slope for 2 P heads, from the first, until there are H.

    Layers count from 0 over all layers of the model, softmax layers included. Code bases differ:
    MiniMax-01 uses this formula as it is; the published code of Ring and Ling (Bailing) subtracts
    one from an index that starts at 0, so pass ``layer_index=i - 1`` there, -1 for its first layer;
    transformers' MiniMax takes ``2^(-8 (h + 1) / H)`` for every H. Check the checkpoint's own code.

    With tensor parallelism, build all heads and slice: the slopes depend on the total.

    Args:
        num_heads: heads of the whole layer, at least 1.
        layer_index: -1 to ``num_layers - 1``.
        num_layers: layers of the model, at least 1; the depth term is left out for 1.

    Returns:
        float32 [num_heads] on the CPU, all below 0.

    Raises:
        ConfigError: a count or the index is out of range.
    """
    for name, value in (("num_heads", num_heads), ("num_layers", num_layers)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
    if type(layer_index) is not int or not -1 <= layer_index < num_layers:
        raise ConfigError(
            f"layer_index is {layer_index!r}; it must be a whole number from 0 to num_layers - 1 = "
            f"{num_layers - 1}, or -1 for the first layer of a code base that subtracts one"
        )
    depth = layer_index / (num_layers - 1) if num_layers > 1 else 0.0
    slopes = torch.tensor(_alibi_slopes(num_heads), dtype=torch.float64)
    return (-slopes * (1.0 - depth + 1e-5)).float()


def _alibi_slopes(num_heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-8.0 * (head + 1) / (2 * power)) for head in range(0, 2 * power, 2)]
    return slopes + between[: num_heads - power]
