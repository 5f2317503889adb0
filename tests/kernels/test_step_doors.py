"""What the decode steps refuse, by the argument's name, with the pool as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernel_paths import DEVICE
from prfaas.errors import ConfigError
from prfaas.kernels import Slots
from prfaas.kernels.conv1d import causal_conv1d_step
from prfaas.kernels.step import decay_attention_step, delta_rule_step, ssd_step


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def _delta(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "q": _zeros(3, 2, 8),
        "k": _zeros(3, 2, 8),
        "v": _zeros(3, 4, 16),
        "g": _zeros(3, 4),
        "beta": _zeros(3, 4),
        "state_pool": torch.ones(5, 4, 8, 16, device=DEVICE),
        "slots": (0, 1, 2),
    }
    _refused(delta_rule_step, arguments, changes)


def _decay(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "q": _zeros(3, 2, 8),
        "k": _zeros(3, 2, 8),
        "v": _zeros(3, 4, 16),
        "g": _zeros(4),
        "state_pool": torch.ones(5, 4, 8, 16, device=DEVICE),
        "slots": (0, 1, 2),
    }
    _refused(decay_attention_step, arguments, changes)


def _ssd(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "x": _zeros(3, 4, 16),
        "dt": _zeros(3, 4),
        "A": _zeros(4),
        "B": _zeros(3, 2, 8),
        "C": _zeros(3, 2, 8),
        "D": _zeros(4),
        "state_pool": torch.ones(5, 4, 16, 8, device=DEVICE),
        "slots": (0, 1, 2),
    }
    _refused(ssd_step, arguments, changes)


def _conv(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "x": _zeros(3, 10),
        "weight": _zeros(10, 4),
        "bias": _zeros(10),
        "state_pool": torch.ones(5, 10, 3, device=DEVICE),
        "slots": (0, 1, 2),
    }
    _refused(causal_conv1d_step, arguments, changes)


def _refused(op: Callable[..., Any], arguments: dict[str, Any], changes: dict[str, Any]) -> None:
    """Calls with the changes; the error is the caller's to check, the pool is checked here."""
    op(**{**arguments, "state_pool": arguments["state_pool"].clone()})  # is fine without them
    arguments |= changes
    pool = arguments["state_pool"]
    before = pool.clone()
    try:
        op(**arguments)
    finally:
        assert torch.equal(pool, before)


POOL_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"slots": (0, 1, 5)}, "slots holds 5 at entry 2; the pool has slots 0 to 4"),
    ({"slots": (0, 1, -2)}, "slots holds -2"),
    ({"slots": (3, 1, 3)}, "slots holds 3 twice"),
    ({"slots": (0, 1)}, "slots has 2 entries for 3 requests"),
    ({"slots": Slots((0, 1, 2), num_slots=9, device=DEVICE)}, "checked against 9 slots"),
    ({"path": "fast"}, "path is 'fast'"),
]


@pytest.mark.parametrize("call", [_delta, _decay, _ssd, _conv])
@pytest.mark.parametrize(("changes", "message"), POOL_ERRORS)
def test_slots(call: Callable[..., None], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(**changes)


INNER = {_delta: (4, 8, 16), _decay: (4, 8, 16), _ssd: (4, 16, 8), _conv: (10, 3)}


@pytest.mark.parametrize("call", INNER)
def test_pools(call: Callable[..., None]) -> None:
    inner = INNER[call]
    whole = torch.ones(5, *inner, device=DEVICE)
    wrong: list[tuple[torch.Tensor, str]] = [
        (whole[:, :-1], "state_pool has shape"),
        (whole[0], "state_pool has shape"),
        (whole.double(), "state_pool has dtype float64"),
        (
            torch.ones(5, *inner[:-1], inner[-1] + 1, device=DEVICE)[..., :-1],
            "only the first stride is free",
        ),
        (whole.mT.contiguous().mT, "only the first stride is free"),
        (whole[:1].expand(5, *inner), "would overlap"),
    ]
    for pool, message in wrong:
        with pytest.raises(ConfigError, match=message):
            call(state_pool=pool)
    if DEVICE.type == "cuda":
        with pytest.raises(ConfigError, match="state_pool is on cpu"):
            call(state_pool=whole.cpu())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": _zeros(3, 3, 8), "k": _zeros(3, 3, 8)}, "v has 4 heads and q 3"),
        ({"q": _zeros(2, 2, 8)}, "q has shape"),
        ({"q": _zeros(3, 2, 8, dtype=torch.bfloat16)}, "q has dtype bfloat16; use float32"),
        ({"k": _zeros(3, 2, 9)}, "k has shape"),
        ({"k": _zeros(3, 8, 2).mT}, "k has stride 2 in its last dimension"),
        ({"v": _zeros(3, 16)}, "v has shape"),
        ({"v": _zeros(3, 4, 16).double()}, "v has dtype float64"),
        ({"v": [1]}, "v is a list"),
        ({"g": _zeros(3, 3)}, "g has shape"),
        ({"g": _zeros(3, 4, 16)}, r"g has shape \[3, 4, 16\]; it must be \[3, 4, 8\]"),
        ({"g": _zeros(3, 4, dtype=torch.int64)}, "g has dtype int64"),
        ({"beta": _zeros(3, 2)}, "beta has shape"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": "1"}, "scale is '1'"),
    ],
)
def test_delta_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _delta(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": _zeros(3, 3, 8), "k": _zeros(3, 3, 8)}, "v has 4 heads and q 3"),
        ({"k": _zeros(3, 2, 9)}, "k has shape"),
        ({"g": _zeros(3)}, r"g has shape \[3\]; it must be \[4\]"),
        ({"g": _zeros(2, 4)}, r"g has shape \[2, 4\]; it must be \[3, 4\]"),
        ({"scale": float("inf")}, "scale is inf"),
    ],
)
def test_decay_attention(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _decay(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": _zeros(3, 4)}, "x has shape"),
        ({"dt": _zeros(3, 3)}, "dt has shape"),
        ({"A": _zeros(3)}, "A has shape"),
        ({"B": _zeros(3, 3, 8), "C": _zeros(3, 3, 8)}, "x has 4 heads and B 3"),
        ({"B": _zeros(3, 2, 8, dtype=torch.float16)}, "B has dtype float16; use float32"),
        ({"C": _zeros(3, 2, 9)}, "C has shape"),
        ({"D": _zeros(3)}, "D has shape"),
    ],
)
def test_ssd(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ssd(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": _zeros(3, 9)}, "weight has shape"),
        ({"x": _zeros(10, 3).t()}, "x has stride 3 in its last dimension"),
        ({"weight": _zeros(4, 10).t()}, "weight has strides"),
        ({"weight": _zeros(10, 1)}, "weight has width 1; use 2 to 8"),
        ({"weight": _zeros(10, 9)}, "weight has width 9; use 2 to 8"),
        ({"bias": _zeros(9)}, "bias has shape"),
        ({"activation": "relu"}, "activation is 'relu'"),
        (
            {"state_pool": _zeros(5, 10, 3, dtype=torch.bfloat16)},
            "state_pool has dtype bfloat16; use float32",
        ),
    ],
)
def test_convolution(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _conv(**changes)
