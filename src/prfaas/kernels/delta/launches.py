"""The delta rule's prefill as two launches, or four for long sequences on few heads.

With G the running sum of gates inside a chunk of 64 tokens, after Gated DeltaNet (arXiv:2412.06464)
and Kimi Delta Attention (arXiv:2510.26692)::

    A = beta_i sum_d k_id k_jd e^(G_id - G_jd)   j < i      T = (I + A)^-1
    P = scale  sum_d q_id k_jd e^(G_id - G_jd)   j <= i
    W = T (beta e^G k)        U = T (beta v)                              `prepare`
    u = U - W S               o = scale (e^G q) S + P u                   `scan`
    S = e^(G_last) S + (e^(G_last - G) k)^T u                             `scan`

`prepare` has one program per chunk and value head. No exponent in it is positive, whatever the
gates: with one gate per head, the gates between two rows are summed for each pair of rows; with
one per channel, each pair meets in one of six levels of halves, whose products are plain matrix
products. The state never leaves registers in `scan`, which has one program per sequence, head and
tile of value columns; both products with S come from one copy of it.

Bytes per token and value head, 16-bit inputs, K = V = 128, float32 gates, against 4.3 TB/s at
32,768 tokens and 32 heads:

- per channel: reads q, k, v, g 1,284; W, U, P and decayed q, k, twice 1,168; output 256: 3,876
  bytes, 0.95 ms. Gates are applied to q and k once, or each scan step would sum them again.
- per head (16 key, 32 value heads): reads 520; W, U, P and a factor per row, twice 648; q and k
  again 256; output 256: 2,328 bytes, 0.57 ms. Here gates are factors of rows, applied in registers.

The tiles of value columns of a head run side by side, so that W, P, q and k come from L2 for all
but the first.

A sequence of few heads is cut into segments (`segments`): a scan is affine in its first state, so
all segments' maps are found side by side, `combine` applies them in turn, and the usual scan runs
on all segments side by side.
"""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import torch
import triton.language as tl

from prfaas.kernels.arch import Arch, arch_of
from prfaas.kernels.delta.combine_device import combine
from prfaas.kernels.delta.prepare_device import prepare
from prfaas.kernels.delta.scan_device import scan
from prfaas.kernels.delta.segments import SegmentTable, num_segments, segment_table
from prfaas.kernels.delta.tiles import (
    CHUNK,
    combine_tiles,
    padded,
    prepare_tiles,
    scan_tiles,
)
from prfaas.kernels.launch import Launch
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Checkpoints, ChunkTable, Sequences

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@attrs.frozen(kw_only=True, eq=False)
class Inputs:
    """Activations of one call, checked: see `prfaas.kernels.delta_rule`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @property
    def heads(self) -> int:
        return int(self.v.shape[1])

    @property
    def key(self) -> int:
        return int(self.q.shape[2])

    @property
    def value(self) -> int:
        return int(self.v.shape[2])

    @property
    def is_per_channel(self) -> bool:
        return bool(self.g.ndim == 3)


@attrs.frozen(kw_only=True, eq=False)
class Prepared:
    """What `prepare` hands to `scan`, in the inputs' dtype unless said.

    Attributes:
        w, u, p: [num_tokens, heads, K], [.., V] and [.., 64].
        q, k: queries decayed from the chunk's start and keys decayed to its end, both without their
            norms, [num_tokens, heads, K]; with gates per head the inputs themselves.
        factors: float32 [num_chunks, heads, 2, 64], of rows of q and of k: norm, scale, and the
            gates where they are per head.
        decay: float32 [num_chunks, heads] or [num_chunks, heads, K], of the state.
    """

    w: torch.Tensor
    u: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    factors: torch.Tensor
    decay: torch.Tensor


def empty_prepared(inputs: Inputs, num_chunks: int) -> Prepared:
    tokens, heads = inputs.v.shape[:2]

    def empty(*shape: int, dtype: torch.dtype = inputs.v.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=inputs.v.device)

    per_channel = inputs.is_per_channel
    decay = (num_chunks, heads, inputs.key) if per_channel else (num_chunks, heads)
    return Prepared(
        w=empty(tokens, heads, inputs.key),
        u=empty(tokens, heads, inputs.value),
        p=empty(tokens, heads, CHUNK),
        q=empty(tokens, heads, inputs.key) if per_channel else inputs.q,
        k=empty(tokens, heads, inputs.key) if per_channel else inputs.k,
        factors=empty(num_chunks, heads, 2, CHUNK, dtype=torch.float32),
        decay=empty(*decay, dtype=torch.float32),
    )


def _strides(**tensors: torch.Tensor) -> dict[str, int]:
    """``Q_TOKEN`` and ``Q_HEAD`` for ``q``, and so on."""
    return {
        f"{name}_{axis}": tensor.stride(index)
        for name, tensor in tensors.items()
        for index, axis in enumerate(("TOKEN", "HEAD"))
    }


def _dots(arch: Arch, dtype: torch.dtype) -> dict[str, Any]:
    precision = arch.float32_dot if dtype == torch.float32 else "ieee"
    return {"DOT_TYPE": _TYPES[dtype], "DOT_PRECISION": precision}


def prepare_launch(
    arch: Arch,
    inputs: Inputs,
    prepared: Prepared,
    table: ChunkTable,
    *,
    scale: float,
    normalize_qk: bool,
) -> Launch:
    """Fills ``prepared``."""
    per_channel = inputs.is_per_channel
    tiles = prepare_tiles(
        arch, inputs.v.dtype, inputs.key, inputs.value, is_per_channel=inputs.is_per_channel
    )
    return Launch(
        kernel=prepare,
        grid=(table.num_chunks * inputs.heads,),
        arguments={
            "q": inputs.q,
            "k": inputs.k,
            "v": inputs.v,
            "g": inputs.g,
            "beta": inputs.beta,
            "w": prepared.w,
            "u": prepared.u,
            "p": prepared.p,
            "q_decayed": prepared.q if per_channel else None,
            "k_decayed": prepared.k if per_channel else None,
            "factors": prepared.factors,
            "decay": prepared.decay,
            "starts": table.starts,
            "lengths": table.lengths,
            "scale": scale,
        },
        constants={
            "HEADS": inputs.heads,
            "GROUP": inputs.heads // inputs.q.shape[1],
            "K": inputs.key,
            "V": inputs.value,
            "ROWS": CHUNK,
            "LEVELS": CHUNK.bit_length() - 1,
            **_strides(Q=inputs.q, K=inputs.k, V=inputs.v, G=inputs.g, BETA=inputs.beta),
            "IS_PER_CHANNEL": per_channel,
            "IS_NARROW": inputs.v.dtype != torch.float32,
            "NORMALIZES": normalize_qk,
            "BLOCK_K": tiles.key,
            "BLOCK_V": tiles.value,
            "FLOAT32_DOT": arch.float32_dot,
            **_dots(arch, inputs.v.dtype),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def scan_launch(
    arch: Arch,
    inputs: Inputs,
    prepared: Prepared,
    table: ChunkTable,
    segments: SegmentTable | None,
    *,
    initial: torch.Tensor | None,
    output: torch.Tensor | None,
    final: torch.Tensor,
    checkpoints: torch.Tensor | None,
) -> Launch:
    """Runs sequences, or segments from ``initial`` [num_segments, heads, K, V].

    Without ``output``, the maps of all segments but sequences' last ones go to ``final``
    [num_segments, heads, K, V + K]: the state that zeros lead to, and what multiplies a first
    state.
    """
    is_map = output is None
    tiles = scan_tiles(arch, inputs.v.dtype, inputs.key, inputs.value)
    value_tiles = -(-inputs.value // tiles.value)
    all_tiles = value_tiles + (-(-inputs.key // tiles.value) if is_map else 0)
    first_chunks = table.first_chunks if segments is None else segments.first_chunks
    return Launch(
        kernel=scan,
        grid=((first_chunks.shape[0] - 1) * inputs.heads * all_tiles,),
        arguments={
            "q": prepared.q,
            "k": prepared.k,
            "w": prepared.w,
            "u": prepared.u,
            "p": prepared.p,
            "factors": prepared.factors,
            "decay": prepared.decay,
            "initial": initial,
            "output": output,
            "final": final,
            "checkpoints": checkpoints,
            "starts": table.starts,
            "lengths": table.lengths,
            "checkpoint_rows": None if checkpoints is None else table.checkpoint_rows,
            "first_chunks": first_chunks,
            "final_rows": None if segments is None else segments.final_rows,
        },
        constants={
            "HEADS": inputs.heads,
            "GROUP": inputs.heads // prepared.q.shape[1],
            "K": inputs.key,
            "V": inputs.value,
            "ROWS": CHUNK,
            **_strides(Q=prepared.q, K=prepared.k),
            "IS_PER_CHANNEL": inputs.is_per_channel,
            "IS_MAP": is_map,
            "V_TILES": value_tiles,
            "TILES": all_tiles,
            "BLOCK_K": padded(inputs.key),
            "SLAB": tiles.key,
            "BLOCK_V": tiles.value,
            **_dots(arch, inputs.v.dtype),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def combine_launch(
    arch: Arch,
    maps: torch.Tensor,
    initial: torch.Tensor | None,
    states: torch.Tensor,
    segments: SegmentTable,
) -> Launch:
    """Fills ``states`` [num_segments, heads, K, V] with the state before each segment, from the
    ``maps`` of `scan_launch` and the sequences' ``initial`` states."""
    heads, key, value = states.shape[1:]
    tiles = combine_tiles(key, value)
    value_tiles = -(-value // tiles.value)
    return Launch(
        kernel=combine,
        grid=((segments.first_segments.shape[0] - 1) * heads * value_tiles,),
        arguments={
            "maps": maps,
            "initial": initial,
            "states": states,
            "first_segments": segments.first_segments,
        },
        constants={
            "HEADS": heads,
            "K": key,
            "V": value,
            "V_TILES": value_tiles,
            "BLOCK_K": padded(key),
            "SLAB": tiles.key,
            "BLOCK_V": tiles.value,
            "FLOAT32_DOT": arch.float32_dot,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def plan(
    arch: Arch,
    inputs: Inputs,
    table: ChunkTable,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    normalize_qk: bool,
    num_segments: int | None,
) -> tuple[PrefillResult, list[Launch]]:
    """The launches of one call, in order, and the tensors that hold its result after they ran."""

    def states(rows: int, width: int = inputs.value) -> torch.Tensor:
        shape = (rows, inputs.heads, inputs.key, width)
        return torch.empty(shape, dtype=torch.float32, device=inputs.v.device)

    output = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    final, saved = states(table.first_chunks.shape[0] - 1), states(table.num_checkpoints)
    prepared = empty_prepared(inputs, table.num_chunks)
    launches = [
        prepare_launch(arch, inputs, prepared, table, scale=scale, normalize_qk=normalize_qk)
    ]
    count = _segments(arch, inputs, table) if num_segments is None else num_segments
    segments = segment_table(table, count)
    initial = initial_state
    if segments is not None:
        maps = states(segments.num_segments, inputs.value + inputs.key)
        initial = states(segments.num_segments)
        no_output: dict[str, Any] = {"initial": None, "output": None, "checkpoints": None}
        launches += [
            scan_launch(arch, inputs, prepared, table, segments, final=maps, **no_output),
            combine_launch(arch, maps, initial_state, initial, segments),
        ]
    scanned = scan_launch(
        arch,
        inputs,
        prepared,
        table,
        segments,
        initial=initial,
        output=output,
        final=final,
        checkpoints=saved if table.num_checkpoints else None,
    )
    result = PrefillResult(output=output, final_state=final, checkpoints=saved)
    return result, [*launches, scanned]


def _segments(arch: Arch, inputs: Inputs, table: ChunkTable) -> int:
    firsts = table.host.first_chunks
    tiles = scan_tiles(arch, inputs.v.dtype, inputs.key, inputs.value)
    return num_segments(
        num_sequences=len(firsts) - 1,
        heads=inputs.heads,
        value_tiles=-(-inputs.value // tiles.value),
        num_chunks=max((b - a for a, b in itertools.pairwise(firsts)), default=0),
    )


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    sequences: Sequences,
    checkpoints: Checkpoints | None,
    normalize_qk: bool,
    num_segments: int | None,
) -> PrefillResult:
    """`prfaas.kernels.delta_rule` on checked arguments."""
    result, launches = plan(
        arch_of(q.device),
        Inputs(q=q, k=k, v=v, g=g, beta=beta),
        sequences.chunks(CHUNK, q.device, checkpoints),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.contiguous(),
        normalize_qk=normalize_qk,
        num_segments=num_segments,
    )
    for launch in launches:
        launch.run()
    return result
