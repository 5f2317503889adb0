"""States in the layout and dtype of another engine."""

from __future__ import annotations

import pytest
import torch

from kernel_paths import DEVICE, PATHS
from packing_cases import ALL_PATHS
from poison import PoisonedMemory
from prfaas.errors import ConfigError
from prfaas.kernels.packing import StateLayout, convert_states

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RECURRENT = (StateLayout.K_FIRST, StateLayout.V_FIRST)
CONVOLUTION = (StateLayout.CHANNELS_FIRST, StateLayout.TIME_FIRST)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("shape", [(2, 3, 64, 128), (1, 2, 100, 60), (3, 1, 1, 7), (2, 2, 130, 65)])
@pytest.mark.parametrize("source", RECURRENT)
def test_recurrent_states(source: StateLayout, shape: tuple[int, ...], path: str) -> None:
    memory = PoisonedMemory()
    states = memory.place(values(*shape), row_padding=4)
    target = RECURRENT[1 - RECURRENT.index(source)]
    made = convert_states(states, source=source, target=target, path=path)
    assert made.is_contiguous()
    assert torch.equal(made, states.transpose(-1, -2))
    assert torch.equal(convert_states(made, source=target, target=source, path=path), states)
    memory.check()


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("shape", [(2, 300, 3), (1, 64, 1), (3, 5000, 4)])
@pytest.mark.parametrize("source", CONVOLUTION)
def test_convolution_states(source: StateLayout, shape: tuple[int, ...], path: str) -> None:
    states = values(*shape, dtype=torch.bfloat16)
    if source is StateLayout.TIME_FIRST:
        states = states.mT.contiguous()
    target = CONVOLUTION[1 - CONVOLUTION.index(source)]
    made = convert_states(states, source=source, target=target, path=path)
    assert made.is_contiguous()
    assert torch.equal(made, states.mT)


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source_dtype", DTYPES)
def test_it_rounds_to_even(source_dtype: torch.dtype, dtype: torch.dtype, path: str) -> None:
    states = values(2, 2, 40, 24, dtype=source_dtype)
    for target in RECURRENT:
        made = convert_states(states, source="k_first", target=target, dtype=dtype, path=path)
        want = states if target is StateLayout.K_FIRST else states.mT
        assert made.dtype == dtype
        assert torch.equal(made, want.to(dtype))


@pytest.mark.parametrize("path", PATHS)
def test_slots_of_a_pool_are_read_in_place(path: str) -> None:
    """The distance between slots, heads and rows is free."""
    pool = torch.full((4, 10_000), float("nan"), device=DEVICE)
    states = pool[1:3, 16 : 16 + 4 * 32 * 40].view(2, 4, 32, 40)[:, 1:, :, :24]
    states.copy_(values(2, 3, 32, 24))
    made = convert_states(states, source="k_first", target="v_first", path=path)
    assert torch.equal(made, states.mT)
    same = convert_states(states, source="v_first", target="v_first", path=path)
    assert same.is_contiguous()
    assert torch.equal(same, states)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_the_result_is_new_memory(path: str) -> None:
    states = values(1, 1, 4, 4)
    for target in RECURRENT:
        made = convert_states(states, source="k_first", target=target, path=path)
        assert made.data_ptr() != states.data_ptr()
    none = convert_states(states[:0], source="k_first", target="v_first", path=path)
    assert none.shape == (0, 1, 4, 4)


def test_refused_arguments() -> None:
    states = values(2, 3, 4, 5)
    with pytest.raises(ConfigError, match="source is 'k_last'; use one of k_first"):
        convert_states(states, source="k_last", target="v_first")
    with pytest.raises(ConfigError, match="target is time_first, source k_first"):
        convert_states(states, source="k_first", target="time_first")
    with pytest.raises(ConfigError, match="states has shape"):
        convert_states(states[0], source="k_first", target="v_first")
    with pytest.raises(ConfigError, match="states has shape"):
        convert_states(states, source="time_first", target="channels_first")
    with pytest.raises(ConfigError, match="states has dtype float64"):
        convert_states(states.double(), source="k_first", target="v_first")
    with pytest.raises(ConfigError, match="states has stride"):
        convert_states(states.mT, source="k_first", target="v_first")
    with pytest.raises(ConfigError, match=r"dtype is torch\.int8"):
        convert_states(states, source="k_first", target="v_first", dtype=torch.int8)
