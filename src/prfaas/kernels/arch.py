"""The processors that kernels are compiled for, and what each can do."""

from __future__ import annotations

import functools
import os

import attrs
import torch

from prfaas.errors import ConfigError

KIB = 1024


@attrs.frozen(kw_only=True)
class Arch:
    """One target of the Triton compiler.

    Attributes:
        name: e.g. ``"sm_90"`` or ``"gfx942"``; ``"interpreter"`` runs kernels on CPU tensors.
        max_shared_bytes: shared memory that one program may use.
        float32_dot: ``input_precision`` of ``tl.dot`` with float32 operands that keeps about
            float32 accuracy without falling back to scalar code.
        has_fp8: whether float8_e4m3fn exists as a type of the compiler's target.
        warp_size: threads per warp.
    """

    name: str
    max_shared_bytes: int
    float32_dot: str
    has_fp8: bool
    warp_size: int = 32

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")

    @property
    def is_interpreter(self) -> bool:
        return self.name == "interpreter"


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch(name="sm_80", max_shared_bytes=163 * KIB, float32_dot="tf32x3", has_fp8=False),
        Arch(name="sm_86", max_shared_bytes=99 * KIB, float32_dot="tf32x3", has_fp8=False),
        Arch(name="sm_89", max_shared_bytes=99 * KIB, float32_dot="tf32x3", has_fp8=True),
        Arch(name="sm_90", max_shared_bytes=227 * KIB, float32_dot="tf32x3", has_fp8=True),
        Arch(name="sm_100", max_shared_bytes=227 * KIB, float32_dot="tf32x3", has_fp8=True),
        Arch(name="sm_103", max_shared_bytes=227 * KIB, float32_dot="tf32x3", has_fp8=True),
        Arch(name="sm_120", max_shared_bytes=99 * KIB, float32_dot="tf32x3", has_fp8=True),
        Arch(
            name="gfx942",
            max_shared_bytes=64 * KIB,
            float32_dot="ieee",
            has_fp8=False,  # MI300's fp8 is another format (fnuz)
            warp_size=64,
        ),
        Arch(name="interpreter", max_shared_bytes=227 * KIB, float32_dot="ieee", has_fp8=True),
    )
}


def is_interpreting() -> bool:
    """Whether this process runs Triton kernels in the interpreter: ``TRITON_INTERPRET=1`` was set
    before triton was imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def arch_of(device: torch.device) -> Arch:
    """What kernels for tensors on ``device`` are compiled for.

    Raises:
        ConfigError: the processor is in no table here.
    """
    if device.type == "cpu" and is_interpreting():
        return ARCHS["interpreter"]
    if device.type != "cuda":
        raise ConfigError(
            f"there is no kernel for tensors on {device}; use CUDA tensors, or "
            "TRITON_INTERPRET=1 with CPU tensors"
        )
    return _gpu(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _gpu(index: int) -> Arch:
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    else:
        major, minor = torch.cuda.get_device_capability(index)
        name = f"sm_{major}{minor}"
    if name not in ARCHS or name == "interpreter":
        known = ", ".join(sorted(set(ARCHS) - {"interpreter"}))
        raise ConfigError(
            f"device {index} is a {name}; tile sizes are known for {known}: "
            'use path="torch", or add the processor to prfaas.kernels.arch.ARCHS'
        )
    return ARCHS[name]
