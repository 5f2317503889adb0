"""Launches of every kernel and configured tile, one module per operation, for tests that compile.

A module has ``LAUNCHES``: a name for each, and a function that builds it for a processor, with the
very function that real calls use; None where a variant does not exist there (float8 on sm_80).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping

from prfaas.kernels.arch import Arch
from prfaas.kernels.launch import Launch

Build = Callable[[Arch], Launch | None]


def all_launches() -> Mapping[str, Build]:
    """Of every module here, as ``module.name``."""
    found: dict[str, Build] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        launches = importlib.import_module(f"{__name__}.{module}").LAUNCHES
        found |= {f"{module}.{name}": build for name, build in launches.items()}
    return found
