"""One rule says which code runs an operation, and counters say which code ran.

Every operation of `prfaas.kernels` has up to three paths with the same arguments and results:

- ``"reference"``: a loop over tokens in float64, slow, the truth that the others are tested with;
  its results are float64 too, so cast them before they go into the next operation;
- ``"torch"``: batched torch operations, any device, the path for CPUs;
- ``"triton"``: our kernels, for GPUs; on CPU tensors under ``TRITON_INTERPRET=1``.

The rule, `choose`:

1. A path that the caller names is taken, or refused with the reason.
2. Else tensors on a GPU take ``"triton"``, and so do CPU tensors when kernels are interpreted.
3. Else ``"torch"``. Where rule 2 wanted ``"triton"`` but it cannot run (not installed, arguments
   outside of what the kernel takes), the call is counted in `KernelReport.fallbacks` with the
   reason.
"""

from __future__ import annotations

import collections
import enum
import functools
import importlib
import importlib.metadata
import importlib.util
import threading
from collections.abc import Mapping

import attrs
import torch

from prfaas.errors import ConfigError, MissingExtra
from prfaas.kernels.arch import is_interpreting


class Path(enum.StrEnum):
    """Which code runs an operation."""

    REFERENCE = "reference"
    TORCH = "torch"
    TRITON = "triton"


_LOCK = threading.Lock()
_CALLS: collections.Counter[tuple[str, str]] = collections.Counter()
_FALLBACKS: collections.Counter[tuple[str, str]] = collections.Counter()


def choose(
    op: str, device: torch.device, path: str | None = None, *, refusal: str | None = None
) -> Path:
    """Applies the rule above to one call and counts it.

    Args:
        op: the operation's public name.
        device: where the tensors are.
        path: what the caller asked for; None for the rule.
        refusal: why the Triton kernel cannot take these arguments; None if it can.

    Raises:
        ConfigError: unknown path, or ``path="triton"`` cannot run here.
        MissingExtra: ``path="triton"`` without triton.
    """
    chosen = _rule(op, device, path, refusal)
    with _LOCK:
        _CALLS[op, chosen.value] += 1
    return chosen


def _rule(op: str, device: torch.device, path: str | None, refusal: str | None) -> Path:
    if path is not None:
        if path not in tuple(Path):
            raise ConfigError(f"path is {path!r}; use one of {', '.join(Path)}, or None")
        if path == Path.TRITON:
            _require_triton(op, device, refusal)
        return Path(path)
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreting()):
        return Path.TORCH
    reason = refusal if has_triton() else "triton is not installed"
    if reason is None:
        return Path.TRITON
    with _LOCK:
        _FALLBACKS[op, reason] += 1
    return Path.TORCH


def _require_triton(op: str, device: torch.device, refusal: str | None) -> None:
    if not has_triton():
        raise MissingExtra(package="triton", extra="kernels")
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreting()):
        raise ConfigError(
            f'{op}: path="triton" needs CUDA tensors, these are on {device}; move them, set '
            "TRITON_INTERPRET=1 before Python starts (slow, for tests), or leave path out"
        )
    if refusal is not None:
        raise ConfigError(f'{op}: path="triton" does not take these arguments: {refusal}')


@functools.cache
def has_triton() -> bool:
    """Whether triton can be imported; it is not imported here."""
    return importlib.util.find_spec("triton") is not None


@attrs.frozen(kw_only=True)
class KernelReport:
    """The effective configuration of the kernels in this process.

    Attributes:
        torch_version, triton_version: installed versions; None without triton.
        is_interpreting: kernels run in Triton's interpreter.
        devices: names of the GPUs that torch sees.
        calls: how often each ``(operation, path)`` ran.
        fallbacks: how often an operation fell back from triton to torch, by ``(operation,
            reason)``.
    """

    torch_version: str
    triton_version: str | None
    is_interpreting: bool
    devices: tuple[str, ...]
    calls: Mapping[tuple[str, str], int]
    fallbacks: Mapping[tuple[str, str], int]


def report() -> KernelReport:
    """What runs here, and what ran so far."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with _LOCK:
        calls, fallbacks = dict(_CALLS), dict(_FALLBACKS)
    return KernelReport(
        torch_version=torch.__version__,
        triton_version=_triton_version() if has_triton() else None,
        is_interpreting=is_interpreting(),
        devices=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        calls=calls,
        fallbacks=fallbacks,
    )


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # builds for other GPUs have other names
        return f"{importlib.import_module('triton').__version__}"
