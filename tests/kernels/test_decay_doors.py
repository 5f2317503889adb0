"""Decay attention's refusals, and the decays of Lightning attention."""

from __future__ import annotations

import pytest
import torch

from kernel_paths import IS_INTERPRETING, RUNS_TRITON
from prfaas.errors import ConfigError
from prfaas.kernels import report
from prfaas.kernels.decay import decay_attention, lightning_log_decay

GOOD = {
    "q": torch.zeros(5, 2, 8),
    "k": torch.zeros(5, 2, 8),
    "v": torch.zeros(5, 4, 8),
    "g": torch.zeros(5, 4),
    "initial_state": torch.zeros(1, 4, 8, 8),
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(5, 2, 16), "q has shape"),
        ("q", torch.zeros(5, 2, 8).half(), "q has dtype float16"),
        ("k", torch.zeros(4, 2, 8), "k has shape"),
        ("k", torch.zeros(5, 8, 2).mT, "k has stride"),
        ("v", torch.zeros(5, 3, 8), "v has 3 heads and k 2"),
        ("v", torch.zeros(5, 4, 8).int(), "v has dtype int32"),
        ("g", torch.zeros(2), "g has shape"),
        ("g", torch.zeros(5, 2), "g has shape"),
        ("g", -0.5, "g is a float"),
        ("scale", float("nan"), "scale is nan"),
        ("initial_state", torch.zeros(2, 4, 8, 8), "initial_state has shape"),
        ("initial_state", torch.zeros(1, 4, 8, 8).int(), "initial_state has dtype"),
        ("cu_seqlens", [0, 9], "cu_seqlens ends with 9"),
        ("checkpoints", [[0]], "checkpoints of sequence 0"),
        ("path", "cuda", "path is 'cuda'"),
    ],
)
def test_the_door_names_what_is_wrong(name: str, value: object, message: str) -> None:
    decay_attention(**GOOD, path="torch")
    with pytest.raises(ConfigError, match=message):
        decay_attention(**{"path": "torch", **GOOD, name: value})


def test_key_dims_above_256_are_for_torch() -> None:
    q, v, g = torch.ones(3, 1, 257), torch.ones(3, 1, 4), torch.zeros(1)
    if IS_INTERPRETING:
        with pytest.raises(ConfigError, match="K is 257, at most 256 fit"):
            decay_attention(q, q, v, g, path="triton")
    decay_attention(q, q, v, g)
    reasons = {reason for op, reason in report().fallbacks if op == "decay_attention"}
    assert reasons == ({"K is 257, at most 256 fit"} if IS_INTERPRETING else set())


def test_the_default_path_and_scale() -> None:
    before = report().calls.get(("decay_attention", "triton"), 0)
    q, v, g = torch.ones(3, 1, 16), torch.ones(3, 1, 4), torch.zeros(1)
    got = decay_attention(q, q, v, g).output[:, 0, 0]
    assert got.tolist() == [4.0, 8.0, 12.0]  # 16^-0.5 * 16 tokens' products
    ran = report().calls.get(("decay_attention", "triton"), 0) - before
    assert ran == (1 if RUNS_TRITON and IS_INTERPRETING else 0)


def test_eight_heads_of_a_model_halve_from_head_to_head() -> None:
    got = lightning_log_decay(8, layer_index=0, num_layers=80)
    assert got.dtype == torch.float32
    want = [-(2.0**-n) * (1 + 1e-5) for n in range(1, 9)]
    assert got.tolist() == pytest.approx(want, rel=1e-7)


def test_heads_between_powers_of_two_take_every_second_slope_of_the_next_power() -> None:
    got = -lightning_log_decay(6, layer_index=0, num_layers=1) / (1 + 1e-5)
    want = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert got.tolist() == pytest.approx(want, rel=1e-6)
    assert lightning_log_decay(1, layer_index=0, num_layers=1).tolist() == pytest.approx(
        [-(2.0**-8) * (1 + 1e-5)]
    )


@pytest.mark.parametrize(
    ("index", "factor"), [(-1, 1.25 + 1e-5), (0, 1 + 1e-5), (1, 0.75 + 1e-5), (4, 1e-5)]
)
def test_deeper_layers_remember_longer(index: int, factor: float) -> None:
    got = lightning_log_decay(2, layer_index=index, num_layers=5)
    want = [-(2.0**-4) * factor, -(2.0**-8) * factor]
    assert got.tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("num_heads", "layer_index", "num_layers", "message"),
    [
        (0, 0, 4, "num_heads is 0"),
        (8, 0, 0, "num_layers is 0"),
        (8, 4, 4, "layer_index is 4"),
        (8, -2, 4, "layer_index is -2"),
        (2.0, 0, 4, "num_heads is 2.0"),
    ],
)
def test_counts_and_indices_are_checked(
    num_heads: int, layer_index: int, num_layers: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        lightning_log_decay(num_heads, layer_index=layer_index, num_layers=num_layers)
