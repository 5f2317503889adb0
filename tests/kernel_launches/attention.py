"""Launches of paged prefill, paged decode with splits, MLA decode, and the joining of splits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from prfaas.kernels import PageTable, Sequences
from prfaas.kernels.arch import Arch
from prfaas.kernels.attention.launches import decode_launches, mla_launches, prefill_launch
from prfaas.kernels.launch import Launch

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _table(requests: int, page_size: int) -> PageTable:
    return PageTable.trusted(
        torch.empty(requests, 64, dtype=torch.int32, device="meta"),
        torch.empty(requests, dtype=torch.int32, device="meta"),
        page_size=page_size,
        num_pages=1000,
        max_kv_len=64 * page_size,
    )


def _pool(
    key: int, value: int, page_size: int, dtype: torch.dtype, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a pool whose rows are the keys, then the values."""
    rows = _empty(1000, page_size, kv_heads * (key + value), dtype=dtype)
    keys = rows[..., : kv_heads * key].unflatten(-1, (kv_heads, key))
    return keys, rows[..., kv_heads * key :].unflatten(-1, (kv_heads, value))


def _prefill(
    arch: Arch, *, key: int, value: int, page_size: int, dtype: torch.dtype, window: int | None
) -> Launch:
    keys, values = _pool(key, value, page_size, dtype, 2)
    q = _empty(300, 8, key, dtype=dtype)
    return prefill_launch(
        arch,
        q,
        keys,
        values,
        _table(2, page_size),
        Sequences.of_lengths((100, 200)),
        _empty(300, 8, value, dtype=dtype),
        scale=0.1,
        window=window,
    )


def _decode(
    arch: Arch,
    *,
    key: int,
    value: int,
    page_size: int,
    dtype: torch.dtype,
    window: int | None,
    splits: int,
    step: int = 0,
) -> Launch:
    keys, values = _pool(key, value, page_size, dtype, 2)
    return decode_launches(
        arch,
        _empty(3, 8, key, dtype=dtype),
        keys,
        values,
        _table(3, page_size),
        scale=0.1,
        window=window,
        num_splits=splits,
    ).launches[step]


def _mla(
    arch: Arch,
    *,
    latent: int,
    rope: int,
    heads: int,
    page_size: int,
    dtype: torch.dtype,
    splits: int,
    step: int = 0,
) -> Launch:
    return mla_launches(
        arch,
        _empty(3, heads, latent, dtype=dtype),
        _empty(3, heads, rope, dtype=dtype),
        _empty(1000, page_size, latent + rope, dtype=dtype),
        _table(3, page_size),
        scale=0.1,
        num_splits=splits,
    ).launches[step]


_VARIANTS = (
    # Pages smaller than a tile and a window: the most registers. Whole tiles in a page: the fewest.
    *((64, 64, torch.bfloat16, 16, 128), (64, 64, torch.bfloat16, 64, None)),
    *((128, 128, torch.bfloat16, 16, 128), (128, 128, torch.bfloat16, 64, None)),
    *((128, 128, torch.bfloat16, 16, None), (128, 128, torch.bfloat16, 64, 128)),
    *((192, 128, torch.bfloat16, 16, 128), (192, 128, torch.bfloat16, 64, None)),
    *((256, 256, torch.bfloat16, 16, 128), (256, 256, torch.bfloat16, 64, None)),
    (128, 128, torch.float16, 16, 128),  # the code of bfloat16 but for the type
    (64, 64, torch.float32, 16, 128),
    (128, 128, torch.float32, 16, 128),
    (192, 128, torch.float32, 16, 128),
    (256, 256, torch.float32, 16, 128),
)


def _full_attention() -> dict[str, Callable[[Arch], Launch]]:
    found: dict[str, Callable[[Arch], Launch]] = {}
    for key, value, dtype, page_size, window in _VARIANTS:
        name = f"{key}x{value}-{_SHORT[dtype]}-page{page_size}-window{window}"
        case = {
            "key": key,
            "value": value,
            "page_size": page_size,
            "dtype": dtype,
            "window": window,
        }
        found[f"prefill-{name}"] = functools.partial(_prefill, **case)
        splits = 1 if window is None else 4
        found[f"decode-{name}"] = functools.partial(_decode, **case, splits=splits)
    return found


def _latent_attention() -> dict[str, Callable[[Arch], Launch]]:
    found: dict[str, Callable[[Arch], Launch]] = {}
    for dtype, heads, page_size, splits in (
        (torch.bfloat16, 16, 16, 4),
        (torch.bfloat16, 16, 64, 1),
        (torch.bfloat16, 128, 64, 4),
        (torch.float16, 128, 16, 1),
        (torch.float32, 128, 16, 4),
    ):
        name = f"mla-{_SHORT[dtype]}-{heads}heads-page{page_size}-splits{splits}"
        found[name] = functools.partial(
            _mla,
            latent=512,
            rope=64,
            heads=heads,
            page_size=page_size,
            dtype=dtype,
            splits=splits,
        )
    return found


_ODD = {"key": 100, "value": 60, "page_size": 17, "window": 7}

LAUNCHES = {
    **_full_attention(),
    **_latent_attention(),
    "prefill-odd": functools.partial(_prefill, **_ODD, dtype=torch.bfloat16),
    "decode-odd": functools.partial(_decode, **_ODD, dtype=torch.bfloat16, splits=2),
    "mla-odd": functools.partial(
        _mla, latent=100, rope=20, heads=5, page_size=17, dtype=torch.bfloat16, splits=2
    ),
    "combine-128": functools.partial(
        _decode,
        key=128,
        value=128,
        page_size=16,
        dtype=torch.bfloat16,
        window=None,
        splits=5,
        step=1,
    ),
    "combine-mla": functools.partial(
        _mla, latent=512, rope=64, heads=8, page_size=16, dtype=torch.float32, splits=7, step=1
    ),
}

_EVERY_TILE = {
    *(
        f"prefill-{size}-{dtype}-page16-window128"
        for size in ("64x64", "128x128", "192x128", "256x256")
        for dtype in ("bf16", "fp32")
    ),
    *(
        f"decode-{size}-{dtype}-page16-window128"
        for size in ("128x128", "256x256")
        for dtype in ("bf16", "fp32")
    ),
    *("prefill-128x128-bf16-page64-windowNone", "decode-128x128-bf16-page64-windowNone"),
    *("mla-bf16-16heads-page16-splits4", "mla-bf16-128heads-page64-splits4"),
    *("mla-fp32-128heads-page16-splits4", "combine-128", "combine-mla"),
}
VARIANTS = set(LAUNCHES) - _EVERY_TILE
