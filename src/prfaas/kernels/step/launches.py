"""Launches of the decode steps. Imports triton: import it where a kernel is launched."""

from __future__ import annotations

import math

import torch
import triton

from prfaas.kernels.arch import Arch
from prfaas.kernels.launch import Launch
from prfaas.kernels.step import step_device

COLUMNS = 32
"""Value columns of a program: 128 bytes of a float32 row, the unit that memory moves. Few columns
also mean many programs, which a batch of one request needs to keep a GPU busy."""

TILE = 4096
"""Elements of a tile of `ssd_launch`, whose rows are whole."""

ELEMENTS_PER_THREAD = 32


def num_warps(arch: Arch, elements: int) -> int:
    """Warps for a tile. There are never more threads than elements: two threads that load the same
    element of a state could do so before and after its store."""
    return min(8, max(1, elements // (ELEMENTS_PER_THREAD * arch.warp_size)))


def stride(tensor: torch.Tensor, axis: int) -> int:
    """The stride of a dimension; where it has one element, what it would be if it were contiguous,
    so that one program serves whatever number torch keeps there."""
    if tensor.shape[axis] > 1:
        return int(tensor.stride(axis))
    return math.prod(tensor.shape[axis + 1 :])


def recurrent_launch(
    arch: Arch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    normalize_qk: bool,
) -> Launch:
    """The delta rule, or without ``beta`` linear attention with decay. Shapes as in
    `prfaas.kernels.step.delta_rule_step`; ``output`` is contiguous."""
    requests, heads, value_dim = v.shape
    key_dim = q.shape[2]
    tile_rows = max(16, triton.next_power_of_2(key_dim))
    tile_columns = min(COLUMNS, max(16, triton.next_power_of_2(value_dim)))
    return Launch(
        kernel=step_device.recurrent_step,
        grid=(requests * heads, triton.cdiv(value_dim, tile_columns)),
        arguments={
            "q": q,
            "k": k,
            "v": v,
            "g": g,
            "beta": beta,
            "pool": pool,
            "slots": slots,
            "output": output,
            "scale": float(scale),
        },
        constants={
            "Q_ROW": stride(q, 0),
            "Q_HEAD": stride(q, 1),
            "K_ROW": stride(k, 0),
            "K_HEAD": stride(k, 1),
            "V_ROW": stride(v, 0),
            "V_HEAD": stride(v, 1),
            "G_ROW": stride(g, 0),
            "G_HEAD": stride(g, 1),
            "BETA_ROW": 0 if beta is None else stride(beta, 0),
            "BETA_HEAD": 0 if beta is None else stride(beta, 1),
            "SLOT": stride(pool, 0),
            "HEADS": heads,
            "GROUP": heads // q.shape[1],
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "BK": tile_rows,
            "BV": tile_columns,
            "IS_DELTA": beta is not None,
            "PER_CHANNEL": g.ndim == 3,
            "NORMALIZE": normalize_qk,
        },
        num_warps=num_warps(arch, tile_rows * tile_columns),
        num_stages=1,
    )


def ssd_launch(
    arch: Arch,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    pool: torch.Tensor,
    slots: torch.Tensor,
    output: torch.Tensor,
) -> Launch:
    """Shapes as in `prfaas.kernels.step.ssd_step`; ``output`` is contiguous."""
    requests, heads, head_dim = x.shape
    state_dim = b.shape[2]
    tile_columns = max(16, triton.next_power_of_2(state_dim))
    tile_rows = min(max(16, triton.next_power_of_2(head_dim)), TILE // tile_columns)
    return Launch(
        kernel=step_device.ssd_step,
        grid=(requests * heads, triton.cdiv(head_dim, tile_rows)),
        arguments={
            "x": x,
            "dt": dt,
            "a": a,
            "b": b,
            "c": c,
            "d": d,
            "pool": pool,
            "slots": slots,
            "output": output,
        },
        constants={
            "X_ROW": stride(x, 0),
            "X_HEAD": stride(x, 1),
            "DT_ROW": stride(dt, 0),
            "DT_HEAD": stride(dt, 1),
            "A_HEAD": stride(a, 0),
            "B_ROW": stride(b, 0),
            "B_GROUP": stride(b, 1),
            "C_ROW": stride(c, 0),
            "C_GROUP": stride(c, 1),
            "D_HEAD": 0 if d is None else stride(d, 0),
            "SLOT": stride(pool, 0),
            "HEADS": heads,
            "GROUP": heads // b.shape[1],
            "HEAD_DIM": head_dim,
            "STATE_DIM": state_dim,
            "BP": tile_rows,
            "BN": tile_columns,
        },
        num_warps=num_warps(arch, tile_rows * tile_columns),
        num_stages=1,
    )
