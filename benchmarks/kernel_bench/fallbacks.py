"""Other people's torch code for the same operations, as their libraries run it on a CPU."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

_REPLACERS = ("fla", "causal_conv1d", "mamba_ssm", "kernels")
"""Packages whose functions transformers takes instead of its own when they are installed."""


@contextlib.contextmanager
def without_replacers() -> Iterator[None]:
    """While this is open, those packages cannot be imported, as if they were not installed."""
    before = {name: sys.modules[name] for name in _REPLACERS if name in sys.modules}
    sys.modules.update(dict.fromkeys(_REPLACERS))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in _REPLACERS:
            del sys.modules[name]
        sys.modules.update(before)


def transformers_function(model: str, name: str) -> Callable[..., Any]:
    """A module-level function of a model of transformers, in torch."""
    path = f"transformers.models.{model}.modeling_{model}"
    with without_replacers():
        module = importlib.import_module(path)
    return inspect.unwrap(getattr(module, name))


def fla_function(module: str, name: str) -> Callable[..., Any] | None:
    """A function of fla-core; None if it is not installed."""
    try:
        return getattr(importlib.import_module(f"fla.ops.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("fla", "packaging", "einops"):
            raise
        return None
