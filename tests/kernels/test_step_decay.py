"""One token of linear attention with a decay per head, in place in a slot per request."""

from __future__ import annotations

import pytest
import torch

from kernel_paths import DEVICE, PATHS, TOLERANCE, relative_error
from poison import PoisonedMemory
from prfaas.kernels.step import decay_attention_step
from step_cases import Pool, delta_rule_truth, rand, randn

pytestmark = pytest.mark.parametrize("path", PATHS)

SLOTS = (4, 0, 2)


def token(
    dim: tuple[int, int], *, seed: int = 0, key_heads: int = 2, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return {
        "q": randn(len(SLOTS), key_heads, dim[0], seed=seed, dtype=dtype),
        "k": randn(len(SLOTS), key_heads, dim[0], seed=seed + 1, dtype=dtype),
        "v": randn(len(SLOTS), 2, dim[1], seed=seed + 2, dtype=dtype),
    }


@pytest.mark.parametrize(
    ("dim", "dtype", "pool_dtype"),
    [
        ((60, 100), torch.float32, torch.float32),
        ((128, 64), torch.bfloat16, torch.float32),
        ((16, 16), torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("per_request", [False, True])
def test_steps_in_turn_are_the_recurrence(
    path: str,
    dim: tuple[int, int],
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    per_request: bool,
) -> None:
    pool = Pool(6, randn(3, 2, *dim, seed=99, dtype=pool_dtype), SLOTS)
    state = pool.used.double()
    g = -rand(3, 2, seed=7) if per_request else -rand(2, seed=7)
    got, wanted = [], []
    memory = PoisonedMemory()
    for at in range(3):
        clean = token(dim, seed=10 * at, key_heads=1 + per_request, dtype=dtype)
        inputs = {name: memory.place(x, row_padding=3) for name, x in clean.items()}
        got.append(
            decay_attention_step(**inputs, g=g, state_pool=pool.states, slots=SLOTS, path=path)
        )
        output, state = delta_rule_truth(
            state, **clean, g=g.expand(3, 2), beta=None, scale=dim[0] ** -0.5
        )
        state = state.to(pool_dtype).double()
        wanted.append(output)
    assert got[0].dtype == dtype
    tolerance = max(TOLERANCE[dtype], TOLERANCE[pool_dtype])
    assert relative_error(torch.stack(got), torch.stack(wanted)) < tolerance
    assert relative_error(pool.used, state) < TOLERANCE[pool_dtype]
    memory.check()
    pool.check()


@pytest.mark.parametrize("gate", [-100.0, 0.0])
def test_decays_at_their_ends(path: str, gate: float) -> None:
    pool = Pool(6, randn(3, 2, 32, 16, seed=99), SLOTS)
    inputs, g = token((32, 16)), torch.full((2,), gate, device=DEVICE)
    wanted, state = delta_rule_truth(pool.used, **inputs, g=g.expand(3, 2), beta=None, scale=0.5)
    got = decay_attention_step(
        **inputs, g=g, state_pool=pool.states, slots=SLOTS, scale=0.5, path=path
    )
    assert relative_error(got, wanted) < TOLERANCE[torch.float32]
    assert relative_error(pool.used, state) < TOLERANCE[torch.float32]


def test_padding_and_the_reference_path(path: str) -> None:
    inputs, g = token((32, 16)), -rand(2, seed=7)
    results = []
    for each in (path, "reference"):
        pool = Pool(6, randn(2, 2, 32, 16, seed=99), (4, 2))
        got = decay_attention_step(
            **inputs, g=g, state_pool=pool.states, slots=(4, -1, 2), path=each
        )
        assert torch.equal(got[1], torch.zeros_like(got[1]))
        pool.check()
        results.append((got, pool.used))
    (got, states), (truth, true_states) = results
    assert truth.dtype == torch.float64
    assert relative_error(got, truth) < TOLERANCE[torch.float32]
    assert relative_error(states, true_states) < TOLERANCE[torch.float32]


def test_keys_too_large_for_the_kernel(path: str) -> None:
    pool = Pool(6, randn(3, 2, 257, 16, seed=99), SLOTS)
    inputs, g = token((257, 16)), -rand(2, seed=7)
    wanted, _ = delta_rule_truth(pool.used, **inputs, g=g.expand(3, 2), beta=None, scale=257**-0.5)
    got = decay_attention_step(**inputs, g=g, state_pool=pool.states, slots=SLOTS)
    assert relative_error(got, wanted) < TOLERANCE[torch.float32], path
