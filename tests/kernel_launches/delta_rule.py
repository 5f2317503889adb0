"""Launches of the delta rule: both kinds of gates, every tile, with and without segments."""

from __future__ import annotations

import functools
import itertools

import torch

from prfaas.kernels.arch import Arch
from prfaas.kernels.delta import launches
from prfaas.kernels.delta.tiles import CHUNK
from prfaas.kernels.launch import Launch
from prfaas.kernels.sequences import Sequences

HEADS, TOKENS = 4, 250


def _plan(
    arch: Arch,
    kind: str,
    dtype: torch.dtype,
    key: int,
    value: int,
    *,
    index: int = 0,
    num_segments: int = 1,
    normalize_qk: bool = True,
    checkpoints: tuple[tuple[int, ...], ...] | None = None,
) -> Launch:
    """Launch ``index`` of a call on one packed projection, as models make it."""
    key_heads = HEADS // 2 if kind == "gdn" else HEADS
    sizes = (key_heads * key, key_heads * key, HEADS * value)
    packed = torch.empty((TOKENS, sum(sizes)), dtype=dtype, device="meta").split(sizes, dim=1)
    q, k, v = (x.unflatten(1, (-1, d)) for x, d in zip(packed, (key, key, value), strict=True))
    gate_shape = (TOKENS, HEADS, key) if kind == "kda" else (TOKENS, HEADS)
    _, made = launches.plan(
        arch,
        launches.Inputs(
            q=q,
            k=k,
            v=v,
            g=torch.empty(gate_shape, device="meta"),
            beta=torch.empty((TOKENS, HEADS), dtype=dtype, device="meta"),
        ),
        Sequences((0, TOKENS)).chunks(CHUNK, torch.device("meta"), checkpoints),
        scale=key**-0.5,
        initial_state=torch.empty((1, HEADS, key, value), device="meta"),
        normalize_qk=normalize_qk,
        num_segments=num_segments,
    )
    return made[index]


PREPARE, MAP, COMBINE, LAST = 0, 1, 2, -1

_SIZES = {"64": (64, 64), "128": (128, 128), "256": (256, 256), "odd": (60, 100)}
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

_NAMES = {
    "prepare": {"index": PREPARE},
    "scan": {"index": LAST},
    "map": {"index": MAP, "num_segments": 2},
    "combine": {"index": COMBINE, "num_segments": 2},
}


def _sizes_of(name: str, kind: str, dtype: str) -> tuple[str, ...]:
    """All sizes where these change tiles or loops; `combine` knows neither kind nor dtype."""
    if name == "prepare":
        return ("64", "128", "odd")
    if name == "map":
        return ("64", "128") if kind == "kda" else ("odd",)
    if name == "combine":
        return tuple(_SIZES) if (kind, dtype) == ("gdn", "bf16") else ()
    return tuple(_SIZES)


LAUNCHES = {
    f"{name}_{kind}_{dtype}_{size}": functools.partial(
        _plan,
        kind=kind,
        dtype=_DTYPES[dtype],
        key=_SIZES[size][0],
        value=_SIZES[size][1],
        **options,
    )
    for (name, options), kind, dtype in itertools.product(_NAMES.items(), ("gdn", "kda"), _DTYPES)
    for size in _sizes_of(name, kind, dtype)
}
LAUNCHES |= {
    name: functools.partial(_plan, kind=kind, dtype=dtype, **{"key": 128, "value": 128, **options})
    for name, kind, dtype, options in (
        ("prepare_256", "kda", torch.bfloat16, {"index": PREPARE, "key": 256, "value": 256}),
        ("prepare_fp16", "kda", torch.float16, {"index": PREPARE}),
        ("prepare_gdn_plain", "gdn", torch.bfloat16, {"index": PREPARE, "normalize_qk": False}),
        ("prepare_kda_plain", "kda", torch.bfloat16, {"index": PREPARE, "normalize_qk": False}),
        ("scan_fp16", "gdn", torch.float16, {"index": LAST}),
        ("scan_segments", "kda", torch.bfloat16, {"index": LAST, "num_segments": 2}),
        ("scan_checkpoints", "kda", torch.bfloat16, {"index": LAST, "checkpoints": ((100,),)}),
        (
            "scan_checkpoints_fp32",
            "gdn",
            torch.float32,
            {"index": LAST, "num_segments": 2, "checkpoints": ((100,),)},
        ),
    )
}

_EVERY_TILE = {
    *(f"prepare_{kind}_{dtype}_128" for kind in ("gdn", "kda") for dtype in _DTYPES),
    *(
        f"scan_{kind}_{dtype}_{size}"
        for kind in ("gdn", "kda")
        for dtype in _DTYPES
        for size in ("128", "256")
    ),
    *("prepare_kda_bf16_odd", "prepare_gdn_fp32_odd", "scan_kda_bf16_64", "scan_segments"),
    *("map_kda_bf16_128", "map_kda_fp32_64", "combine_gdn_bf16_128", "combine_gdn_bf16_256"),
}
VARIANTS = set(LAUNCHES) - _EVERY_TILE
