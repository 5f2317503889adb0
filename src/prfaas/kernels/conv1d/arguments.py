"""Checks that the convolution and its step share."""

from __future__ import annotations

import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arguments import check_tensor

MIN_WIDTH, MAX_WIDTH = 2, 8
ACTIVATIONS = (None, "silu")


def check_filter(
    x: torch.Tensor, weight: object, bias: object, activation: object
) -> tuple[int, int]:
    """Checks ``x`` and everything that belongs to a layer.

    Returns:
        Channels and width.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    check_tensor("x", x, shape=("num_tokens", "channels"))
    channels = x.shape[1]
    check_tensor("weight", weight, shape=(channels, "width"), device=x.device, contiguous="all")
    assert isinstance(weight, torch.Tensor)
    width = weight.shape[1]
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ConfigError(f"weight has width {width}; use {MIN_WIDTH} to {MAX_WIDTH}")
    if bias is not None:
        check_tensor("bias", bias, shape=(channels,), device=x.device)
    if activation not in ACTIVATIONS:
        raise ConfigError(f'activation is {activation!r}; use None or "silu"')
    return channels, width
