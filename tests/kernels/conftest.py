"""One mode per process, interpreted or compiled: the shell sets ``TRITON_INTERPRET``, no test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from kernel_paths import HAS_GPU, IS_INTERPRETING

os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="prfaas-triton-"))
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns when it is not set

if IS_INTERPRETING:
    import interpreter_shim

    interpreter_shim.install()
    collect_ignore = ["test_ahead_of_time.py", "test_transformers_layers.py"]


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_poison() -> Iterator[None]:
    """``torch.empty`` gives NaN, or the largest whole number."""
    if HAS_GPU:
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """An interpreted run that launched no kernel proves nothing, so it fails."""
    if not IS_INTERPRETING or exitstatus != 0:
        return
    from prfaas.kernels.dispatch import report

    counts = {op: n for (op, path), n in report().calls.items() if path == "triton"}
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a worker of pytest-xdist: the controller adds up
        output["launched"] = counts
        return
    for op, count in counts.items():
        _LAUNCHED[op] = _LAUNCHED.get(op, 0) + count
    if not sum(_LAUNCHED.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nTRITON_INTERPRET=1, but no Triton kernel ran")


_LAUNCHED: dict[str, int] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    for op, count in getattr(node, "workeroutput", {}).get("launched", {}).items():
        _LAUNCHED[op] = _LAUNCHED.get(op, 0) + count
