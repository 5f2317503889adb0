"""Checks of tensors at the door: every error names the argument, before a launch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence

import torch

from prfaas.errors import ConfigError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that operations take for activations."""

LARGEST_NUMBER = 3e38
"""About the largest float32."""


def check_tensor(
    name: str,
    value: object,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype] = FLOATS,
    device: torch.device | None = None,
    contiguous: str = "last",
) -> None:
    """Refuses a tensor that the operation cannot read.

    Args:
        name: the argument's name.
        value: what was passed.
        shape: one entry per dimension: a number that must be met, or a word for any number of at
            least 1 (a word that starts with ``"num_"`` may be 0).
        dtypes: allowed dtypes.
        device: where it has to be; None for anywhere.
        contiguous: ``"last"``: elements of the last dimension are adjacent; ``"all"``: the whole
            tensor is; ``"no"``: any strides.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{name} is a {type(value).__name__}; pass a torch.Tensor")
    if value.dtype not in dtypes:
        known = ", ".join(_short(dtype) for dtype in dtypes)
        raise ConfigError(f"{name} has dtype {_short(value.dtype)}; use {known}")
    sizes = tuple(value.shape)
    if len(sizes) != len(shape) or any(
        got != wanted and (type(wanted) is int or got < _least(wanted))
        for got, wanted in zip(sizes, shape, strict=True)
    ):
        wanted_text = ", ".join(str(size) for size in shape)
        raise ConfigError(f"{name} has shape {list(sizes)}; it must be [{wanted_text}]")
    if value.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            f"{name} requires a gradient, and the kernels have none; call them under "
            "torch.inference_mode() or torch.no_grad()"
        )
    if device is not None and value.device != device:
        raise ConfigError(f"{name} is on {value.device}, the other arguments are on {device}")
    if contiguous == "all" and not value.is_contiguous():
        raise ConfigError(
            f"{name} has strides {value.stride()} for shape {list(value.shape)}; it must be "
            "contiguous: call .contiguous()"
        )
    if contiguous == "last" and sizes and sizes[-1] > 1 and value.stride(-1) != 1:
        raise ConfigError(
            f"{name} has stride {value.stride(-1)} in its last dimension; its elements must be "
            "adjacent there: call .contiguous()"
        )


def _least(word: int | str) -> int:
    return 0 if str(word).startswith("num_") else 1


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_multiple(name: str, count: int, of_name: str, of_count: int) -> None:
    """Refuses head counts that do not group evenly."""
    if of_count < 1 or count % of_count:
        raise ConfigError(
            f"{name} has {count} heads and {of_name} {of_count}; the first must be a multiple of "
            "the second"
        )


def check_finite_number(name: str, value: object) -> float:
    """Refuses a scale that is no finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} is {value!r}; it must be a finite number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) < LARGEST_NUMBER:  # nor is NaN
        raise ConfigError(f"{name} is {value!r}; it must be a finite number, as float32 knows them")
    return number


def whole_numbers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """A list, an iterator or a tensor of one dimension as plain ints; else ConfigError."""
    if isinstance(values, torch.Tensor):
        if values.ndim != 1 or values.is_floating_point() or values.dtype is torch.bool:
            raise ConfigError(
                f"{name} is a {values.dtype} tensor of shape {list(values.shape)}; use whole "
                "numbers in one dimension"
            )
        return tuple(values.tolist())
    if not isinstance(values, Iterable):
        raise ConfigError(f"{name} is {values!r}; it is a list of whole numbers")
    made = tuple(values)
    wrong = [v for v in made if isinstance(v, bool) or not isinstance(v, numbers.Integral)]
    if wrong:
        raise ConfigError(f"{name} holds {wrong[0]!r}; it holds whole numbers")
    return tuple(map(int, made))
