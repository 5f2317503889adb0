"""What is computed inside of chunks, before anything passes from one chunk to the next."""

from __future__ import annotations

import math

import attrs
import torch

from prfaas.kernels.delta.reference import NORM_EPSILON

STRONG = -70.0
"""A sum of gates over a chunk under which decays may be subnormal numbers, with which processors
are many times slower."""

NOTHING = 1e-18
SMALL_INPUT = 1e-6
"""In chunks with strong gates, factors up to this are set to 0: then no product of two of them is
subnormal, and no float32 sum with anything of their size before decay can tell."""


@attrs.frozen(kw_only=True, eq=False)
class Chunks:
    """Chunks of one group, for ``N`` chunks and heads, ``C`` rows each; all float32.

    With the incoming state S of a chunk::

        x = values - decayed_keys S;     u = inverse x
        output = decayed_queries S + scores u
        S = decay * S + trailing_keys^T u

    Attributes:
        keys_queries: [N, C, 2, K], decayed keys and queries, alternating.
        trailing_keys: [N, C, K], keys times the decay from their token to the chunk's end.
        decay: [N, K or 1, 1], of the whole chunk.
        inverse: [N, C, C], (1 + strictly lower part of diag(beta) keys keys^T)^-1 diag(beta), with
            decays between the tokens.
        scores: [N, C, C], products of queries with keys up to their own, with decays.
    """

    keys_queries: torch.Tensor
    trailing_keys: torch.Tensor
    decay: torch.Tensor
    inverse: torch.Tensor
    scores: torch.Tensor


def inverse_norms(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., 1]: the last dimension times this has norm 1, nearly, or 0."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return length.square_().add_(NORM_EPSILON).rsqrt_()


def prepare(keys_queries: torch.Tensor, gates: torch.Tensor, beta: torch.Tensor) -> Chunks:
    """From float32 keys and queries [N, C, 2, K], gates [N, C] or [N, C, K], and beta [N, C].
    Keys, queries and gates are overwritten."""
    inner = _per_channel if gates.ndim == 3 else _per_head
    trailing, decay, products = inner(keys_queries, gates)
    inverse = torch.linalg.solve_triangular(
        products[0].mul_(beta[:, :, None]),
        torch.diag_embed(beta),
        upper=False,
        unitriangular=True,
    )
    return Chunks(
        keys_queries=keys_queries,
        trailing_keys=trailing,
        decay=decay,
        inverse=inverse,
        scores=products[1],
    )


def _is_strong(sums: torch.Tensor) -> bool:
    return sums.device.type == "cpu" and bool((sums < STRONG).any())


def _exp(logarithms: torch.Tensor, is_strong: bool) -> torch.Tensor:
    """In place."""
    if is_strong:
        torch.threshold_(logarithms, math.log(NOTHING), -math.inf)
    return logarithms.exp_()


def _per_head(
    keys_queries: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, size = gates.shape
    # Differences of sums: in float32, one strong gate would cost the pairs after it their digits.
    sums = gates.cumsum(1, dtype=torch.float64)
    between = torch.empty((count, size, size), device=gates.device)
    torch.sub(sums[:, :, None], sums[:, None, :], out=between)
    is_strong = _is_strong(sums[:, -1])
    between = _exp(between, is_strong).tril_()  # infinite above the diagonal, maybe: not multiplied
    decays = _exp(sums.float(), is_strong)
    keys = keys_queries[:, :, 0]
    products = torch.empty((2, count, size, size), device=gates.device)
    torch.bmm(keys, keys.mT, out=products[0])
    torch.bmm(keys_queries[:, :, 1], keys.mT, out=products[1])
    products.mul_(between)
    trailing = keys * between[:, -1, :, None]
    keys_queries.mul_(decays[:, :, None, None])
    return trailing, decays[:, -1:, None], products


def _per_channel(
    keys_queries: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of blocks of 1, 2, 4... rows: the decay from a row of the first block to one of the
    second is that to the end of the first times that from there. Both are products of decays, so
    no gate is too strong, and none is lost in a sum with another."""
    count, size, _, dim = keys_queries.shape
    # What is made 0 holds keys and queries too: only where these are not that small themselves.
    is_strong = _is_strong(gates.sum(1)) and bool(
        (keys_queries.abs().amax((0, 1, 3)) > SMALL_INPUT).all()
    )
    total = _exp(gates, is_strong)
    trailing = keys_queries[:, :, 0].contiguous()
    products = torch.zeros((2, count, size, size), device=gates.device)
    own = torch.linalg.vecdot(keys_queries[:, :, 1], trailing)
    products[1].diagonal(dim1=1, dim2=2).copy_(own)
    keys_queries.mul_(total[:, :, None])
    half = 1
    while half < size:
        pairs = size // (2 * half)
        later = keys_queries.view(count * pairs, 4 * half, dim)[:, 2 * half :]
        earlier = trailing.view(count * pairs, 2 * half, dim)[:, :half]
        block = torch.bmm(later, earlier.mT).view(count, pairs, half, 2, half)
        target = products.view(2, count, pairs, 2 * half, pairs, 2 * half)
        target = target.diagonal(dim1=2, dim2=4)[:, :, half:, :half]
        target.copy_(block.permute(3, 0, 2, 4, 1))
        total = total.view(count, pairs, 2, dim)
        first, second = total[:, :, 0], total[:, :, 1]
        later.view(count, pairs, 2 * half, dim).mul_(first[:, :, None])
        earlier.view(count, pairs, half, dim).mul_(second[:, :, None])
        total = first * second
        if is_strong:
            for factors in (later, earlier, total):
                torch.hardshrink(factors, NOTHING, out=factors)
        half *= 2
    if is_strong:
        torch.hardshrink(products, NOTHING, out=products)
    return trailing, total.view(count, dim, 1), products
