"""The gated delta rule over whole prompts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prfaas.errors import ConfigError
from prfaas.kernels import dispatch
from prfaas.kernels.arguments import check_finite_number, check_multiple, check_tensor
from prfaas.kernels.delta import batched, reference
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Checkpoints, Sequences

MAX_HEAD_DIM = 256
"""Largest key or value dimension of the Triton kernels."""


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: Sequences | Iterable[int] | None = None,
    checkpoints: Checkpoints | None = None,
    normalize_qk: bool = False,
    num_segments: int | None = None,
    path: str | None = None,
) -> PrefillResult:
    """Runs the gated delta rule over a packed batch of sequences.

    Per head, from the initial state S, for each token::

        S = diag(exp(g)) S
        u = beta (v - S^T k)
        S = S + k u^T
        output = scale * S^T q

    This is Gated DeltaNet (arXiv:2412.06464) with one decay per head, and Kimi Delta Attention
    (arXiv:2510.26692) with one per channel of the key. Value head ``h`` reads query and key head
    ``h // (Hv // Hk)``. Inputs are widened to float32, and so are sums and states. There are no
    gradients.

    Args:
        q: [num_tokens, Hk, K] queries, float32, bfloat16 or float16; the last dimension contiguous,
            other strides free, as for all of these.
        k: [num_tokens, Hk, K] keys, dtype of ``q``; of norm 1 at most, or the state may grow
            without bound: see ``normalize_qk``.
        v: [num_tokens, Hv, V] values, dtype of ``q``; ``Hv`` is a multiple of ``Hk``.
        g: natural logarithm of the decay, finite, at most 0 (not looked at), as low as you like:
            [num_tokens, Hv] for one decay per head, [num_tokens, Hv, K] for one per channel.
        beta: [num_tokens, Hv] write strength, 0 to 2.
        scale: factor of the output; None for ``K ** -0.5``.
        initial_state: [num_sequences, Hv, K, V], float32, bfloat16 or float16; None for zeros.
        cu_seqlens: 0, then the end of each sequence; None for one sequence.
        checkpoints: per sequence, the positions after which the state is wanted too: tokens of this
            call, rising, from 1 to the sequence's length.
        normalize_qk: replace each query and key x by ``x / sqrt(sum(x^2) + 1e-6)``.
        num_segments: how many parts of a long sequence the Triton path runs side by side: None for
            its own rule, 1 for one after another. A matter of speed; the other paths ignore it.
        path: ``"reference"`` (float64, results too), ``"torch"``, ``"triton"``; None for the rule
            of `prfaas.kernels.dispatch`.

    Raises:
        ConfigError: an argument does not fit; it is named.
        MissingExtra: ``path="triton"`` without triton.
    """
    key_dim, value_dim = _check_shapes(q, k, v, g, beta)
    sequences = Sequences.of(cu_seqlens, q.shape[0])
    wanted = sequences.check_checkpoints(checkpoints)
    if initial_state is not None:
        shape = (sequences.num_sequences, v.shape[1], key_dim, value_dim)
        check_tensor("initial_state", initial_state, shape=shape, device=q.device)
    if num_segments is not None and (type(num_segments) is not int or num_segments < 1):
        raise ConfigError(
            f"num_segments is {num_segments!r}; use a whole number of at least 1, or None"
        )
    factor = key_dim**-0.5 if scale is None else check_finite_number("scale", scale)
    refusal = None
    if max(key_dim, value_dim) > MAX_HEAD_DIM:
        refusal = f"heads of {key_dim} and {value_dim}, at most {MAX_HEAD_DIM} fit"
    chosen = dispatch.choose("delta_rule", q.device, path, refusal=refusal)
    with torch.no_grad():
        if chosen is dispatch.Path.TRITON:
            from prfaas.kernels.delta.launches import run

            return run(
                q,
                k,
                v,
                g,
                beta,
                scale=factor,
                initial_state=initial_state,
                sequences=sequences,
                checkpoints=wanted,
                normalize_qk=normalize_qk,
                num_segments=num_segments,
            )
        plain = reference.run if chosen is dispatch.Path.REFERENCE else batched.run
        return plain(
            q,
            k,
            v,
            g,
            beta,
            scale=factor,
            initial_state=initial_state,
            sequences=sequences,
            checkpoints=wanted,
            normalize_qk=normalize_qk,
        )


def _check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[int, int]:
    check_tensor("q", q, shape=("num_tokens", "Hk", "K"))
    num_tokens, key_heads, key_dim = q.shape
    same = {"dtypes": (q.dtype,), "device": q.device}
    check_tensor("k", k, shape=(num_tokens, key_heads, key_dim), **same)
    check_tensor("v", v, shape=(num_tokens, "Hv", "V"), **same)
    value_heads, value_dim = v.shape[1:]
    check_multiple("v", value_heads, "q", key_heads)
    is_per_channel = isinstance(g, torch.Tensor) and g.ndim == 3
    gate_shape = (num_tokens, value_heads, key_dim) if is_per_channel else (num_tokens, value_heads)
    check_tensor("g", g, shape=gate_shape, device=q.device)
    check_tensor("beta", beta, shape=(num_tokens, value_heads), device=q.device)
    return key_dim, value_dim
