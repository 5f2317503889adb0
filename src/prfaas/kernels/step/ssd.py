"""The state-space recurrence of Mamba-2, one token per request."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prfaas.kernels.arch import arch_of
from prfaas.kernels.arguments import check_multiple, check_tensor
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.slots import Slots
from prfaas.kernels.step import reference, torch_path
from prfaas.kernels.step.pool import check_pool, update_slots

MAX_STATE_DIM = 256
"""A program of the kernel holds whole rows of the state."""


def ssd_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    state_pool: torch.Tensor,
    slots: Slots | Iterable[int],
    path: str | None = None,
) -> torch.Tensor:
    """Advances each request's state by one token and reads it out, in place in its slot.

    Per head, with the state S [head_dim, state_dim] of the slot (arXiv 2405.21060)::

        S = e^(dt A) S + dt x B^T;   y = S C + D x

    A request's first call is a prefill: a step has no way to start from zeros.

    Args:
        x: [num_requests, heads, head_dim].
        dt: step sizes after their bias and softplus, [num_requests, heads].
        A: [heads], negative.
        B, C: [num_requests, groups, state_dim], dtype of ``x``; head h uses group
            ``h // (heads // groups)``.
        D: weight of the skip, [heads]; None for no skip.
        state_pool: [num_slots, heads, head_dim, state_dim], any stride between slots, updated in
            place. Slots that are not named are neither read nor written.
        slots: slot of each request; -1 is a padding row, whose output is zeros.
        path: see `prfaas.kernels.dispatch`.

    Returns:
        [num_requests, heads, head_dim] in the dtype of ``x``; float64 from the reference.

    Raises:
        ConfigError: an argument does not fit; nothing was changed.
    """
    check_tensor("x", x, shape=("num_requests", "heads", "head_dim"))
    requests, heads, head_dim = x.shape
    same = {"dtypes": (x.dtype,), "device": x.device}
    check_tensor("dt", dt, shape=(requests, heads), device=x.device, contiguous="no")
    check_tensor("A", A, shape=(heads,), device=x.device, contiguous="no")
    check_tensor("B", B, shape=(requests, "groups", "state_dim"), **same)
    check_tensor("C", C, shape=tuple(B.shape), **same)
    check_multiple("x", heads, "B", B.shape[1])
    if D is not None:
        check_tensor("D", D, shape=(heads,), device=x.device, contiguous="no")
    state_dim = B.shape[2]
    check_pool(state_pool, (heads, head_dim, state_dim), x.device)
    where = Slots.of(slots, state_pool, requests)

    refusal = None
    if state_dim > MAX_STATE_DIM:
        refusal = f"state_dim is {state_dim}, at most {MAX_STATE_DIM} fit"
    chosen = choose("ssd_step", x.device, path, refusal=refusal)
    with torch.no_grad():
        if chosen is Path.REFERENCE:
            return reference.ssd_step(x, dt, A, B, C, D, state_pool, where)
        if chosen is Path.TRITON:
            from prfaas.kernels.step.launches import ssd_launch

            output = torch.empty((requests, heads, head_dim), dtype=x.dtype, device=x.device)
            ssd_launch(arch_of(x.device), x, dt, A, B, C, D, state_pool, where.ids, output).run()
            return output
        return update_slots(state_pool, where, (x, dt, B, C), x, torch_path.ssd(A, D))
