"""What paged attention refuses before anything runs, and how it cuts its work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attention_cases import paged_case, random_queries
from prfaas.errors import ConfigError
from prfaas.kernels import PageTable, report
from prfaas.kernels.attention import mla_decode, paged_decode, paged_prefill
from prfaas.kernels.attention.tiles import MAX_SPLITS, count_splits, head_parts

Change = tuple[dict[str, object], str]


def good(tokens: int) -> dict[str, object]:
    case = paged_case((20, 5), kv_heads=2, key=32)
    return {
        "q": random_queries(tokens, 4, 32, memory=None),
        "key_cache": case.keys,
        "value_cache": case.values,
        "page_table": case.table,
    }


def shared_changes(arguments: dict[str, object]) -> list[Change]:
    q, keys = arguments["q"], arguments["key_cache"]
    values, table = arguments["value_cache"], arguments["page_table"]
    assert isinstance(q, torch.Tensor)
    assert isinstance(keys, torch.Tensor)
    assert isinstance(values, torch.Tensor)
    assert isinstance(table, PageTable)
    away = PageTable.trusted(
        table.pages.to("meta"),
        table.kv_lens.to("meta"),
        page_size=table.page_size,
        num_pages=table.num_pages,
        max_kv_len=20,
    )
    return [
        ({"q": q[0]}, "q has shape"),
        ({"q": q.double()}, "q has dtype"),
        ({"q": q.mT.contiguous().mT}, "q has stride"),
        ({"q": q[:, :3]}, "q has 3 heads and key_cache 2"),
        ({"key_cache": [1]}, "key_cache is a list"),
        ({"key_cache": keys[..., :31]}, "key_cache has shape"),
        ({"key_cache": keys.bfloat16()}, "key_cache has dtype bfloat16; use float32"),
        ({"key_cache": keys.mT.contiguous().mT}, "key_cache has stride"),
        ({"key_cache": keys.to("meta")}, "key_cache is on meta"),
        ({"value_cache": values[:, :, :1]}, "value_cache has shape"),
        ({"value_cache": values[:-1]}, "value_cache has shape"),
        ({"key_cache": keys[1:], "value_cache": values[1:]}, "page_table was made for"),
        ({"key_cache": keys[:, 1:], "value_cache": values[:, 1:]}, "page_table was made for"),
        ({"page_table": [[0], [1]]}, "page_table is a list"),
        ({"page_table": away}, "page_table is on meta"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": "1"}, "scale is '1'"),
        ({"window": 0}, "window is 0"),
        ({"window": 2.0}, "window is 2.0"),
        ({"window": True}, "window is True"),
        ({"path": "cuda"}, "path is 'cuda'"),
    ]


def check_refusals(
    op: Callable[..., torch.Tensor], base: dict[str, object], more: list[Change]
) -> None:
    op(**base, path="torch")
    for change, word in shared_changes(base) + more:
        with pytest.raises(ConfigError, match=word):
            op(**{**base, "path": "torch", **change})


def test_prefill_refuses_what_does_not_fit() -> None:
    base = good(12) | {"cu_seqlens": (0, 7, 12)}
    check_refusals(
        paged_prefill,
        base,
        [
            ({"cu_seqlens": (0, 7)}, "cu_seqlens ends with 7"),
            ({"cu_seqlens": (0, 12)}, "page_table has 2 requests, cu_seqlens has 1"),
            ({"cu_seqlens": (0, 6, 12)}, "kv_lens of request 1 is 5, cu_seqlens gives it 6"),
        ],
    )


def test_decode_refuses_what_does_not_fit() -> None:
    base = good(2)
    q = base["q"]
    assert isinstance(q, torch.Tensor)
    check_refusals(
        paged_decode,
        base,
        [
            ({"q": q[:1]}, "page_table has 2 requests, q has 1"),
            ({"num_splits": 0}, "num_splits is 0"),
            ({"num_splits": MAX_SPLITS + 1}, "num_splits is 129; use a whole number, 1 to 128"),
            ({"num_splits": 1.5}, "num_splits is 1.5"),
        ],
    )


def test_sizes_that_no_kernel_takes_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prfaas.kernels.dispatch.is_interpreting", lambda: True)
    wide = paged_case((5,), key=260)
    latent = paged_case((5,), key=600, value=16)
    q, q_latent, q_rope = (random_queries(1, 1, n, memory=None) for n in (260, 600, 16))
    calls = {
        "paged_prefill": lambda **o: paged_prefill(q, wide.keys, wide.values, wide.table, **o),
        "paged_decode": lambda **o: paged_decode(q, wide.keys, wide.values, wide.table, **o),
        "mla_decode": lambda **o: mla_decode(
            q_latent, q_rope, latent.rows, latent.table, scale=0.1, **o
        ),
    }
    for op, call in calls.items():
        reason = (
            "latents of 600 and rope parts of 16 elements; at most 512 and 128 fit"
            if op == "mla_decode"
            else "a head dimension of 260 is more than 256"
        )
        before = report().fallbacks.get((op, reason), 0)
        assert call().isfinite().all()
        assert report().fallbacks[op, reason] == before + 1
        with pytest.raises(ConfigError, match=reason):
            call(path="triton")


@pytest.mark.parametrize(
    ("programs", "keys", "splits"),
    [
        (1, 0, 1),
        (1, 256, 1),
        (1, 257, 2),
        (8, 1 << 15, 33),  # one request of 8 key heads: 264 programs
        (8, 1024, 4),  # too short for so many
        (1, 1 << 20, MAX_SPLITS),
        (264, 1 << 20, 1),  # the batch fills the processor
        (133, 1 << 20, 2),
        (0, 100, 1),
    ],
)
def test_splits_fill_the_processor_while_they_are_long_enough(
    programs: int, keys: int, splits: int
) -> None:
    assert count_splits(programs, keys) == splits


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (64, (64, 0)),
        (192, (128, 64)),
        (96, (64, 32)),
        (80, (64, 16)),
        (130, (128, 2)),
        (100, (100, 0)),  # 64 and 36 would be padded to as much
        (24, (24, 0)),
        (5, (5, 0)),
    ],
)
def test_a_head_is_cut_where_that_pads_less(width: int, parts: tuple[int, int]) -> None:
    assert head_parts(width) == parts
