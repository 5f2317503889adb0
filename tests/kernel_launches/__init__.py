"""Launches of every kernel and configured tile, one module per operation, for tests that compile.

A module has ``LAUNCHES``: a name for each, and a function that builds it for a processor, with the
very function that real calls use; None where a variant does not exist there (float8 on sm_80).
``VARIANTS`` names those whose tiles another launch has too, with another dtype or other flags: they
take as long again to compile and are left to ``make test-variants``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping

from prfaas.kernels.arch import Arch
from prfaas.kernels.launch import Launch

Build = Callable[[Arch], Launch | None]


def all_launches() -> tuple[Mapping[str, Build], frozenset[str]]:
    """Of every module here, as ``module.name``; and which of them are variants."""
    found: dict[str, Build] = {}
    variants: set[str] = set()
    for name in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{name}")
        found |= {f"{name}.{launch}": build for launch, build in module.LAUNCHES.items()}
        variants |= {f"{name}.{launch}" for launch in getattr(module, "VARIANTS", ())}
    unknown = variants - set(found)
    assert not unknown, f"variants that are no launches: {sorted(unknown)}"
    return found, frozenset(variants)
