"""Latent attention of one new token per request, on every path that runs here."""

from __future__ import annotations

import pytest
import torch

from attention_cases import PagedCase, paged_case, random_queries
from kernel_paths import PATHS, TOLERANCE, relative_error
from prfaas.errors import ConfigError
from prfaas.kernels.attention import mla_decode


def latent_case(lens: tuple[int, ...], latent: int, rope: int, **options: object) -> PagedCase:
    """Rows of the pool are the latent, then the rope part."""
    return paged_case(lens, key=latent, value=rope, **options)


def check(
    case: PagedCase,
    path: str,
    *,
    heads: int = 2,
    tolerance: float | None = None,
    query_factor: float = 1.0,
    **options: object,
) -> torch.Tensor:
    """Runs both paths on random queries, compares, and checks the poison."""
    dtype, requests = case.keys.dtype, case.table.num_requests
    q_latent, q_rope = (
        random_queries(
            requests, heads, part.shape[-1], dtype=dtype, seed=seed, memory=case.memory
        ).mul_(query_factor)
        for seed, part in enumerate((case.keys, case.values), 1)
    )
    options.setdefault("scale", 0.1)
    arguments = (q_latent, q_rope, case.rows, case.table)
    truth = mla_decode(*arguments, **options, path="reference")
    got = mla_decode(*arguments, **options, path=path)
    assert got.dtype == dtype
    assert got.shape == truth.shape == q_latent.shape
    assert relative_error(got, truth) < (tolerance or TOLERANCE[dtype])
    case.memory.check()
    return got


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "num_splits"),
    [
        *((torch.float32, splits) for splits in (1, 2, 5)),
        (torch.bfloat16, 3),
        (torch.float16, 3),
    ],
)
def test_splits_give_the_same(path: str, dtype: torch.dtype, num_splits: int) -> None:
    case = latent_case((100, 17, 0), 32, 16, dtype=dtype)
    got = check(case, path, num_splits=num_splits)
    assert (got[2] == 0).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("page_size", [1, 17, 64])
def test_any_length_and_page_size(path: str, page_size: int) -> None:
    check(latent_case((1, 16, 17, 250), 32, 16, page_size=page_size), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("latent", "rope", "heads"), [(100, 20, 5), (64, 3, 20), (24, 40, 1)])
def test_any_latent_and_number_of_heads(path: str, latent: int, rope: int, heads: int) -> None:
    check(latent_case((67,), latent, rope), path, heads=heads)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sizes_of_real_models(path: str, dtype: torch.dtype) -> None:
    check(latent_case((70,), 512, 64, dtype=dtype, page_size=64), path, heads=20, scale=0.04)


@pytest.mark.parametrize("path", PATHS)
def test_large_logits_do_not_overflow(path: str) -> None:
    case = latent_case((100,), 64, 16, key_factor=16.0)
    got = check(case, path, query_factor=16.0, tolerance=5e-3, num_splits=2)
    assert got.isfinite().all()


@pytest.mark.parametrize("path", PATHS)
def test_it_is_attention_with_the_key_projection_folded_into_the_query(path: str) -> None:
    """Against plain attention over keys and values that are projected from the latents."""
    heads, latent, rope, nope, out = 3, 48, 16, 24, 20
    case = latent_case((60,), latent, rope)
    make = torch.Generator().manual_seed(5)
    device = case.rows.device
    up_key = torch.randn(heads, nope, latent, generator=make).to(device) * latent**-0.5
    up_value = torch.randn(heads, out, latent, generator=make).to(device) * latent**-0.5
    q_nope, q_rope = (torch.randn(1, heads, n, generator=make).to(device) for n in (nope, rope))
    scale = (nope + rope) ** -0.5

    latents, ropes = case.request_keys[0][:, 0], case.request_values[0][:, 0]
    keys = torch.cat(
        (
            torch.einsum("hnl,tl->htn", up_key, latents),
            ropes.expand(heads, -1, -1),
        ),
        -1,
    )
    values = torch.einsum("hvl,tl->htv", up_value, latents)
    logits = scale * torch.einsum("hd,htd->ht", torch.cat((q_nope, q_rope), -1)[0], keys)
    truth = torch.einsum("ht,htv->hv", logits.softmax(-1), values)

    absorbed = torch.einsum("bhn,hnl->bhl", q_nope, up_key)
    got = mla_decode(absorbed, q_rope, case.rows, case.table, scale=scale, path=path)
    projected = torch.einsum("hl,hvl->hv", got[0], up_value)
    assert relative_error(projected, truth) < TOLERANCE[torch.float32]


def test_what_does_not_fit_is_refused() -> None:
    case = latent_case((20, 5), 32, 16)
    q_latent = random_queries(2, 4, 32, memory=None)
    q_rope = random_queries(2, 4, 16, memory=None)
    good = {
        "q_latent": q_latent,
        "q_rope": q_rope,
        "latent_cache": case.rows,
        "page_table": case.table,
        "scale": 0.1,
    }
    mla_decode(**good, path="torch")
    for change, word in (
        ({"q_latent": q_latent[0]}, "q_latent has shape"),
        ({"q_rope": q_rope[:, :3]}, "q_rope has shape"),
        ({"q_rope": q_rope.bfloat16()}, "q_rope has dtype"),
        ({"latent_cache": case.rows[..., :47]}, "latent_cache has shape"),
        ({"latent_cache": case.rows.mT.contiguous().mT}, "latent_cache has stride"),
        ({"latent_cache": case.rows[1:]}, "page_table was made for"),
        ({"page_table": [[0], [1]]}, "page_table is a list"),
        ({"q_latent": q_latent[:1], "q_rope": q_rope[:1]}, "page_table has 2 requests"),
        ({"scale": None}, "scale is None"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"num_splits": 0}, "num_splits is 0"),
    ):
        with pytest.raises(ConfigError, match=word):
            mla_decode(**{**good, **change}, path="torch")
