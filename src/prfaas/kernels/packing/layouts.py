"""States between the layouts that engines keep them in."""

from __future__ import annotations

import enum

import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arguments import check_tensor
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.packing.quantize import check_dtype


class StateLayout(enum.StrEnum):
    """Order of the last two dimensions of a state.

    Of a recurrent state [num, heads, ., .]: ``K_FIRST`` [K, V] is what this package, fla and
    transformers keep, ``V_FIRST`` [V, K] what FlashKDA, cuLA and FlashInfer keep. Of a convolution
    state [num, ., .]: ``CHANNELS_FIRST`` [channels, width - 1], oldest column first, is what this
    package and transformers keep, ``TIME_FIRST`` [width - 1, channels] what engines keep that
    append rows of tokens.

    A layout says nothing of the gate, which is no part of a state: here it is the natural logarithm
    ``g <= 0``, elsewhere ``alpha = e^g``. The state itself is the same for both.
    """

    K_FIRST = "k_first"
    V_FIRST = "v_first"
    CHANNELS_FIRST = "channels_first"
    TIME_FIRST = "time_first"

    @property
    def is_recurrent(self) -> bool:
        return self in (StateLayout.K_FIRST, StateLayout.V_FIRST)


def convert_states(
    states: torch.Tensor,
    *,
    source: StateLayout | str,
    target: StateLayout | str,
    dtype: torch.dtype | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Transposes and rounds states in one pass.

    Args:
        states: float32, bfloat16 or float16 [num, heads, ., .] of a recurrence, or [num, ., .] of a
            convolution; elements of the last dimension adjacent, other strides free, so that slots
            of a pool can be read in place.
        source: layout of ``states``.
        target: layout of the result, of the same kind.
        dtype: of the result, rounded to nearest even (what exceeds float16 becomes infinite); that
            of ``states`` by default.
        path: see `prfaas.kernels.dispatch`.

    Returns:
        A new contiguous tensor in the target's layout, also where the two are the same.

    Raises:
        ConfigError: an unknown layout, one of a recurrence and one of a convolution, another number
            of dimensions or dtype.
    """
    source, target = _check_layout("source", source), _check_layout("target", target)
    if source.is_recurrent != target.is_recurrent:
        raise ConfigError(
            f"target is {target}, source {source}; one is of recurrent states, the other of "
            "convolution states"
        )
    shape = ("num_states", "heads", "rows", "columns")
    check_tensor("states", states, shape=shape if source.is_recurrent else shape[:1] + shape[2:])
    dtype = states.dtype if dtype is None else check_dtype("dtype", dtype)
    chosen = choose("convert_states", states.device, path)
    if source is target:
        return states.to(dtype, memory_format=torch.contiguous_format, copy=True)
    *outer, rows, columns = states.shape
    out = torch.empty((*outer, columns, rows), dtype=dtype, device=states.device)
    if chosen is Path.TRITON:
        from prfaas.kernels.packing import launches

        views = (x if source.is_recurrent else x.unsqueeze(1) for x in (states, out))
        launches.transpose(*views).run()
    elif chosen is Path.TORCH:
        out.copy_(states.mT)
    else:
        for column in range(columns):
            out[..., column, :] = states[..., column].to(dtype)
    return out


def _check_layout(name: str, layout: StateLayout | str) -> StateLayout:
    if layout not in tuple(StateLayout):
        raise ConfigError(f"{name} is {layout!r}; use one of {', '.join(StateLayout)}")
    return StateLayout(layout)
