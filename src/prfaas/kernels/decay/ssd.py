"""Mamba2's state space layer, without its convolution and norm."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch

from prfaas.kernels.arguments import check_multiple, check_tensor
from prfaas.kernels.decay.op import check_initial_state, run
from prfaas.kernels.decay.problem import DecayProblem
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Checkpoints, Sequences


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: Sequences | Iterable[int] | None = None,
    checkpoints: Checkpoints | None = None,
    path: str | None = None,
) -> PrefillResult:
    """The state space duality layer of Mamba2 (Dao and Gu, arXiv 2405.21060), packed prompts.

    Per head, with state h [P, N]: ``h_t = e^{dt_t A} h_{t-1} + (dt_t x_t) B_t^T`` and
    ``y_t = h_t C_t + D x_t``. This is `decay_attention` with q = C, k = B, v = dt x, g = dt A and
    the state transposed; dt and D are applied inside of the same pass over x.

    Args:
        x: [num_tokens, H, P], float32, bfloat16 or float16. Rows of the last dimension are
            adjacent, other strides are free: x, B and C may be views of the convolution's output.
        dt: [num_tokens, H], any float dtype and strides, step sizes after bias, softplus and
            limits, at least 0 (not looked at).
        A: [H], any float dtype and strides, below 0 (not looked at): ``-exp(A_log)`` of the
            checkpoint.
        B, C: [num_tokens, G, N], the dtype of x; H is a multiple of G, and head h reads group
            ``h // (H // G)``.
        D: [H], any float dtype and strides, or None.
        initial_state: [num_sequences, H, P, N], the layout of Mamba's own caches, any float dtype
            and strides; zeros if None. It is not written.
        cu_seqlens: how the batch is cut, a `Sequences` or offsets; one sequence if None.
        checkpoints: per sequence, positions after which the state is wanted.
        path: see `prfaas.kernels.dispatch`. The Triton kernel takes N up to 256.

    Returns:
        output [num_tokens, H, P] in the dtype of x; states float32 [.., H, P, N]. The reference
        path returns float64.

    Raises:
        ConfigError: an argument does not fit the others.
    """
    check_tensor("x", x, shape=("num_tokens", "H", "P"))
    (num_tokens, num_heads, head_dim), device = x.shape, x.device
    check_tensor("B", B, shape=(num_tokens, "G", "N"), dtypes=(x.dtype,), device=device)
    check_tensor("C", C, shape=tuple(B.shape), dtypes=(x.dtype,), device=device)
    check_multiple("x", num_heads, "B", B.shape[1])
    check_tensor("dt", dt, shape=(num_tokens, num_heads), device=device, contiguous="no")
    check_tensor("A", A, shape=(num_heads,), device=device, contiguous="no")
    if D is not None:
        check_tensor("D", D, shape=(num_heads,), device=device, contiguous="no")
    sequences = Sequences.of(cu_seqlens, num_tokens)
    check_initial_state(
        initial_state, (sequences.num_sequences, num_heads, head_dim, B.shape[2]), device
    )
    problem = DecayProblem(
        q=C,
        k=B,
        v=x,
        gate=dt,
        rate=A,
        skip=D,
        scale=1.0,
        initial=None if initial_state is None else initial_state.mT,
        is_value_first=True,
        sequences=sequences,
        checkpoints=sequences.check_checkpoints(checkpoints),
    )
    made = run("ssd", problem, path, key_dim_name="N")
    return attrs.evolve(made, final_state=made.final_state.mT, checkpoints=made.checkpoints.mT)
