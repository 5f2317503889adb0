"""Linear attention with a decay per head (lightning attention), one token per request."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prfaas.kernels.arch import arch_of
from prfaas.kernels.arguments import check_finite_number, check_multiple, check_tensor
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.slots import Slots
from prfaas.kernels.step import reference, torch_path
from prfaas.kernels.step.delta_rule import refusal_of
from prfaas.kernels.step.pool import check_pool, update_slots


def decay_attention_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    *,
    state_pool: torch.Tensor,
    slots: Slots | Iterable[int],
    scale: float | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Advances each request's state by one token and reads it out, in place in its slot.

    Per value head, with the state S [key_dim, value_dim] of the slot (arXiv 2401.04658)::

        S = e^g S + k v^T;   o = scale S^T q

    A request's first call is a prefill: a step has no way to start from zeros.

    Args:
        q, k: [num_requests, key_heads, key_dim]; value head h uses key head
            ``h // (value_heads // key_heads)``.
        v: [num_requests, value_heads, value_dim], same dtype.
        g: natural-log decay, at most 0: [value_heads], or [num_requests, value_heads].
        state_pool: [num_slots, value_heads, key_dim, value_dim], any stride between slots, updated
            in place. Slots that are not named are neither read nor written.
        slots: slot of each request; -1 is a padding row, whose output is zeros.
        scale: of the output; ``key_dim ** -0.5`` if None.
        path: see `prfaas.kernels.dispatch`.

    Returns:
        [num_requests, value_heads, value_dim] in the dtype of ``v``; float64 from the reference.

    Raises:
        ConfigError: an argument does not fit; nothing was changed.
    """
    check_tensor("v", v, shape=("num_requests", "value_heads", "value_dim"))
    requests, heads, value_dim = v.shape
    same = {"dtypes": (v.dtype,), "device": v.device}
    check_tensor("q", q, shape=(requests, "key_heads", "key_dim"), **same)
    check_tensor("k", k, shape=tuple(q.shape), **same)
    check_multiple("v", heads, "q", q.shape[1])
    key_dim = q.shape[2]
    is_per_request = isinstance(g, torch.Tensor) and g.ndim == 2
    gate_shape = (requests, heads) if is_per_request else (heads,)
    check_tensor("g", g, shape=gate_shape, device=v.device, contiguous="no")
    check_pool(state_pool, (heads, key_dim, value_dim), v.device)
    where = Slots.of(slots, state_pool, requests)
    factor = key_dim**-0.5 if scale is None else check_finite_number("scale", scale)
    gate = g.expand(requests, heads)

    chosen = choose("decay_attention_step", v.device, path, refusal=refusal_of(key_dim))
    with torch.no_grad():
        if chosen is Path.REFERENCE:
            return reference.decay_attention_step(q, k, v, gate, state_pool, where, factor)
        if chosen is Path.TRITON:
            from prfaas.kernels.step.launches import recurrent_launch

            output = torch.empty((requests, heads, value_dim), dtype=v.dtype, device=v.device)
            recurrent_launch(
                arch_of(v.device),
                *(q, k, v, gate, None, state_pool, where.ids, output),
                scale=factor,
                normalize_qk=False,
            ).run()
            return output
        advance = torch_path.decay_attention(factor)
        return update_slots(state_pool, where, (q, k, v, gate), v, advance)
