"""A pool's bytes as tensors that kernels index: pages of KV rows, slots of states.

Units of different groups share slabs, so the distance between two blocks is not always a multiple
of a block. All of them start at a multiple of 64 bytes, though. So the views here count in steps
of 64 bytes: their first dimension is an address, `PoolTensors.addresses` turns block and slot ids
into such addresses, and consecutive entries of a view overlap in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch

from prfaas.cache import PoolGeometry
from prfaas.core import BlockId, DType, GroupId
from prfaas.errors import ConfigError
from prfaas.spec import FullAttentionSpec, LayerSpec, LinearStateSpec, MLASpec, TensorPart

STEP_BYTES = 64

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
    DType.FLOAT8: torch.float8_e4m3fn,
}


class PoolTensors:
    """Views of a pool's memory, layer by layer.

    Args:
        buffer: uint8 [num_bytes] on any device, starting at a multiple of 64 bytes; e.g.
            ``torch.frombuffer(pool.memory.buffer, dtype=torch.uint8)`` for host memory.
        geometry: where blocks and slots lie; fits into the buffer.

    Raises:
        ConfigError: the buffer is too small, misaligned or not bytes.
    """

    def __init__(self, buffer: torch.Tensor, geometry: PoolGeometry) -> None:
        if buffer.dtype != torch.uint8 or buffer.ndim != 1 or not buffer.is_contiguous():
            raise ConfigError(
                f"buffer is {buffer.dtype} {list(buffer.shape)}; use contiguous uint8 [num_bytes]"
            )
        if buffer.storage_offset() % STEP_BYTES:
            raise ConfigError(
                f"buffer begins at byte {buffer.storage_offset()} of its storage; it must begin at "
                f"a multiple of {STEP_BYTES}"
            )
        if buffer.shape[0] < geometry.pool_bytes or buffer.data_ptr() % STEP_BYTES:
            raise ConfigError(
                f"buffer has {buffer.shape[0]} bytes at address {buffer.data_ptr():#x}; the pool "
                f"takes {geometry.pool_bytes} bytes, from a multiple of {STEP_BYTES} on"
            )
        self._buffer = buffer[: geometry.pool_bytes]
        self._geometry = geometry
        self._places = {
            layer_index: (group.group_id, position)
            for group in geometry.spec.groups
            for position, layer_index in enumerate(group.layer_indices)
        }

    def __repr__(self) -> str:
        return f"<PoolTensors {self._buffer.shape[0]} bytes on {self._buffer.device}>"

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    @property
    def geometry(self) -> PoolGeometry:
        return self._geometry

    def addresses(self, group_id: GroupId, ids: Iterable[BlockId]) -> list[int]:
        """Entries of this class's views for blocks or slots of a group.

        Raises:
            ConfigError: no such group, or an id outside of the pool.
        """
        if not 0 <= group_id < len(self._geometry.units):
            raise ConfigError(
                f"group_id is {group_id}; the model has groups 0 to {len(self._geometry.units) - 1}"
            )
        return [self._geometry.unit_offset(group_id, block) // STEP_BYTES for block in ids]

    def num_addresses(self, group_id: GroupId) -> int:
        """Length of the first dimension of every view of a group's layers: an address is below, and
        a whole block or slot lies behind each."""
        room = self._geometry.pool_bytes - self._geometry.units[group_id].unit_stride_bytes
        return room // STEP_BYTES + 1

    def rows(self, layer_index: int) -> dict[str, torch.Tensor]:
        """The parts of a token-kind layer: ``key`` and ``value`` [addresses, block_size, kv_heads,
        dim], or ``latent`` and ``rope`` [addresses, block_size, dim]; and ``row`` [addresses,
        block_size, elements], which is both of them.

        Raises:
            ConfigError: no such layer.
        """
        layer, count, start = self._layer(layer_index)
        if not isinstance(layer, FullAttentionSpec | MLASpec):
            raise ConfigError(f"layer {layer_index} keeps a {layer.kind}, no rows by block")
        dtype = TORCH_DTYPES[layer.dtype]
        row_elements = layer.row_bytes // layer.dtype.itemsize
        block_size = self._geometry.block_size
        views = {"row": self._view(dtype, count, start, (block_size, row_elements))}
        for part, offset in zip(layer.parts, _offsets(layer.parts), strict=True):
            shape = (block_size, *part.shape)
            strides = (row_elements, *_packed(part.shape))
            views[part.name] = self._view(dtype, count, start + offset, shape, strides)
        return views

    def states(self, layer_index: int) -> dict[str, torch.Tensor]:
        """The parts of a linear-attention layer: ``recurrent`` [addresses, heads, key_dim,
        value_dim] and ``conv`` [addresses, channels, columns], as far as it has them.

        Raises:
            ConfigError: no such layer.
        """
        layer, count, start = self._layer(layer_index)
        if not isinstance(layer, LinearStateSpec):
            raise ConfigError(f"layer {layer_index} keeps a {layer.kind}, no linear state")
        return {
            part.name: self._view(TORCH_DTYPES[part.dtype], count, start + offset, part.shape)
            for part, offset in zip(layer.parts, _offsets(layer.parts), strict=True)
        }

    def _layer(self, layer_index: int) -> tuple[LayerSpec, int, int]:
        """What a layer keeps, its group's addresses, and the byte of a unit where it begins."""
        if layer_index not in self._places:
            raise ConfigError(
                f"layer {layer_index} has no cache; layers with one are {sorted(self._places)}"
            )
        group_id, position = self._places[layer_index]
        layer = self._geometry.spec.layers[layer_index]
        assert layer is not None
        start = position * self._geometry.units[group_id].layer_stride_bytes
        return layer, self.num_addresses(group_id), start

    def _view(
        self,
        dtype: torch.dtype,
        count: int,
        start: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        strides = _packed(shape) if strides is None else strides
        if start % dtype.itemsize:
            raise ConfigError(
                f"a part of {dtype} begins at byte {start}, no multiple of {dtype.itemsize}"
            )
        data = self._buffer.view(dtype)
        # as_strided counts from the start of the storage, where the buffer may not begin.
        first = data.storage_offset() + start // dtype.itemsize
        step = STEP_BYTES // dtype.itemsize
        return data.as_strided((count, *shape), (step, *strides), first)


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _offsets(parts: Sequence[TensorPart]) -> list[int]:
    """First byte of each part, stored back to back."""
    return list(itertools.accumulate((part.num_bytes for part in parts[:-1]), initial=0))
