"""Causal depthwise convolution, one token per request."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prfaas.kernels.arch import arch_of
from prfaas.kernels.conv1d import reference, torch_path
from prfaas.kernels.conv1d.arguments import check_filter
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.slots import Slots
from prfaas.kernels.step.pool import check_pool, update_slots


def causal_conv1d_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    state_pool: torch.Tensor,
    slots: Slots | Iterable[int],
    activation: str | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Filters one token of each request, and moves it into the request's state, in place.

    The formula and the state are those of `prfaas.kernels.conv1d.causal_conv1d`. A request's first
    call is that one: a step has no way to start from zeros.

    Args:
        x: [num_requests, channels].
        weight: [channels, width], width 2 to 8.
        bias: [channels], or None.
        state_pool: [num_slots, channels, width - 1] in the dtype of ``x``, any stride between
            slots, updated in place. Slots that are not named are neither read nor written.
        slots: slot of each request; -1 is a padding row, whose output is zeros.
        activation: ``"silu"`` or None.
        path: see `prfaas.kernels.dispatch`.

    Returns:
        [num_requests, channels] in the dtype of ``x``; float64 from the reference.

    Raises:
        ConfigError: an argument does not fit; nothing was changed.
    """
    channels, width = check_filter(x, weight, bias, activation)
    check_pool(state_pool, (channels, width - 1), x.device, dtypes=(x.dtype,))
    where = Slots.of(slots, state_pool, x.shape[0])

    chosen = choose("causal_conv1d_step", x.device, path)
    with torch.no_grad():
        if chosen is Path.REFERENCE:
            return reference.step(x, weight, bias, activation, state_pool, where)
        if chosen is Path.TORCH:
            advance = torch_path.step(weight, bias, activation)
            return update_slots(state_pool, where, (x,), x, advance)
        from prfaas.kernels.conv1d.launches import step_launch

        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        step_launch(
            arch_of(x.device),
            *(x, weight, bias, state_pool, where.ids, output),
            activation=activation,
        ).run()
        return output
