"""The convolution's one-token step, in place in a slot per request."""

from __future__ import annotations

import pytest
import torch

from kernel_paths import DEVICE, PATHS, TOLERANCE, relative_error
from poison import PoisonedMemory
from prfaas.errors import ConfigError
from prfaas.kernels import Slots
from prfaas.kernels.conv1d import causal_conv1d, causal_conv1d_step, torch_path
from step_cases import Pool, randn

pytestmark = pytest.mark.parametrize("path", PATHS)

SLOTS = (4, 0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("channels", "width", "has_bias", "activation"),
    [(64, 4, False, "silu"), (300, 4, True, None), (20, 2, True, "silu"), (33, 8, False, "silu")],
)
@pytest.mark.parametrize("slots", [(3,), SLOTS], ids=["one", "three"])
def test_steps_in_turn_are_the_prefill(
    path: str,
    channels: int,
    width: int,
    has_bias: bool,
    activation: str | None,
    slots: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    requests, tokens = len(slots), 6
    x = randn(requests, tokens, channels, seed=1, dtype=dtype)
    weight = randn(channels, width, seed=2, dtype=dtype)
    bias = randn(channels, seed=3, dtype=dtype) if has_bias else None
    initial = randn(requests, channels, width - 1, seed=4, dtype=dtype)
    wanted = causal_conv1d(
        x.flatten(0, 1),
        weight,
        bias,
        activation=activation,
        initial_state=initial,
        cu_seqlens=range(0, requests * tokens + 1, tokens),
        path="reference",
    )
    pool = Pool(6, initial, slots)
    memory = PoisonedMemory()
    got = [
        causal_conv1d_step(
            memory.place(x[:, at], row_padding=3),
            weight,
            bias,
            state_pool=pool.states,
            slots=slots,
            activation=activation,
            path=path,
        )
        for at in range(tokens)
    ]
    assert got[0].dtype == dtype
    outputs = wanted.output.view(requests, tokens, channels)
    assert relative_error(torch.stack(got, 1), outputs) < TOLERANCE[dtype]
    assert torch.equal(pool.used, wanted.final_state)
    memory.check()
    pool.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_large_batches(path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_path, "SMALL_STEP", 0)
    x, weight, bias = (randn(*shape, seed=1, dtype=dtype) for shape in ((3, 40), (40, 4), (40,)))
    states = randn(3, 40, 3, seed=4, dtype=dtype)
    fast, slow = Pool(6, states, SLOTS), Pool(6, states, SLOTS)
    for _ in range(2):
        got, wanted = (
            causal_conv1d_step(
                x, weight, bias, state_pool=pool.states, slots=SLOTS, activation="silu", path=each
            )
            for pool, each in ((fast, path), (slow, "reference"))
        )
        assert relative_error(got, wanted) < TOLERANCE[dtype]
        assert torch.equal(fast.used, slow.used)
    fast.check()


@pytest.mark.parametrize("trusted", [False, True])
def test_padding_rows_give_zeros_and_touch_nothing(path: str, trusted: bool) -> None:
    x, weight, bias = randn(4, 40, seed=1), randn(40, 4, seed=2), randn(40, seed=3)
    x[1] = torch.nan
    ids = torch.tensor([4, -1, 0, 2], device=DEVICE)
    slots = Slots.trusted(ids, num_slots=6) if trusted else ids
    states = randn(3, 40, 3, seed=4)
    results = []
    for each in (path, "reference"):
        pool = Pool(6, states, SLOTS)
        got = causal_conv1d_step(x, weight, bias, state_pool=pool.states, slots=slots, path=each)
        assert torch.equal(got[1], torch.zeros_like(got[1]))
        pool.check()
        results.append((got, pool.used))
    (got, used), (truth, true_used) = results
    assert truth.dtype == torch.float64
    assert relative_error(got, truth) < TOLERANCE[torch.float32]
    assert torch.equal(used, true_used)


@pytest.mark.parametrize("requests", [0, 1, 2])
def test_a_batch_of_padding_only(path: str, requests: int) -> None:
    pool = Pool(2, randn(0, 16, 3, seed=0), ())
    got = causal_conv1d_step(
        randn(requests, 16, seed=1),
        randn(16, 4, seed=2),
        state_pool=pool.states,
        slots=(-1,) * requests,
        path=path,
    )
    assert torch.equal(got, torch.zeros(requests, 16, device=DEVICE))
    pool.check()


def test_a_request_does_not_see_the_others_of_its_batch(path: str) -> None:
    x, weight, states = randn(3, 40, seed=1), randn(40, 4, seed=2), randn(3, 40, 3, seed=4)
    together, alone = Pool(6, states, SLOTS), Pool(6, states, SLOTS)
    got = causal_conv1d_step(x, weight, state_pool=together.states, slots=SLOTS, path=path)
    for row, slot in enumerate(SLOTS):
        one = causal_conv1d_step(
            x[row : row + 1], weight, state_pool=alone.states, slots=(slot,), path=path
        )
        assert relative_error(got[row], one[0]) < 1e-6
    assert torch.equal(together.used, alone.used)


def test_a_gradient_is_refused_not_forgotten(path: str) -> None:
    pool = Pool(6, randn(3, 16, 3, seed=4), SLOTS)
    x, weight = randn(3, 16, seed=1).requires_grad_(), randn(16, 4, seed=2).requires_grad_()
    with pytest.raises(ConfigError, match="x requires a gradient"):
        causal_conv1d_step(x, weight, state_pool=pool.states, slots=SLOTS, path=path)
    with torch.inference_mode():
        got = causal_conv1d_step(x, weight, state_pool=pool.states, slots=SLOTS, path=path)
    assert not got.requires_grad
    assert not pool.states.requires_grad


def test_transformers_agrees(path: str) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_update

    x, weight, bias = randn(3, 16, seed=1), randn(16, 4, seed=2), randn(16, seed=3)
    states = randn(3, 16, 3, seed=4)
    pool = Pool(6, states, SLOTS)
    theirs = states.cpu().clone()
    wanted = causal_conv1d_update(
        x[:, :, None].cpu(), theirs, weight.cpu(), bias.cpu(), activation="silu"
    )
    got = causal_conv1d_step(
        x, weight, bias, state_pool=pool.states, slots=SLOTS, activation="silu", path=path
    )
    assert relative_error(got.cpu(), wanted[..., 0]) < TOLERANCE[torch.float32]
    assert torch.equal(pool.used.cpu(), theirs)
