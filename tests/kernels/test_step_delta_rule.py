"""One token of the gated delta rule per request, in place in its slot."""

from __future__ import annotations

import functools

import pytest
import torch

from kernel_paths import DEVICE, PATHS, TOLERANCE, relative_error
from poison import PoisonedMemory
from prfaas.errors import ConfigError
from prfaas.kernels import Slots, report
from prfaas.kernels.step import delta_rule_step
from prfaas.kernels.step import pool as step_pool
from step_cases import Pool, delta_rule_truth, rand, randn, unit

pytestmark = pytest.mark.parametrize("path", PATHS)

SLOTS = (4, 0, 2)
SIZES = ((16, 32), (128, 64))
"""Below and above where the torch path steps request by request."""

Token = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _large_begins_between_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_pool, "LARGE_STATE", 16_384)


def token(
    dim: tuple[int, int],
    *,
    seed: int = 0,
    requests: int = 3,
    heads: tuple[int, int] = (1, 2),
    per_channel: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Token:
    """Inputs of one step."""
    key_heads, value_heads = heads
    gate = (requests, value_heads, dim[0]) if per_channel else (requests, value_heads)
    return {
        "q": randn(requests, key_heads, dim[0], seed=seed, dtype=dtype),
        "k": randn(requests, key_heads, dim[0], seed=seed + 1, dtype=dtype),
        "v": randn(requests, value_heads, dim[1], seed=seed + 2, dtype=dtype),
        "g": -rand(*gate, seed=seed + 3),
        "beta": rand(requests, value_heads, seed=seed + 4, dtype=dtype),
    }


def pool_for(dim: tuple[int, int], dtype: torch.dtype = torch.float32, heads: int = 2) -> Pool:
    return Pool(6, randn(len(SLOTS), heads, *dim, seed=99, dtype=dtype), SLOTS)


@pytest.mark.parametrize(
    ("dim", "per_channel", "dtype"),
    [
        ((16, 16), False, torch.bfloat16),
        ((60, 100), False, torch.float32),
        ((60, 100), True, torch.bfloat16),
        ((100, 60), True, torch.float32),
        ((128, 128), False, torch.float32),
        ((64, 128), True, torch.float32),
    ],
)
def test_steps_in_turn_are_the_recurrence(
    path: str, dim: tuple[int, int], per_channel: bool, dtype: torch.dtype
) -> None:
    pool = pool_for(dim)
    slots = Slots(SLOTS, num_slots=6, device=DEVICE)
    state = pool.used.double()
    got, wanted = [], []
    memory = PoisonedMemory()
    for at in range(3):
        clean = token(dim, seed=10 * at, per_channel=per_channel, dtype=dtype)
        inputs = {name: memory.place(x, row_padding=3) for name, x in clean.items()}
        got.append(
            delta_rule_step(
                **inputs, state_pool=pool.states, slots=slots, normalize_qk=True, path=path
            )
        )
        clean["q"], clean["k"] = unit(clean["q"]), unit(clean["k"])
        output, state = delta_rule_truth(state, **clean, scale=dim[0] ** -0.5)
        wanted.append(output)
    assert got[0].dtype == dtype
    assert relative_error(torch.stack(got), torch.stack(wanted)) < TOLERANCE[dtype]
    assert relative_error(pool.used, state) < TOLERANCE[torch.float32]
    memory.check()
    pool.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("slots", [(4,), SLOTS], ids=["one", "three"])
def test_the_pool_may_be_of_half_precision(
    path: str, slots: tuple[int, ...], dtype: torch.dtype
) -> None:
    dim = (32, 48)
    pool = Pool(6, randn(len(slots), 2, *dim, seed=99, dtype=dtype), slots)
    inputs = token(dim, requests=len(slots))
    wanted, state = delta_rule_truth(pool.used, **inputs, scale=1.0)
    got = delta_rule_step(**inputs, state_pool=pool.states, slots=slots, scale=1.0, path=path)
    # The output is of the state before it is rounded, and the state is rounded once, to nearest.
    assert relative_error(got, wanted) < TOLERANCE[torch.float32]
    half_ulp = torch.finfo(dtype).eps / 2
    assert ((pool.used.double() - state).abs() <= 1.01 * half_ulp * state.abs() + 1e-6).all()
    pool.check()


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize(("gate", "beta"), [(-100.0, 1.0), (0.0, 1.0), (-1.0, 2.0), (0.0, 0.0)])
def test_gates_and_strengths_at_their_ends(
    path: str, gate: float, beta: float, per_channel: bool
) -> None:
    dim = (32, 32)
    pool = pool_for(dim)
    before = pool.used
    inputs = token(dim, per_channel=per_channel)
    inputs["g"].fill_(gate)
    inputs["beta"].fill_(beta)
    wanted, state = delta_rule_truth(before, **inputs, scale=1.0)
    got = delta_rule_step(**inputs, state_pool=pool.states, slots=SLOTS, scale=1.0, path=path)
    assert relative_error(got, wanted) < TOLERANCE[torch.float32]
    assert relative_error(pool.used, state) < TOLERANCE[torch.float32]
    if gate == beta == 0:
        assert torch.equal(pool.used, before)


@pytest.mark.parametrize("dim", SIZES, ids=["small", "large"])
def test_padding_rows_give_zeros_and_touch_nothing(path: str, dim: tuple[int, int]) -> None:
    inputs = token(dim, requests=5)
    for value in inputs.values():
        value[[0, 3]] = torch.nan
    pool = pool_for(dim)
    got = delta_rule_step(**inputs, state_pool=pool.states, slots=(-1, 4, 0, -1, 2), path=path)
    assert torch.equal(got[[0, 3]], torch.zeros_like(got[[0, 3]]))
    alone = pool_for(dim)
    kept = {name: value[[1, 2, 4]] for name, value in inputs.items()}
    without = delta_rule_step(**kept, state_pool=alone.states, slots=SLOTS, path=path)
    assert torch.equal(got[[1, 2, 4]], without)
    assert torch.equal(pool.used, alone.used)
    pool.check()


@pytest.mark.parametrize("requests", [0, 1, 2])
def test_a_batch_of_padding_only(path: str, requests: int) -> None:
    pool = Pool(2, randn(0, 2, 16, 16, seed=0), ())
    inputs = token((16, 16), requests=requests)
    got = delta_rule_step(**inputs, state_pool=pool.states, slots=(-1,) * requests, path=path)
    assert torch.equal(got, torch.zeros(requests, 2, 16, device=DEVICE))
    pool.check()


@pytest.mark.parametrize("dim", SIZES, ids=["small", "large"])
def test_a_request_does_not_see_the_others_of_its_batch(path: str, dim: tuple[int, int]) -> None:
    together, alone = pool_for(dim), pool_for(dim)
    inputs = token(dim)
    got = delta_rule_step(**inputs, state_pool=together.states, slots=SLOTS, path=path)
    for row, slot in enumerate(SLOTS):
        one = {name: value[row : row + 1] for name, value in inputs.items()}
        single = delta_rule_step(**one, state_pool=alone.states, slots=(slot,), path=path)
        assert relative_error(got[row], single[0]) < 1e-6
    assert relative_error(together.used, alone.used) < 1e-6


@pytest.mark.parametrize("heads", [(1, 4), (2, 4), (4, 4)], ids=str)
def test_views_of_a_fused_projection(path: str, heads: tuple[int, int]) -> None:
    key_heads, value_heads = heads
    fused = randn(3, 2 * key_heads * 16 + value_heads * 32, seed=5)
    sizes = (key_heads * 16, key_heads * 16, value_heads * 32)
    q, k, v = fused.split(sizes, 1)
    gates = -rand(3, 2 * value_heads, seed=6)
    inputs = {
        "q": q.view(3, key_heads, 16),
        "k": k.view(3, key_heads, 16),
        "v": v.view(3, value_heads, 32),
        "g": gates[:, ::2],
        "beta": -gates[:, 1::2],
    }
    before = {name: value.clone() for name, value in inputs.items()}
    pool = pool_for((16, 32), heads=value_heads)
    wanted, state = delta_rule_truth(pool.used, **inputs, scale=0.25)
    got = delta_rule_step(**inputs, state_pool=pool.states, slots=SLOTS, path=path)
    assert relative_error(got, wanted) < TOLERANCE[torch.float32]
    assert relative_error(pool.used, state) < TOLERANCE[torch.float32]
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)
    assert got.is_contiguous()


def test_it_agrees_with_the_reference_path_which_updates_the_pool_too(path: str) -> None:
    inputs = token((24, 20))
    fast, slow = pool_for((24, 20)), pool_for((24, 20))
    run = functools.partial(delta_rule_step, **inputs, slots=SLOTS, normalize_qk=True)
    got = run(state_pool=fast.states, path=path)
    truth = run(state_pool=slow.states, path="reference")
    assert truth.dtype == torch.float64
    assert relative_error(got, truth) < TOLERANCE[torch.float32]
    assert relative_error(fast.used, slow.used) < TOLERANCE[torch.float32]
    slow.check()


def test_unchecked_slots_may_hold_padding(path: str) -> None:
    ids = torch.tensor([4, -1, 0], device=DEVICE)
    inputs = token((16, 16))
    checked, trusted = pool_for((16, 16)), pool_for((16, 16))
    a = delta_rule_step(**inputs, state_pool=checked.states, slots=ids, path=path)
    slots = Slots.trusted(ids, num_slots=6)
    b = delta_rule_step(**inputs, state_pool=trusted.states, slots=slots, path=path)
    assert torch.equal(a, b)
    assert torch.equal(checked.used, trusted.used)


def test_a_gradient_is_refused_not_forgotten(path: str) -> None:
    inputs = {name: value.requires_grad_() for name, value in token((16, 16)).items()}
    pool = pool_for((16, 16))
    with pytest.raises(ConfigError, match="v requires a gradient"):
        delta_rule_step(**inputs, state_pool=pool.states, slots=SLOTS, path=path)
    with torch.no_grad():
        got = delta_rule_step(**inputs, state_pool=pool.states, slots=SLOTS, path=path)
    assert not got.requires_grad
    assert not pool.states.requires_grad


def test_keys_too_large_for_the_kernel_take_the_torch_path(path: str) -> None:
    dim = (257, 16)
    pool = pool_for(dim)
    inputs = token(dim)
    wanted, _ = delta_rule_truth(pool.used, **inputs, scale=257**-0.5)
    before = report().fallbacks
    got = delta_rule_step(**inputs, state_pool=pool.states, slots=SLOTS)
    assert relative_error(got, wanted) < TOLERANCE[torch.float32]
    if path == "triton":
        key = ("delta_rule_step", "key_dim is 257, at most 256 fit")
        assert report().fallbacks[key] == before.get(key, 0) + 1


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_transformers_agrees(path: str, kind: str) -> None:
    if kind == "gdn":
        from transformers.models.qwen3_5.modeling_qwen3_5 import (
            torch_recurrent_gated_delta_rule as theirs,
        )
    else:
        from transformers.models.kimi_linear.modeling_kimi_linear import (
            recurrent_kimi_delta_attention as theirs,
        )
    inputs = token((32, 32), heads=(2, 2), per_channel=kind == "kda")
    pool = pool_for((32, 32))
    wanted, state = theirs(
        *(value.unsqueeze(1).cpu() for value in inputs.values()),
        initial_state=pool.used.cpu(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    got = delta_rule_step(
        **inputs, state_pool=pool.states, slots=SLOTS, normalize_qk=True, path=path
    )
    assert relative_error(got.cpu(), wanted[:, 0]) < TOLERANCE[torch.float32]
    assert relative_error(pool.used.cpu(), state) < TOLERANCE[torch.float32]
