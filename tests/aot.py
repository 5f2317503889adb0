"""Compiles a `Launch` for a processor that is not here, and reads what it needs there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import attrs
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prfaas.kernels.arch import Arch
from prfaas.kernels.launch import Launch

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
"""Every kernel and configured tile compiles for these."""

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@attrs.frozen(kw_only=True)
class Compiled:
    """What came out of the compiler.

    Attributes:
        shared_bytes: shared memory of a program.
        spilled_bytes: stack of a thread on NVIDIA, spilled vector registers on AMD.
        registers: registers of a thread.
        assembly: PTX or amdgcn text.
        ttir: Triton's own intermediate form.
    """

    shared_bytes: int
    spilled_bytes: int
    registers: int
    assembly: str
    ttir: str

    def vector_bits(self, kind: str) -> set[int]:
        """Widths in bits of global ``"ld"`` or ``"st"`` instructions of the PTX."""
        found = set()
        for count, bits in re.findall(
            rf"{kind}\.global[.\w:]*?(?:\.v(\d))?\.[bfus](\d+)", self.assembly
        ):
            found.add(int(count or 1) * int(bits))
        return found


def compile_for(launch: Launch, arch: Arch) -> Compiled:
    """Compiles with the types, hints and options of a real launch."""
    names = launch.kernel.arg_names
    fixed = set(launch.kernel.do_not_specialize or ())
    signature, constants, hints = {}, {}, {}
    for index, name in enumerate(names):
        value = launch.constants.get(name, launch.arguments.get(name))
        if name in launch.constants or value is None:
            signature[name], constants[(index,)] = "constexpr", value
            continue
        signature[name] = _type_of(value)
        is_named_fixed = name in fixed or index in fixed
        if isinstance(value, torch.Tensor) or (
            type(value) is int and not is_named_fixed and value % 16 == 0
        ):
            hints[(index,)] = [["tt.divisibility", 16]]
        elif type(value) is int and not is_named_fixed and value == 1:
            signature[name], constants[(index,)] = "constexpr", 1
    unknown = (set(launch.arguments) | set(launch.constants)) - set(names)
    assert not unknown, f"{launch.kernel.__name__} has no arguments {sorted(unknown)}"
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=hints)
    made = triton.compile(
        source,
        target=_target(arch),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    if arch.is_amd:
        text = made.asm["amdgcn"]
        registers, spilled = (
            max(map(int, re.findall(rf"\.{word}:\s+(\d+)", text)), default=0)
            for word in ("vgpr_count", "vgpr_spill_count")
        )
    else:
        text = made.asm["ptx"]
        registers, spilled = _resources(made.asm["cubin"])
    return Compiled(
        shared_bytes=made.metadata.shared,
        spilled_bytes=spilled,
        registers=registers,
        assembly=text,
        ttir=made.asm["ttir"],
    )


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if type(value) is bool:
        return "i1"
    if type(value) is int:
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _target(arch: Arch) -> GPUTarget:
    if arch.is_amd:
        return GPUTarget("hip", arch.name, arch.warp_size)
    return GPUTarget("cuda", int(arch.name.removeprefix("sm_")), arch.warp_size)


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", text))
    return int(found["REG"]), int(found["STACK"])
