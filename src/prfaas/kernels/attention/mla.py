"""Decode of multi-head latent attention over a paged cache of latents."""

from __future__ import annotations

import functools

import torch

from prfaas.kernels.arch import arch_of
from prfaas.kernels.arguments import check_tensor
from prfaas.kernels.attention import caches
from prfaas.kernels.attention.gathered import gathered_decode
from prfaas.kernels.attention.reference import attention_reference
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.page_table import PageTable
from prfaas.kernels.sequences import Sequences

LARGEST_LATENT = 512
LARGEST_ROPE = 128
"""Largest parts of a cache row that the Triton kernel takes."""


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: PageTable,
    *,
    scale: float,
    num_splits: int | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Attention of the newest token of each request over latents, with absorbed projections.

    All heads share one key per token, ``[latent | rope]``, and its latent part is the value too
    (multi-head latent attention, arXiv 2405.04434, with the key projection folded into the query):
    ``logits = scale * (q_latent . latent + q_rope . rope)``. The result is still in the latent
    space; the value projection comes after. Each cache row is read once per block of heads.

    Args:
        q_latent: [num_requests, heads, latent_dim], the query times the key projection.
        q_rope: [num_requests, heads, rope_dim], the rotated part. Last dimensions contiguous.
        latent_cache: [num_pages, page_size, latent_dim + rope_dim], latent first; last dimension
            contiguous, other strides free. All three have one dtype.
        page_table: pages of each request, made for this cache. A request with nothing in the cache
            gives zeros.
        scale: factor of the logits, positive. It belongs to the head dimension before the
            absorption, so there is no default.
        num_splits: as in `paged_decode`.
        path: as in `paged_decode`. The kernel takes latents up to 512 and rope parts up to 128.

    Returns:
        [num_requests, heads, latent_dim] in ``q_latent``'s dtype (float64 from the reference).

    Raises:
        ConfigError: an argument that does not fit the others.
    """
    _check(q_latent, q_rope, latent_cache, page_table)
    factor = caches.check_positive("scale", scale)
    caches.check_splits(num_splits)
    latent, rope = q_latent.shape[2], q_rope.shape[2]
    refusal = None
    if latent > LARGEST_LATENT or rope > LARGEST_ROPE:
        refusal = (
            f"latents of {latent} and rope parts of {rope} elements; at most {LARGEST_LATENT} and "
            f"{LARGEST_ROPE} fit"
        )
    chosen = choose("mla_decode", q_latent.device, path, refusal=refusal)
    if chosen is Path.TRITON:
        from prfaas.kernels.attention.launches import mla_launches

        return mla_launches(
            arch_of(q_latent.device),
            q_latent,
            q_rope,
            latent_cache,
            page_table,
            scale=factor,
            num_splits=num_splits,
        ).run()
    q = torch.cat((q_latent, q_rope), -1)
    keys = latent_cache[:, :, None]
    values = keys[..., :latent]
    if chosen is Path.REFERENCE:
        single = Sequences.of_lengths([1] * q.shape[0])
        return attention_reference(q, keys, values, page_table, single, scale=factor, window=None)
    return gathered_decode(q, keys, None, page_table, scale=factor, window=None)[..., :latent]


def _check(
    q_latent: torch.Tensor, q_rope: torch.Tensor, latent_cache: torch.Tensor, table: PageTable
) -> None:
    check_tensor("q_latent", q_latent, shape=("num_requests", "heads", "latent_dim"))
    requests, heads, latent = q_latent.shape
    check = functools.partial(check_tensor, dtypes=(q_latent.dtype,), device=q_latent.device)
    check("q_rope", q_rope, shape=(requests, heads, "rope_dim"))
    row = latent + q_rope.shape[2]
    check("latent_cache", latent_cache, shape=("num_pages", "page_size", row))
    caches.check_pages(table, latent_cache, "latent_cache")
    caches.check_requests(table, requests, "q_latent")
