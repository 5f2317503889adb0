"""Lets the linear-attention layers of a transformers model compute with `prfaas.kernels`.

The layers of all families call the same few module-level functions: one for many tokens, one for a
single token. `use_kernels` gives each such layer a forward method of its own, which is the layer's
own code with these names bound to the functions here. Other models in the process, and the
library itself, stay as they are.

    module-level name                            operation
    torch_chunk_gated_delta_rule                 delta_rule, one gate per head
    chunk_kimi_delta_attention                   delta_rule, one gate per channel
    torch_recurrent_gated_delta_rule,
    recurrent_kimi_delta_attention               delta_rule_step
    mamba2_chunk_scan                            ssd
    mamba2_selective_state_update                ssd_step
    causal_conv1d_fn                             causal_conv1d
    causal_conv1d_update                         stays: the library keeps a column more than ours
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from prfaas.errors import ConfigError
from prfaas.kernels import (
    Sequences,
    Slots,
    causal_conv1d,
    delta_rule,
    delta_rule_step,
    ssd,
    ssd_step,
)
from prfaas.kernels.dispatch import Path

_OLD_CACHE_NAMES = ("cache_params", "past_key_values")
_PAIRS = (
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    ("mamba2_chunk_scan", "mamba2_selective_state_update"),
)
"""What a layer's forward method calls for many tokens, and for one."""


def use_kernels(model: Any, *, path: str | None = None) -> int:
    """Makes every linear-attention layer of ``model`` compute with `prfaas.kernels`, from now on.

    Results agree with the library's own within the tolerance of the layer's dtype; they are not
    bit-equal. The kernels have no gradients: call the model under ``torch.inference_mode()`` or
    ``torch.no_grad()``, as ``generate`` does, else it raises ConfigError. So does a batch packed
    without padding: the functions do not get to know all borders. A deep copy keeps the kernels; a
    pickled model comes back with the library's own functions.

    Args:
        model: a loaded model of transformers.
        path: which code runs, see `prfaas.kernels.dispatch`; None for the rule.

    Returns:
        How many layers were changed.

    Raises:
        ConfigError: the model has no layer that can be changed, or a layer's weights are moved
            between devices by hooks.
    """
    if path is not None and path not in tuple(Path):
        raise ConfigError(f"path is {path!r}; use one of {', '.join(Path)}, or None")
    replacements = _replacements(path)
    layers = [(layer, names) for layer in model.modules() if (names := _called(layer))]
    if not layers:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"no layer of {type(model).__name__} calls a linear-attention function that has a "
            f"replacement ({', '.join(sorted(replacements))}); its modules are {', '.join(kinds)}: "
            'leave linear_attention="transformers"'
        )
    for layer, _ in layers:
        own = layer.__dict__.get("forward")
        if own is not None and not hasattr(own, "uses_prfaas_kernels"):
            raise ConfigError(
                f"{type(layer).__name__} already has a forward method of its own, which would be "
                "lost; remove it first"
            )
        if any(hasattr(module, "_hf_hook") for module in layer.modules()):
            raise ConfigError(
                f"{type(layer).__name__} has hooks that move its weights between devices; load the "
                "model on one device"
            )
    for layer, names in layers:
        called = (*names, "causal_conv1d_fn")
        layer.forward = _rebound(layer, {name: replacements[name] for name in called})
    return len(layers)


def _called(layer: Any) -> tuple[str, str] | None:
    """The pair of functions that the forward method of a layer calls by their global names."""
    code = inspect.unwrap(type(layer).forward)
    names = getattr(getattr(code, "__code__", None), "co_names", ())
    for pair in _PAIRS:
        if set(pair) <= set(names):
            return pair
    return None


def _rebound(layer: Any, replacements: Mapping[str, Callable[..., Any]]) -> types.MethodType:
    """The layer's own forward method with some of its globals replaced."""
    original = inspect.unwrap(type(layer).forward)
    function = types.FunctionType(
        original.__code__,
        {**original.__globals__, **replacements},
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    function.__kwdefaults__ = original.__kwdefaults__
    known = inspect.signature(original).parameters

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in _OLD_CACHE_NAMES:  # a wrapper of the library's would have renamed these
            if kwargs.get(name) is not None and name not in known:
                raise ConfigError(f"{type(layer).__name__} got {name}; its name is cache now")
        return function(self, *args, **kwargs)

    forward.uses_prfaas_kernels = True  # type: ignore[attr-defined]
    return types.MethodType(forward, layer)


@functools.lru_cache(maxsize=256)
def _equal_lengths(batch: int, length: int) -> Sequences:
    """One value per shape: all layers of a forward pass share its chunk table."""
    return Sequences.of_lengths((length,) * batch)


@functools.lru_cache(maxsize=256)
def _all_slots(count: int, device: torch.device) -> Slots:
    return Slots(range(count), num_slots=count, device=device)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, ...] as one packed batch. What comes out of a convolution has its tokens
    innermost and is copied; the kernels want the last dimension dense."""
    flat = x.flatten(0, 1)
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _replacements(path: str | None) -> dict[str, Callable[..., Any]]:
    """What the names of the table above are bound to."""

    def chunked(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _refuse_packed(rest)
        batch, length = query.shape[:2]
        result = delta_rule(
            *map(_packed, (query, key, value, g, beta)),
            initial_state=initial_state,
            cu_seqlens=_equal_lengths(batch, length),
            normalize_qk=use_qk_l2norm_in_kernel,
            path=path,
        )
        output = result.output.unflatten(0, (batch, length)).to(query.dtype)
        return output, result.final_state.float() if output_final_state else None

    def recurrent(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        state = initial_state.float().clone()  # the caller may keep the old one
        output = delta_rule_step(
            *map(_packed, (query, key, value, g, beta)),
            state_pool=state,
            slots=_all_slots(state.shape[0], state.device),
            normalize_qk=use_qk_l2norm_in_kernel,
            path=path,
        )
        return output[:, None].to(query.dtype), state if output_final_state else None

    return {
        "torch_chunk_gated_delta_rule": chunked,
        "chunk_kimi_delta_attention": chunked,
        "torch_recurrent_gated_delta_rule": recurrent,
        "recurrent_kimi_delta_attention": recurrent,
        "causal_conv1d_fn": functools.partial(_convolve, path=path),
        "mamba2_chunk_scan": functools.partial(_chunk_scan, path=path),
        "mamba2_selective_state_update": functools.partial(_state_update, path=path),
    }


def _convolve(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    path: str | None,
    **rest: Any,
) -> torch.Tensor:
    """[batch, channels, tokens], where the columns that went before lead the tokens. What is
    returned has its channels innermost in memory, so heads are views of it."""
    _refuse_packed(rest)
    batch, _channels, length = hidden_states.shape
    if activation not in (None, "silu", "swish"):
        raise ConfigError(f"a convolution with activation {activation!r}; silu is supported")
    result = causal_conv1d(
        hidden_states.transpose(1, 2).flatten(0, 1).contiguous(),
        weight.to(hidden_states.dtype).contiguous(),
        None if bias is None else bias.to(hidden_states.dtype),
        activation="silu" if activation else None,
        cu_seqlens=_equal_lengths(batch, length),
        path=path,
    )
    output = result.output.to(hidden_states.dtype)
    return output.unflatten(0, (batch, length)).transpose(1, 2)


def _chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,  # ours has its own
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    *,
    path: str | None,
    **rest: Any,
) -> Any:
    _refuse_packed(rest)
    batch, length = hidden_states.shape[:2]
    step = _step_size(dt, dt_bias, softplus=dt_softplus).clamp(*dt_limit)
    result = ssd(
        _packed(hidden_states),
        _packed(step),
        A.float(),
        _packed(B),
        _packed(C),
        D=D,
        initial_state=initial_states,
        cu_seqlens=_equal_lengths(batch, length),
        path=path,
    )
    output = result.output.unflatten(0, (batch, length)).to(hidden_states.dtype)
    return (output, result.final_state.float()) if return_final_states else output


def _state_update(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    *,
    path: str | None,
    **_: Any,
) -> torch.Tensor:
    """``dt``, ``A``, ``D`` and ``dt_bias`` come expanded over the head's channels."""
    bias = None if dt_bias is None else dt_bias[:, 0]
    output = ssd_step(
        hidden_states,
        _step_size(dt[..., 0], bias, softplus=dt_softplus),
        A[:, 0, 0].float(),
        B,
        C,
        D=None if D is None else D[:, 0],
        state_pool=state,
        slots=_all_slots(state.shape[0], state.device),
        path=path,
    )
    return (output if z is None else output * F.silu(z)).to(hidden_states.dtype)


def _refuse_packed(arguments: Mapping[str, Any]) -> None:
    """Sequences packed into one row: the convolution is not told where one ends."""
    for name in ("cu_seqlens", "seq_idx"):
        if arguments.get(name) is not None:
            raise ConfigError(
                f"a layer was given {name}; pad the batch, or call the model once per sequence"
            )


def _step_size(dt: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool) -> torch.Tensor:
    shifted = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(shifted) if softplus else shifted
