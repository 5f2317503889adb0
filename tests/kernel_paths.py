"""Which paths of the kernels this test process can run, and how close results have to be.

Three ways to run ``tests/kernels``: plain (the torch paths, and ahead-of-time compiles), with
``TRITON_INTERPRET=1`` (the Triton kernels on CPU tensors), and on a machine with a GPU (all).
"""

from __future__ import annotations

import os

import torch

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available() and not IS_INTERPRETING
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

PATHS = ("triton",) if IS_INTERPRETING else ("torch", "triton") if HAS_GPU else ("torch",)
"""Fast paths to compare with the reference path in this process."""

RUNS_TRITON = "triton" in PATHS

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative Frobenius error, by the dtype of the inputs. Compiled float32 dots on a GPU are
made of three tf32 products."""


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the truth, in float64; NaN if any is NaN."""
    a, b = got.double(), truth.double()
    norm = b.norm().item()
    return (a - b).norm().item() / (norm if norm else 1.0)
