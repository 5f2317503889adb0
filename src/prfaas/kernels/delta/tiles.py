"""Tiles of the delta rule's kernels, by processor and sizes.

Every choice here is compiled ahead of time for four processors, and spills on none of the NVIDIA
ones. Programs have four warps where that is so: products have 64 rows, 16 for each. The interpreter
pays per operation, whatever its size, and gets wide tiles.
"""

from __future__ import annotations

import attrs
import torch

from prfaas.kernels.arch import Arch

CHUNK = 64
"""Tokens of a chunk; the kernel that inverts is written for this."""


@attrs.frozen(kw_only=True)
class Tiles:
    """Columns per step, and the compiler's options, of one kernel.

    Attributes:
        key: key channels of a slab.
        value: value columns of a program, or of a step.
        num_stages: chunks or slabs that are loaded ahead, and the one that is used.
    """

    key: int
    value: int
    num_warps: int = 4
    num_stages: int = 1


def padded(size: int) -> int:
    """The smallest power of two that holds ``size`` and is no smaller than a matrix operand."""
    return max(16, 1 << (size - 1).bit_length())


def prepare_tiles(
    arch: Arch, dtype: torch.dtype, key: int, value: int, *, is_per_channel: bool
) -> Tiles:
    """Slabs as wide as registers allow: float32 products keep each operand in two parts.

    With four warps two programs share a processor, and one computes while the other waits. That is
    too tight where rows are not aligned, and addresses take registers one by one; for a gate per
    channel on sm_90 it is with one version of the compiler.
    """
    widest = 64 if arch.is_interpreter else 16 if dtype == torch.float32 else 32
    is_tight = (
        dtype == torch.float32
        or arch.name in ("sm_100", "sm_103")
        or (is_per_channel and arch.name == "sm_90")
        or key % 16 > 0
        or value % 16 > 0
    )
    wide_values = is_per_channel and arch.name == "sm_90"
    return Tiles(
        key=min(widest, padded(key)),
        value=min(32 if wide_values else widest, padded(value)),
        num_warps=8 if is_tight and not arch.is_amd else 4,
    )


def scan_tiles(arch: Arch, dtype: torch.dtype, key: int, value: int) -> Tiles:
    """32 value columns, so that 32 heads of 128 columns fill a large GPU, 128 programs; fewer where
    a state has more than 128 rows of them, or products need their operands in parts."""
    if arch.is_interpreter:
        return Tiles(key=min(32, padded(key)), value=min(64, padded(value)))
    if dtype == torch.float32:
        # Warp groups of sm_90 each hold the left operand whole: a second one would spill.
        warps = 4 if arch.name == "sm_90" else 8
        return Tiles(key=min(32, padded(key)), value=16, num_warps=warps)
    # The next loads hide behind the products: those of the next chunk, or of the next slab where a
    # chunk has several. Shared memory of AMD has no room for that.
    if key > 128:
        return Tiles(key=64, value=16, num_stages=1 if arch.is_amd else 2)
    stages = 1 if arch.is_amd else 3
    return Tiles(key=padded(key), value=min(32, padded(value)), num_stages=stages)


def combine_tiles(key: int, value: int) -> Tiles:
    """Few columns: a program does nothing else than wait for the product before."""
    return Tiles(key=min(16 if key > 128 else 32, padded(key)), value=16, num_stages=2)
