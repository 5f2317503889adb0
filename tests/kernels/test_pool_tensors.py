"""Views of a pool name the very bytes that the host path reads and writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache import PoolGeometry
from prfaas.core import DType
from prfaas.errors import ConfigError
from prfaas.kernels.pool import PoolTensors
from prfaas.spec import FullAttentionSpec, LinearStateSpec, MLASpec, ModelSpec, SlidingWindowSpec
from prfaas.store import HostArena, PoolMemory


def hybrid(dtype: DType = DType.BFLOAT16) -> ModelSpec:
    gqa = FullAttentionSpec(num_kv_heads=2, key_dim=24, value_dim=40, dtype=dtype)
    mla = MLASpec(kv_lora_rank=48, rope_dim=16, dtype=dtype)
    state = LinearStateSpec.delta_rule(
        num_heads=3, key_dim=5, value_dim=7, conv_channels=11, conv_columns=3
    )
    window = SlidingWindowSpec(
        num_kv_heads=1, key_dim=8, value_dim=8, window_tokens=31, dtype=dtype
    )
    return ModelSpec(
        name="hybrid", revision="1", layers=(state, gqa, None, state, mla, gqa, window)
    )


def make(block_size: int = 64, num_slabs: int = 12) -> tuple[PoolMemory, PoolTensors]:
    spec = hybrid()
    geometry = PoolGeometry.for_spec(spec, block_size=block_size, pool_bytes=num_slabs * 100_000)
    pool = PoolMemory(HostArena(geometry.pool_bytes), geometry)
    buffer = torch.frombuffer(pool.memory.buffer, dtype=torch.uint8)
    return pool, PoolTensors(buffer, geometry)


@given(data=st.data(), layer=st.sampled_from([1, 4, 5]))
def test_rows_are_those_of_the_host_path(data: st.DataObject, layer: int) -> None:
    pool, tensors = make()
    group, position = pool.place_of(layer)
    unit = pool.geometry.units[group]
    block = data.draw(st.integers(0, unit.units_per_slab * pool.geometry.num_slabs - 1))
    row = data.draw(st.integers(0, pool.geometry.block_size - 1))
    [address] = tensors.addresses(group, [block])
    views = tensors.rows(layer)
    views["row"][address, row] = torch.arange(views["row"].shape[-1], dtype=torch.bfloat16)
    raw = pool.view(*pool.geometry.layer_span(group, block, position, row, 1))
    want = torch.arange(views["row"].shape[-1], dtype=torch.bfloat16)
    assert torch.equal(torch.frombuffer(raw, dtype=torch.bfloat16), want)
    parts = [views[name][address, row].flatten() for name in views if name != "row"]
    assert torch.equal(torch.cat(parts), want)


@given(data=st.data(), layer=st.sampled_from([0, 3]))
def test_states_are_those_of_the_host_path(data: st.DataObject, layer: int) -> None:
    pool, tensors = make()
    group, position = pool.place_of(layer)
    unit = pool.geometry.units[group]
    slot = data.draw(st.integers(0, unit.units_per_slab * pool.geometry.num_slabs - 1))
    [address] = tensors.addresses(group, [slot])
    views = tensors.states(layer)
    views["recurrent"][address] = torch.arange(105.0).view(3, 5, 7)
    views["conv"][address] = torch.arange(33).view(11, 3).bfloat16()
    raw = pool.view(*pool.geometry.slot_span(group, slot, position))
    assert torch.equal(torch.frombuffer(raw[:420], dtype=torch.float32), torch.arange(105.0))
    assert torch.equal(torch.frombuffer(raw[420:486], dtype=torch.bfloat16), torch.arange(33.0))


def test_no_view_reaches_past_the_pool() -> None:
    pool, tensors = make()
    for layer in (0, 3):
        for view in tensors.states(layer).values():
            assert view[-1].storage_offset() + view[-1].numel() <= (
                pool.geometry.pool_bytes // view.element_size()
            )
    last = tensors.rows(1)["row"]
    assert last[-1].storage_offset() + last[-1].numel() <= pool.geometry.pool_bytes // 2


def test_a_buffer_inside_a_larger_tensor() -> None:
    geometry = PoolGeometry.for_spec(hybrid(), block_size=64, pool_bytes=1_200_000)
    large = torch.zeros(geometry.pool_bytes + 8192, dtype=torch.uint8)
    tensors = PoolTensors(large[4096 : 4096 + geometry.pool_bytes], geometry)
    tensors.rows(1)["row"][0] = 1
    tensors.states(0)["recurrent"][-1] = 1
    assert not large[:4096].any()
    assert not large[-4096:].any()
    assert large.any()
    with pytest.raises(ConfigError, match="buffer begins at byte 47 of its storage"):
        PoolTensors(large[47:], geometry)


def test_wrong_layers_and_buffers_are_refused_by_name() -> None:
    pool, tensors = make()
    with pytest.raises(ConfigError, match="layer 2 has no cache"):
        tensors.rows(2)
    with pytest.raises(ConfigError, match="layer 0 keeps a linear_state"):
        tensors.rows(0)
    with pytest.raises(ConfigError, match="layer 6 keeps a sliding_window"):
        tensors.states(6)
    with pytest.raises(ConfigError, match="outside the pool"):
        tensors.addresses(0, [10**9])
    short = torch.zeros(pool.geometry.pool_bytes - 64, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="buffer has"):
        PoolTensors(short, pool.geometry)
    with pytest.raises(ConfigError, match="contiguous uint8"):
        PoolTensors(torch.zeros(pool.geometry.pool_bytes), pool.geometry)
