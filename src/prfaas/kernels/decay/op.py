"""Attention whose state decays by one number per head: Lightning and other simple decays."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prfaas.kernels.arguments import check_finite_number, check_multiple, check_tensor
from prfaas.kernels.decay.batched import run_batched
from prfaas.kernels.decay.problem import DecayProblem
from prfaas.kernels.decay.reference import run_reference
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Checkpoints, Sequences

MAX_KEY_DIM = 256
"""The kernel keeps all key channels of a state in registers."""


def decay_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: Sequences | Iterable[int] | None = None,
    checkpoints: Checkpoints | None = None,
    path: str | None = None,
) -> PrefillResult:
    """Linear attention with a decay, over a packed batch of prompts.

    Per value head, with state S [K, V]: ``S_t = e^{g_t} S_{t-1} + k_t v_t^T`` and
    ``o_t = scale * q_t S_t``. With a constant g per head this is Lightning attention (Qin et al.,
    arXiv 2401.04658; MiniMax-01, arXiv 2501.08313), whose decays `lightning_log_decay` gives; with
    g = 0 it is plain causal linear attention without a normaliser. Sums are in float32, and so are
    states. Neither q nor k is normalised here.

    Args:
        q, k: [num_tokens, Hk, K], float32, bfloat16 or float16. Rows of the last dimension are
            adjacent, other strides are free.
        v: [num_tokens, Hv, V], the dtype of q; Hv is a multiple of Hk, and value head h reads
            query and key head ``h // (Hv // Hk)``.
        g: log decay, natural logarithm, at most 0, any float dtype and strides: [Hv] constant, or
            [num_tokens, Hv]. Its sign is
            not looked at (that would wait for the device); above 0 the result is undefined. Below
            -100 it counts as a full reset.
        scale: factor of q; ``K ** -0.5`` if None.
        initial_state: [num_sequences, Hv, K, V] before the first token, any float dtype and
            strides; zeros if None. It is not written.
        cu_seqlens: how the batch is cut, a `Sequences` or offsets; one sequence if None.
        checkpoints: per sequence, positions after which the state is wanted.
        path: see `prfaas.kernels.dispatch`. The Triton kernel takes K up to 256.

    Returns:
        output [num_tokens, Hv, V] in the dtype of v; states float32 [.., Hv, K, V]. The reference
        path returns float64.

    Raises:
        ConfigError: an argument does not fit the others.
    """
    device = _check_activations(q, k, v)
    num_tokens, num_heads, value_dim = v.shape
    is_constant = isinstance(g, torch.Tensor) and g.ndim == 1
    gate_shape: tuple[int, ...] = (num_heads,) if is_constant else (num_tokens, num_heads)
    check_tensor("g", g, shape=gate_shape, device=device, contiguous="no")
    sequences = Sequences.of(cu_seqlens, num_tokens)
    check_initial_state(
        initial_state, (sequences.num_sequences, num_heads, k.shape[2], value_dim), device
    )
    problem = DecayProblem(
        q=q,
        k=k,
        v=v,
        gate=g,
        scale=k.shape[2] ** -0.5 if scale is None else check_finite_number("scale", scale),
        initial=initial_state,
        sequences=sequences,
        checkpoints=sequences.check_checkpoints(checkpoints),
    )
    return run("decay_attention", problem, path, key_dim_name="K")


def _check_activations(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.device:
    check_tensor("v", v, shape=("num_tokens", "Hv", "V"))
    num_tokens = v.shape[0]
    check_tensor("k", k, shape=(num_tokens, "Hk", "K"), dtypes=(v.dtype,), device=v.device)
    check_tensor("q", q, shape=tuple(k.shape), dtypes=(v.dtype,), device=v.device)
    check_multiple("v", v.shape[1], "k", k.shape[1])
    return v.device


def check_initial_state(
    value: torch.Tensor | None, shape: tuple[int, ...], device: torch.device
) -> None:
    """Refuses an initial state of another shape or device."""
    if value is not None:
        check_tensor("initial_state", value, shape=shape, device=device, contiguous="no")


def run(op: str, problem: DecayProblem, path: str | None, *, key_dim_name: str) -> PrefillResult:
    """Runs a checked problem on the path that the rule chooses."""
    refusal = None
    if problem.key_dim > MAX_KEY_DIM:
        refusal = f"{key_dim_name} is {problem.key_dim}, at most {MAX_KEY_DIM} fit"
    chosen = choose(op, problem.v.device, path, refusal=refusal)
    if chosen is Path.REFERENCE:
        return run_reference(problem)
    if chosen is Path.TORCH:
        return run_batched(problem)
    from prfaas.kernels.decay.launches import run_kernel

    return run_kernel(problem)
