"""The launch of the fused scan: tiles by processor, head sizes and dtype."""

from __future__ import annotations

import attrs
import torch

from prfaas.kernels.arch import Arch, arch_of
from prfaas.kernels.decay.device import decay_scan_kernel
from prfaas.kernels.decay.problem import DecayProblem
from prfaas.kernels.launch import Launch
from prfaas.kernels.results import PrefillResult


@attrs.frozen(kw_only=True)
class ScanTiles:
    """How one program of the scan is cut.

    Attributes:
        chunk: tokens.
        key: key channels of an operand; a program has all of its head, in parts of this many.
        value: value channels.
        num_warps, num_stages: options of the compiler.
    """

    chunk: int
    key: int
    value: int
    num_warps: int
    num_stages: int


_BIG_OPERANDS = ("sm_90", "sm_100", "sm_103")
"""Their dot products read operands from shared memory, which leaves registers for more tokens."""


def scan_tiles(arch: Arch, key_dim: int, value_dim: int, dtype: torch.dtype) -> ScanTiles:
    """Tiles that need no spilled registers and fit in shared memory."""
    is_big = arch.name in _BIG_OPERANDS
    if arch.is_interpreter:  # few fat programs are fastest
        chunk, key, value, num_warps, num_stages = 64, 256, 128, 4, 1
    elif dtype == torch.float32:  # three operands for each product, in registers
        chunk, key, value, num_warps, num_stages = 16, 64, 32, 4, 1
        if key_dim > 128 and not is_big:
            value = 16
    elif key_dim > 128:
        chunk, key, value, num_warps, num_stages = 32, 64, 32, 8 if is_big else 4, 2
    elif is_big and dtype == torch.bfloat16:
        chunk, key, value, num_warps, num_stages = 64, 64, 32, 4, 2
    else:
        chunk, key, value, num_warps, num_stages = 32, 64, 32, 4, 2
    return ScanTiles(
        chunk=chunk,
        key=min(key, _power_of_two(key_dim)),
        value=min(value, _power_of_two(value_dim)),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _power_of_two(size: int) -> int:
    """At least 16, the least that a dot product takes."""
    return max(16, 1 << (size - 1).bit_length())


def run_kernel(problem: DecayProblem) -> PrefillResult:
    """Output in the dtype of v, states in float32."""
    result = problem.new_result(problem.v.dtype, torch.float32)
    scan_launch(problem, result, arch_of(problem.v.device)).run()
    return result


def scan_launch(problem: DecayProblem, result: PrefillResult, arch: Arch) -> Launch:
    """The whole problem as one launch."""
    q, k, v, gate, initial = problem.q, problem.k, problem.v, problem.gate, problem.initial
    tiles = scan_tiles(arch, problem.key_dim, problem.value_dim, v.dtype)
    table = problem.chunks(tiles.chunk)
    num_tiles = -(-problem.value_dim // tiles.value)
    initial_strides = (0, 0, 0, 0) if initial is None else initial.stride()
    return Launch(
        kernel=decay_scan_kernel,
        grid=(problem.sequences.num_sequences * problem.num_heads * num_tiles,),
        arguments={
            "q": q,
            "k": k,
            "v": v,
            "gate": gate,
            "rate": problem.rate,
            "skip": problem.skip,
            "output": result.output,
            "initial": initial,
            "final": result.final_state,
            "checkpoints": result.checkpoints if problem.num_checkpoints else None,
            "starts": table.starts,
            "lengths": table.lengths,
            "checkpoint_rows": table.checkpoint_rows,
            "first_chunks": table.first_chunks,
            "scale": problem.scale,
        },
        constants={
            "HEADS": problem.num_heads,
            "PER_GROUP": problem.num_heads // problem.num_groups,
            "K": problem.key_dim,
            "V": problem.value_dim,
            "Q_TOKEN": q.stride(0),
            "Q_HEAD": q.stride(1),
            "K_TOKEN": k.stride(0),
            "K_HEAD": k.stride(1),
            "V_TOKEN": v.stride(0),
            "V_HEAD": v.stride(1),
            "GATE_TOKEN": gate.stride(0) if gate.ndim == 2 else 0,
            "GATE_HEAD": gate.stride(-1),
            "RATE_HEAD": 0 if problem.rate is None else problem.rate.stride(0),
            "SKIP_HEAD": 0 if problem.skip is None else problem.skip.stride(0),
            "INITIAL_SEQUENCE": initial_strides[0],
            "INITIAL_HEAD": initial_strides[1],
            "INITIAL_K": initial_strides[2],
            "INITIAL_V": initial_strides[3],
            "STATE_K": 1 if problem.is_value_first else problem.value_dim,
            "STATE_V": problem.key_dim if problem.is_value_first else 1,
            "IS_PER_TOKEN": gate.ndim == 2,
            "IS_EXACT": v.dtype == torch.float32,
            "CHUNK": tiles.chunk,
            "BLOCK_K": tiles.key,
            "BLOCK_V": tiles.value,
            **dot_types(arch, v.dtype),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def dot_types(arch: Arch, dtype: torch.dtype) -> dict[str, object]:
    """Operand types and precisions of the dot products.

    Scores and updates are products of the inputs, in their dtype. The state and the weights can
    leave the range of float16, so products with them are made in tf32 there, whose 10 bits of
    mantissa are those of float16; bfloat16 has the range of float32.
    """
    import triton.language as tl

    score = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    is_half = dtype == torch.float16
    return {
        "SCORE_TYPE": score[dtype],
        "STATE_TYPE": tl.float32 if is_half else score[dtype],
        "SCORE_PRECISION": arch.float32_dot,
        "STATE_PRECISION": "tf32" if is_half else arch.float32_dot,
    }
