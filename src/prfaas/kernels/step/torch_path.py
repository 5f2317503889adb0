"""The steps in few torch operations on all heads, states changed in place.

Each function here returns what `prfaas.kernels.step.pool.update_slots` calls with float32 states
[num_rows, heads, ...] and rows of the inputs. A state is read and written as seldom as torch
allows: at the sizes of real models a step costs what it moves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from prfaas.kernels.step.reference import NORM_EPSILON

Advance = Callable[..., torch.Tensor]


def delta_rule(scale: float, normalize_qk: bool) -> Advance:
    """Of `prfaas.kernels.step.delta_rule_step`."""

    def advance(
        states: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        pairs = torch.stack((k, q), 2).float()
        if normalize_qk:
            squares = pairs.square().sum(-1, keepdim=True)
            pairs = pairs * squares.add_(NORM_EPSILON).rsqrt_()
        pairs = _per_value_head(pairs, v.shape[1])  # [rows * heads, 2, key_dim]
        flat = states.flatten(0, 1)
        flat.mul_(g.float().exp().reshape(flat.shape[0], -1, 1))
        # One pass over the state for both products. The token's own part of the output,
        # (q . k) u, is added after, instead of another pass over the updated state.
        from_key, from_query = torch.bmm(pairs, flat).unbind(1)
        key, query = pairs.unbind(1)
        update = v.float().reshape(from_key.shape).sub(from_key)
        update.mul_(beta.float().reshape(-1, 1))
        flat.baddbmm_(key.unsqueeze(2), update.unsqueeze(1))
        own = (key * query).sum(-1, keepdim=True)
        output = torch.addcmul(from_query, own, update).mul_(scale)
        return output.view(v.shape).to(v.dtype)

    return advance


def decay_attention(scale: float) -> Advance:
    """Of `prfaas.kernels.step.decay_attention_step`."""

    def advance(
        states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor
    ) -> torch.Tensor:
        flat = states.flatten(0, 1)
        query, key = (_per_value_head(x.float(), v.shape[1]) for x in (q, k))
        flat.mul_(g.float().exp().reshape(-1, 1, 1))
        flat.baddbmm_(key.unsqueeze(2), v.float().reshape(-1, 1, v.shape[2]))
        return torch.bmm(query.unsqueeze(1), flat).mul_(scale).view(v.shape).to(v.dtype)

    return advance


def ssd(a: torch.Tensor, d: torch.Tensor | None) -> Advance:
    """Of `prfaas.kernels.step.ssd_step`."""

    def advance(
        states: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:
        flat = states.flatten(0, 1)
        row, column = (_per_value_head(value.float(), x.shape[1]) for value in (b, c))
        step, values = dt.float(), x.float()
        flat.mul_((step * a.float()).exp_().reshape(-1, 1, 1))
        scaled = (step.unsqueeze(2) * values).reshape(-1, x.shape[2], 1)
        flat.baddbmm_(scaled, row.unsqueeze(1))
        output = torch.bmm(flat, column.unsqueeze(2)).view(x.shape)
        if d is not None:
            output.addcmul_(d.float().unsqueeze(1), values)
        return output.to(x.dtype)

    return advance


def _per_value_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[rows, key_heads, ...] to [rows * heads, ...]: neighbours share a key head."""
    group = heads // x.shape[1]
    if group == 1:
        return x.flatten(0, 1)
    return x.unsqueeze(2).expand(-1, -1, group, *x.shape[2:]).flatten(0, 2)
