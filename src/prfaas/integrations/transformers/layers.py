"""How each cache layer class of transformers maps to the canonical rows and slots.

Seen with transformers 5.2x, batch 1:

- ``DynamicLayer``: ``keys`` and ``values`` [1, heads, S, dim]; MLA models keep the latent in
  ``keys`` and the rope part in ``values``, both with one head. Appending re-allocates, so a view
  stays valid.
- ``LinearAttentionLayer``: dicts ``recurrent_states[0]`` [1, heads, key_dim, value_dim] and
  ``conv_states[0]`` [1, channels, kernel], both overwritten in place by decoding. Only the newest
  kernel-1 conv columns are ever read, so only these travel; the oldest comes back as zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from prfaas.core import DType
from prfaas.errors import ConfigError
from prfaas.seams import RowSpan
from prfaas.spec import TensorPart

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}


def _tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype)


class DynamicRows:
    """``DynamicLayer``: GQA and MLA alike, a row is the key part followed by the value part."""

    def __init__(self, parts: Sequence[TensorPart], device: torch.device) -> None:
        self._key, self._value = ((part.shape[0], part.shape[-1]) for part in parts)
        if len(parts[0].shape) == 1:  # MLA: one shared head
            self._key, self._value = ((1, part.shape[0]) for part in parts)
        self._dtype = TORCH_DTYPES[parts[0].dtype]
        self._device = device

    def _split(self, span: RowSpan) -> tuple[torch.Tensor, torch.Tensor]:
        rows = _tensor(span.data, self._dtype).view(span.num_rows, -1)
        border = self._key[0] * self._key[1]
        return rows[:, :border].unflatten(1, self._key), rows[:, border:].unflatten(1, self._value)

    def write(self, layer: Any, spans: Sequence[RowSpan]) -> None:
        for span in spans:
            tokens = slice(span.first_token, span.first_token + span.num_rows)
            key, value = self._split(span)
            key.copy_(layer.keys[0, :, tokens].transpose(0, 1))
            value.copy_(layer.values[0, :, tokens].transpose(0, 1))

    def read(self, layer: Any, num_tokens: int, spans: Sequence[RowSpan]) -> None:
        keys, values = (
            torch.empty((1, heads, num_tokens, dim), dtype=self._dtype, device=self._device)
            for heads, dim in (self._key, self._value)
        )
        for span in spans:
            tokens = slice(span.first_token, span.first_token + span.num_rows)
            key, value = self._split(span)
            keys[0, :, tokens].copy_(key.transpose(0, 1))
            values[0, :, tokens].copy_(value.transpose(0, 1))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values


class LinearState:
    """``LinearAttentionLayer`` with one recurrent state and one conv state."""

    def __init__(self, parts: Sequence[TensorPart], device: torch.device) -> None:
        self._parts = {part.name: part for part in parts}
        self._device = device

    def _split(self, slot: memoryview) -> dict[str, torch.Tensor]:
        tensors, offset = {}, 0
        for name, part in self._parts.items():
            data = slot[offset : offset + part.num_bytes]
            tensors[name] = _tensor(data, TORCH_DTYPES[part.dtype]).view(1, *part.shape)
            offset += part.num_bytes
        return tensors

    def write(self, layer: Any, slot: memoryview) -> None:
        tensors = self._split(slot)
        if "recurrent" in tensors:
            tensors["recurrent"].copy_(layer.recurrent_states[0])
        if "conv" in tensors:
            columns = tensors["conv"].shape[-1]
            tensors["conv"].copy_(layer.conv_states[0][..., -columns:])

    def read(self, layer: Any, slot: memoryview) -> None:
        tensors = self._split(slot)
        if "recurrent" in tensors:
            state = tensors["recurrent"].to(self._device)
            layer.lazy_initialization(recurrent_states=state)
            layer.recurrent_states[0].copy_(state)
        if "conv" in tensors:
            columns = tensors["conv"].to(self._device)
            padded = torch.nn.functional.pad(columns, (1, 0))
            layer.lazy_initialization(conv_states=padded)
            layer.conv_states[0].copy_(padded)
        layer.has_previous_state[0] = True


ROW_LAYERS: dict[str, type[DynamicRows]] = {"DynamicLayer": DynamicRows}
STATE_LAYERS: dict[str, type[LinearState]] = {"LinearAttentionLayer": LinearState}


def adapter_for(
    layer: object, parts: Sequence[TensorPart], device: torch.device, *, token_kind: bool
) -> DynamicRows | LinearState:
    """Makes what copies one layer between its working cache and the pool.

    Raises:
        ConfigError: no table has the layer's class.
    """
    table: Mapping[str, type[DynamicRows] | type[LinearState]]
    table = ROW_LAYERS if token_kind else STATE_LAYERS
    name = type(layer).__name__
    if name not in table:
        raise ConfigError(
            f"the model caches a layer in {name}; TransformersEngine reads and writes "
            f"{', '.join(sorted({*ROW_LAYERS, *STATE_LAYERS}))}: use a model of full and linear "
            "attention layers, or add an adapter for this class"
        )
    return table[name](parts, device)
