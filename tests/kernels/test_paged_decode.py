"""Attention of one new token per request over pages, on every path that runs here."""

from __future__ import annotations

import pytest
import torch

from attention_cases import PagedCase, paged_case, random_queries
from kernel_paths import DEVICE, PATHS, TOLERANCE, relative_error
from prfaas.kernels import PageTable
from prfaas.kernels.attention import gathered, paged_decode, paged_prefill


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
    dtype, width = case.keys.dtype, case.keys.shape[-1]
    q = random_queries(case.table.num_requests, heads, width, dtype=dtype, memory=case.memory)
    q.mul_(query_factor)
    arguments = (q, case.keys, case.values, case.table)
    truth = paged_decode(*arguments, **options, path="reference")
    got = paged_decode(*arguments, **options, path=path)
    assert got.dtype == dtype
    assert got.shape == truth.shape
    assert truth.dtype == torch.float64
    assert relative_error(got, truth) < (tolerance or TOLERANCE[dtype])
    case.memory.check()
    return got


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "num_splits"),
    [
        *((torch.float32, splits) for splits in (1, 2, 3, 4, 5)),
        *((dtype, splits) for dtype in (torch.bfloat16, torch.float16) for splits in (1, 3)),
    ],
)
def test_splits_give_the_same(path: str, dtype: torch.dtype, num_splits: int) -> None:
    """Some requests have fewer tiles of keys than there are splits."""
    case = paged_case((100, 17, 0), key=32, dtype=dtype)
    got = check(case, path, heads=3, num_splits=num_splits)
    assert (got[2] == 0).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("page_size", [1, 16, 17, 64])
def test_any_length_and_page_size(path: str, page_size: int) -> None:
    case = paged_case((0, 1, 15, 16, 17, 250), page_size=page_size, key=16)
    got = check(case, path)
    assert (got[0] == 0).all()
    one = case.request_values[1][0].expand(2, -1)
    torch.testing.assert_close(got[1], one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [1, 7, 64, 1000])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_window_hides_what_lies_before_it(path: str, window: int, num_splits: int) -> None:
    lens = (130, 3, 0)
    hidden = tuple(max(0, length - window) for length in lens)
    case = paged_case(lens, key=16, hidden_before=hidden)
    check(case, path, window=window, num_splits=num_splits)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (40, 2)])
def test_query_heads_share_key_heads(path: str, heads: int, kv_heads: int) -> None:
    """More than 16 to a key head take more than one block."""
    check(paged_case((70, 33), kv_heads=kv_heads, key=16), path, heads=heads)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("key", "value"), [(60, 60), (100, 100), (96, 64), (24, 100), (192, 128), (256, 256), (5, 3)]
)
def test_any_head_dimension(path: str, key: int, value: int, dtype: torch.dtype) -> None:
    check(paged_case((67,), key=key, value=value, dtype=dtype), path, num_splits=2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_logits_do_not_overflow(path: str, dtype: torch.dtype) -> None:
    case = paged_case((100, 7), key=64, dtype=dtype, key_factor=16.0)
    tolerance = 5e-3 if dtype is torch.float32 else None
    got = check(case, path, query_factor=16.0, tolerance=tolerance, num_splits=3)
    assert got.isfinite().all()


@pytest.mark.parametrize("path", PATHS)
def test_neighbours_change_nothing_at_a_fixed_number_of_splits(path: str) -> None:
    """Bit for bit in the kernel; torch pads a request to its neighbours, which may move the last
    bits."""
    case = paged_case((90, 130, 41), key=16)
    q = random_queries(3, 2, 16, memory=None)
    arguments = (case.keys, case.values)
    together = paged_decode(q, *arguments, case.table, num_splits=2, path=path)
    for request in range(3):
        alone = PageTable.trusted(
            case.table.pages[request : request + 1],
            case.table.kv_lens[request : request + 1],
            page_size=16,
            num_pages=case.table.num_pages,
            max_kv_len=130,
        )
        row = q[request : request + 1]
        got = paged_decode(row, *arguments, alone, num_splits=2, path=path)
        if path == "triton":
            assert torch.equal(got[0], together[request])
        assert relative_error(got[0], together[request]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("path", PATHS)
def test_it_is_the_prefill_of_one_token(path: str) -> None:
    case = paged_case((90, 33), kv_heads=2, key=16)
    q = random_queries(2, 4, 16, memory=None)
    arguments = (q, case.keys, case.values, case.table)
    decoded = paged_decode(*arguments, window=20, path=path)
    prefilled = paged_prefill(*arguments, cu_seqlens=(0, 1, 2), window=20, path=path)
    assert relative_error(decoded, prefilled) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("path", PATHS)
def test_queries_may_be_a_view_of_a_fused_projection(path: str) -> None:
    case = paged_case((70, 20), kv_heads=2, key=16)
    fused = random_queries(2, 8 * 16, memory=None)
    q = fused[:, 16 : 5 * 16].unflatten(-1, (4, 16))
    arguments = (q, case.keys, case.values, case.table)
    truth = paged_decode(*arguments, path="reference")
    assert relative_error(paged_decode(*arguments, path=path), truth) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("path", PATHS)
def test_no_request(path: str) -> None:
    case = paged_case((5,), key=16)
    table = PageTable([], [], page_size=16, num_pages=case.keys.shape[0], device=case.keys.device)
    q = torch.empty(0, 2, 16, device=DEVICE)
    assert paged_decode(q, case.keys, case.values, table, path=path).shape == (0, 2, 16)


@pytest.mark.parametrize("most", [1, 600, 2000, 10_000])
def test_torch_bounds_what_it_gathers(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """By groups of requests, then by heads."""
    monkeypatch.setattr(gathered, "_MOST_GATHERED", most)
    case = paged_case((60, 3, 0, 20, 45, 0, 17), kv_heads=3, key=16)
    check(case, "torch", heads=6)
    check(case, "torch", heads=6, window=13)


def test_torch_gathers_requests_of_like_lengths_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_MOST_GATHERED", 2000)
    spans = [gathered._Span.of(kv_len, None, 16) for kv_len in (250, 3, 0, 20, 130, 0, 17)]
    assert list(gathered._groups(spans, 16 * 32)) == [[2, 5], [1], [3], [6], [4], [0]]
    assert list(gathered._groups(spans, 16)) == [[2, 5], [1, 3, 6, 4, 0]]
