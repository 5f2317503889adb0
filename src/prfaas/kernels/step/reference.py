"""The steps in float64, request by request: slow, and plain enough to be read against the paper.

The pool is updated too: the new state is rounded to its dtype, as the other paths do.
"""

from __future__ import annotations

import torch

from prfaas.kernels.slots import Slots

NORM_EPSILON = 1e-6
"""Added to the sum of squares under the root of `normalize`."""


def normalize(x: torch.Tensor) -> torch.Tensor:
    """Divides the vectors in the last dimension by their L2 norms."""
    squares = (x * x).sum(-1, keepdim=True)
    return x / (squares + NORM_EPSILON).sqrt()


def delta_rule_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: Slots,
    scale: float,
    normalize_qk: bool,
) -> torch.Tensor:
    """Of `prfaas.kernels.step.delta_rule_step`."""
    output = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    group = v.shape[1] // q.shape[1]
    for row, slot in enumerate(slots.ids.tolist()):
        if slot < 0:
            continue
        query, key = q[row].double(), k[row].double()
        if normalize_qk:
            query, key = normalize(query), normalize(key)
        for head in range(v.shape[1]):
            gate = g[row, head].double().reshape(-1, 1)
            state = gate.exp() * pool[slot, head].double()
            key_of_head = key[head // group]
            update = beta[row, head].double() * (v[row, head].double() - state.T @ key_of_head)
            state = state + torch.outer(key_of_head, update)
            pool[slot, head] = state.to(pool.dtype)
            output[row, head] = scale * (state.T @ query[head // group])
    return output


def decay_attention_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    pool: torch.Tensor,
    slots: Slots,
    scale: float,
) -> torch.Tensor:
    """Of `prfaas.kernels.step.decay_attention_step`; g is [num_requests, heads]."""
    output = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    group = v.shape[1] // q.shape[1]
    for row, slot in enumerate(slots.ids.tolist()):
        if slot < 0:
            continue
        for head in range(v.shape[1]):
            query, key = q[row, head // group].double(), k[row, head // group].double()
            state = g[row, head].double().exp() * pool[slot, head].double()
            state = state + torch.outer(key, v[row, head].double())
            pool[slot, head] = state.to(pool.dtype)
            output[row, head] = scale * (state.T @ query)
    return output


def ssd_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    pool: torch.Tensor,
    slots: Slots,
) -> torch.Tensor:
    """Of `prfaas.kernels.step.ssd_step`."""
    output = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    group = x.shape[1] // b.shape[1]
    for row, slot in enumerate(slots.ids.tolist()):
        if slot < 0:
            continue
        for head in range(x.shape[1]):
            step, value = dt[row, head].double(), x[row, head].double()
            state = (step * a[head].double()).exp() * pool[slot, head].double()
            state = state + torch.outer(step * value, b[row, head // group].double())
            pool[slot, head] = state.to(pool.dtype)
            output[row, head] = state @ c[row, head // group].double()
            if d is not None:
                output[row, head] += d[head].double() * value
    return output
