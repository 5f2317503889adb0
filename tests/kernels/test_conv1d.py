"""Causal convolution of packed sequences: outputs, and states that are copies of inputs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernel_paths import DEVICE, PATHS, TOLERANCE, relative_error
from poison import PoisonedMemory
from prfaas.errors import ConfigError
from prfaas.kernels import PrefillResult, Sequences
from prfaas.kernels.conv1d import causal_conv1d, torch_path
from step_cases import randn

pytestmark = pytest.mark.parametrize("path", PATHS)


def truth(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    initial: torch.Tensor | None,
    lengths: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of torch's own convolution in float64, sequence by sequence: outputs and final states."""
    channels, width = weight.shape
    outputs, finals = [], []
    for index, part in enumerate(x.split(lengths)):
        before = x.new_zeros(channels, width - 1) if initial is None else initial[index]
        inputs = torch.cat((before, part.t()), 1)
        finals.append(inputs[:, inputs.shape[1] - width + 1 :])
        if not len(part):
            continue
        made = F.conv1d(
            inputs.double()[None],
            weight.double()[:, None],
            None if bias is None else bias.double(),
            groups=channels,
        )
        outputs.append((F.silu(made) if activation else made)[0].t())
    return torch.cat(outputs), torch.stack(finals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("channels", "width", "has_bias", "activation", "has_initial"),
    [
        (64, 4, False, "silu", True),
        (64, 4, True, None, False),
        (100, 4, True, "silu", True),
        (20, 2, False, None, True),
        (33, 8, True, "silu", True),
        (16, 3, False, "silu", False),
    ],
)
def test_ragged_packs(
    path: str,
    channels: int,
    width: int,
    has_bias: bool,
    activation: str | None,
    has_initial: bool,
    dtype: torch.dtype,
) -> None:
    lengths = (0, 65, 1, 2, 130, 0, 5, 3)
    memory = PoisonedMemory()
    x = memory.place(randn(sum(lengths), channels, seed=1, dtype=dtype), row_padding=5)
    weight = memory.place(randn(channels, width, seed=2, dtype=dtype))
    bias = memory.place(randn(channels, seed=3, dtype=dtype)) if has_bias else None
    initial = None
    if has_initial:
        initial = memory.place(randn(len(lengths), channels, width - 1, seed=4, dtype=dtype))
    wanted, finals = truth(x, weight, bias, activation, initial, lengths)
    got = causal_conv1d(
        x,
        weight,
        bias,
        activation=activation,
        initial_state=initial,
        cu_seqlens=Sequences.of_lengths(lengths),
        path=path,
    )
    assert got.output.dtype == dtype
    assert relative_error(got.output, wanted) < TOLERANCE[dtype]
    assert torch.equal(got.final_state, finals)
    assert got.checkpoints.shape == (0, channels, width - 1)
    memory.check()


@pytest.mark.parametrize("tokens", [1, 2, 3, 63, 64, 65, 250])
def test_one_sequence(path: str, tokens: int) -> None:
    x, weight = randn(tokens, 40, seed=1), randn(40, 4, seed=2)
    wanted, finals = truth(x, weight, None, "silu", None, (tokens,))
    got = causal_conv1d(x, weight, activation="silu", path=path)
    assert relative_error(got.output, wanted) < TOLERANCE[torch.float32]
    assert torch.equal(got.final_state, finals)
    slow = causal_conv1d(x, weight, activation="silu", path="reference")
    assert slow.output.dtype == torch.float64
    assert relative_error(slow.output, wanted) < 1e-14
    assert torch.equal(slow.final_state, finals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_more_tokens_than_stay_in_cache(
    path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_path, "BLOCK", 1)
    x, weight, bias = (randn(*shape, seed=1, dtype=dtype) for shape in ((50, 24), (24, 4), (24,)))
    initial = randn(2, 24, 3, seed=2, dtype=dtype)
    wanted, finals = truth(x, weight, bias, "silu", initial, (17, 33))
    got = causal_conv1d(
        x,
        weight,
        bias,
        activation="silu",
        initial_state=initial,
        cu_seqlens=(0, 17, 50),
        path=path,
    )
    assert relative_error(got.output, wanted) < TOLERANCE[dtype]
    assert torch.equal(got.final_state, finals)


def test_no_tokens_at_all(path: str) -> None:
    initial = randn(2, 40, 3, seed=3)
    got = causal_conv1d(
        torch.empty(0, 40, device=DEVICE),
        randn(40, 4, seed=2),
        initial_state=initial,
        cu_seqlens=(0, 0, 0),
        path=path,
    )
    assert got.output.shape == (0, 40)
    assert torch.equal(got.final_state, initial)


@pytest.mark.parametrize("has_initial", [True, False])
def test_checkpoints_are_the_inputs_before_them(path: str, has_initial: bool) -> None:
    lengths, positions = (70, 0, 9, 130), ((1, 2, 64, 70), (), (4,), (3, 127))
    x, weight = randn(sum(lengths), 24, seed=1), randn(24, 5, seed=2)
    initial = randn(4, 24, 4, seed=3) if has_initial else None

    def run(path: str) -> PrefillResult:
        return causal_conv1d(
            x,
            weight,
            initial_state=initial,
            cu_seqlens=Sequences.of_lengths(lengths),
            checkpoints=positions,
            path=path,
        )

    got, slow = run(path), run("reference")
    wanted = []
    for index, part in enumerate(x.split(lengths)):
        before = x.new_zeros(24, 4) if initial is None else initial[index]
        inputs = torch.cat((before, part.t()), 1)
        wanted += [inputs[:, at : at + 4] for at in positions[index]]
    assert torch.equal(got.checkpoints, torch.stack(wanted))
    assert torch.equal(slow.checkpoints, torch.stack(wanted))
    assert torch.equal(got.final_state, slow.final_state)
    assert relative_error(got.output, slow.output) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("cut", [1, 2, 3, 64, 67])
def test_a_resumed_run_is_the_uninterrupted_one(path: str, cut: int) -> None:
    x, weight, bias = randn(70, 32, seed=1), randn(32, 4, seed=2), randn(32, seed=3)
    settings: dict[str, Any] = {"weight": weight, "bias": bias, "activation": "silu", "path": path}
    whole = causal_conv1d(x, **settings)
    first = causal_conv1d(x[:cut], **settings)
    rest = causal_conv1d(x[cut:], initial_state=first.final_state, **settings)
    # On CPUs vectors and their remainders are rounded alike only to the last bit or so.
    both = torch.cat((first.output, rest.output))
    torch.testing.assert_close(both, whole.output, rtol=1e-6, atol=1e-6)
    assert torch.equal(rest.final_state, whole.final_state)


def test_a_sequence_does_not_see_its_neighbours(path: str) -> None:
    x, weight = randn(12, 32, seed=1), randn(32, 4, seed=2)
    x[:4] = torch.nan
    x[9:] = torch.nan
    got = causal_conv1d(x, weight, cu_seqlens=(0, 4, 9, 12), path=path)
    wanted, finals = truth(x[4:9], weight, None, None, None, (5,))
    assert relative_error(got.output[4:9], wanted) < TOLERANCE[torch.float32]
    assert torch.equal(got.final_state[1], finals[0])


def test_large_values_do_not_overflow_the_activation(path: str) -> None:
    x = torch.tensor([[-1e4, 1e4] * 8], device=DEVICE)
    weight = torch.ones(16, 2, device=DEVICE)
    got = causal_conv1d(x, weight, activation="silu", path=path)
    assert torch.allclose(got.output, x.clamp_min(0), atol=1e-30)


def test_many_sequences(path: str) -> None:
    """More than a program looks through at once."""
    lengths = tuple(index % 3 if index > 100 else 0 for index in range(140))
    x, weight = randn(sum(lengths), 16, seed=1), randn(16, 4, seed=2)
    wanted, finals = truth(x, weight, None, None, None, lengths)
    offsets = itertools.accumulate(lengths, initial=0)
    got = causal_conv1d(x, weight, cu_seqlens=offsets, path=path)
    assert relative_error(got.output, wanted) < TOLERANCE[torch.float32]
    assert torch.equal(got.final_state, finals)


def test_a_gradient_is_refused_not_forgotten(path: str) -> None:
    x, weight = randn(5, 16, seed=1), randn(16, 4, seed=2).requires_grad_()
    with pytest.raises(ConfigError, match="weight requires a gradient"):
        causal_conv1d(x, weight, path=path)
    with torch.no_grad():
        assert not causal_conv1d(x, weight, path=path).output.requires_grad


def test_transformers_agrees(path: str) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn

    x, weight, bias = randn(30, 16, seed=1), randn(16, 4, seed=2), randn(16, seed=3)
    wanted = causal_conv1d_fn(x.t()[None].cpu(), weight.cpu(), bias.cpu(), activation="silu")
    got = causal_conv1d(x, weight, bias, activation="silu", path=path)
    assert relative_error(got.output.cpu(), wanted[0].t()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(8, 3)}, "weight has shape"),
        ({"x": torch.zeros(4, 9).t()}, "x has stride 9 in its last dimension"),
        ({"x": torch.zeros(9, 4, dtype=torch.float64)}, "x has dtype float64"),
        ({"weight": torch.zeros(4, 9)}, "weight has width 9; use 2 to 8"),
        ({"weight": torch.zeros(4, 1)}, "weight has width 1; use 2 to 8"),
        ({"weight": torch.zeros(4, 5)[:, :4]}, "weight has strides"),
        ({"bias": torch.zeros(5)}, "bias has shape"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
        ({"initial_state": torch.zeros(1, 4, 4)}, r"initial_state has shape \[1, 4, 4\]"),
        ({"initial_state": torch.zeros(1, 4, 3).half()}, "initial_state has dtype float16"),
        ({"initial_state": torch.zeros(1, 3, 4).mT}, "initial_state has strides"),
        ({"cu_seqlens": (0, 8)}, "cu_seqlens ends with 8"),
        ({"checkpoints": ((10,),)}, "checkpoints of sequence 0"),
        ({"path": "quick"}, "path is 'quick'"),
    ],
)
def test_doors(path: str, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(9, 4),
        "weight": torch.zeros(4, 4),
        "bias": torch.zeros(4),
        "initial_state": torch.zeros(1, 4, 3),
    }
    causal_conv1d(**arguments, path="torch")
    with pytest.raises(ConfigError, match=message):
        causal_conv1d(**{**arguments, "path": path, **changes})
