"""One token of the state-space recurrence, in place in a slot per request."""

from __future__ import annotations

import pytest
import torch

from kernel_paths import PATHS, TOLERANCE, relative_error
from poison import PoisonedMemory
from prfaas.kernels.step import ssd_step
from step_cases import Pool, rand, randn

pytestmark = pytest.mark.parametrize("path", PATHS)

SLOTS = (4, 0, 2)
HEADS = 4


def token(
    dim: tuple[int, int], *, seed: int = 0, groups: int = 2, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return {
        "x": randn(len(SLOTS), HEADS, dim[0], seed=seed, dtype=dtype),
        "dt": rand(len(SLOTS), HEADS, seed=seed + 1),
        "B": randn(len(SLOTS), groups, dim[1], seed=seed + 2, dtype=dtype),
        "C": randn(len(SLOTS), groups, dim[1], seed=seed + 3, dtype=dtype),
    }


def layer(decay: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A and D."""
    return -decay * (0.5 + rand(HEADS, seed=50)), randn(HEADS, seed=51)


def truth(
    state: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    a: torch.Tensor,
    d: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, b, c = (inputs[name].double() for name in ("x", "dt", "B", "C"))
    b, c = (value.repeat_interleave(HEADS // b.shape[1], 1) for value in (b, c))
    state = state.double() * (dt * a.double()).exp()[..., None, None]
    state = state + torch.einsum("bh,bhp,bhn->bhpn", dt, x, b)
    output = torch.einsum("bhpn,bhn->bhp", state, c)
    return output if d is None else output + d.double()[:, None] * x, state


@pytest.mark.parametrize(
    ("dim", "groups", "has_skip", "dtype", "pool_dtype"),
    [
        ((60, 100), 2, True, torch.float32, torch.float32),
        ((64, 128), 1, True, torch.bfloat16, torch.float32),
        ((20, 12), 4, False, torch.float32, torch.float32),
        ((16, 16), 2, True, torch.float32, torch.bfloat16),
    ],
)
def test_steps_in_turn_are_the_recurrence(
    path: str,
    dim: tuple[int, int],
    groups: int,
    has_skip: bool,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
) -> None:
    pool = Pool(6, randn(3, HEADS, *dim, seed=99, dtype=pool_dtype), SLOTS)
    state = pool.used.double()
    a, d = layer()
    skip = d if has_skip else None
    got, wanted = [], []
    memory = PoisonedMemory()
    for at in range(3):
        clean = token(dim, seed=10 * at, groups=groups, dtype=dtype)
        inputs = {name: memory.place(x, row_padding=3) for name, x in clean.items()}
        got.append(ssd_step(**inputs, A=a, D=skip, state_pool=pool.states, slots=SLOTS, path=path))
        output, state = truth(state, clean, a, skip)
        state = state.to(pool_dtype).double()
        wanted.append(output)
    assert got[0].dtype == dtype
    tolerance = max(TOLERANCE[dtype], TOLERANCE[pool_dtype])
    assert relative_error(torch.stack(got), torch.stack(wanted)) < tolerance
    assert relative_error(pool.used, state) < TOLERANCE[pool_dtype]
    memory.check()
    pool.check()


@pytest.mark.parametrize("decay", [0.0, 300.0])
def test_decays_at_their_ends(path: str, decay: float) -> None:
    pool = Pool(6, randn(3, HEADS, 16, 32, seed=99), SLOTS)
    inputs, (a, d) = token((16, 32)), layer(decay)
    wanted, state = truth(pool.used, inputs, a, d)
    got = ssd_step(**inputs, A=a, D=d, state_pool=pool.states, slots=SLOTS, path=path)
    assert relative_error(got, wanted) < TOLERANCE[torch.float32]
    assert relative_error(pool.used, state) < TOLERANCE[torch.float32]


def test_padding_and_the_reference_path(path: str) -> None:
    inputs, (a, d) = token((16, 32)), layer()
    results = []
    for each in (path, "reference"):
        pool = Pool(6, randn(2, HEADS, 16, 32, seed=99), (4, 2))
        got = ssd_step(**inputs, A=a, D=d, state_pool=pool.states, slots=(4, -1, 2), path=each)
        assert torch.equal(got[1], torch.zeros_like(got[1]))
        pool.check()
        results.append((got, pool.used))
    (got, states), (true_output, true_states) = results
    assert true_output.dtype == torch.float64
    assert relative_error(got, true_output) < TOLERANCE[torch.float32]
    assert relative_error(states, true_states) < TOLERANCE[torch.float32]


def test_states_too_large_for_the_kernel(path: str) -> None:
    pool = Pool(6, randn(3, HEADS, 16, 257, seed=99), SLOTS)
    inputs, (a, d) = token((16, 257)), layer()
    wanted, _ = truth(pool.used, inputs, a, d)
    got = ssd_step(**inputs, A=a, D=d, state_pool=pool.states, slots=SLOTS)
    assert relative_error(got, wanted) < TOLERANCE[torch.float32], path
