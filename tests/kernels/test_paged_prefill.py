"""Attention of new tokens over pages against a float64 loop, on every path that runs here."""

from __future__ import annotations

import pytest
import torch

from attention_cases import PagedCase, paged_case, random_queries
from kernel_paths import DEVICE, PATHS, TOLERANCE, relative_error
from prfaas.kernels import Sequences
from prfaas.kernels.attention import paged_prefill


def check(
    case: PagedCase,
    lengths: tuple[int, ...],
    path: str,
    *,
    heads: int = 2,
    tolerance: float | None = None,
    query_factor: float = 1.0,
    **options: object,
) -> torch.Tensor:
    """Runs both paths on random queries, compares, and checks the poison."""
    dtype, width = case.keys.dtype, case.keys.shape[-1]
    q = random_queries(sum(lengths), heads, width, dtype=dtype, memory=case.memory)
    q.mul_(query_factor)
    arguments = (q, case.keys, case.values, case.table)
    options["cu_seqlens"] = Sequences.of_lengths(lengths)
    truth = paged_prefill(*arguments, **options, path="reference")
    got = paged_prefill(*arguments, **options, path=path)
    assert got.dtype == dtype
    assert got.shape == truth.shape
    assert truth.dtype == torch.float64
    assert relative_error(got, truth) < (tolerance or TOLERANCE[dtype])
    case.memory.check()
    return got


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_new_tokens_see_a_cached_prefix_and_themselves(path: str, dtype: torch.dtype) -> None:
    case = paged_case((98, 20, 130), kv_heads=2, key=32, dtype=dtype)
    check(case, (31, 20, 1), path, heads=4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 250])
def test_any_length_without_a_prefix(path: str, kv_len: int) -> None:
    check(paged_case((kv_len,), key=16), (kv_len,), path, heads=1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("context", [1, 31, 64, 97])
def test_odd_prefixes(path: str, context: int) -> None:
    check(paged_case((context + 65,), key=16, seed=context), (65,), path, heads=1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("page_size", [1, 3, 17, 32, 64, 256])
def test_any_page_size(path: str, page_size: int) -> None:
    check(paged_case((101, 33), page_size=page_size, key=16), (70, 33), path, heads=1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("page_size", [7, 64])
@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_a_window_hides_what_lies_before_it(path: str, page_size: int, window: int) -> None:
    lengths, kv_lens = (97, 2), (150, 100)
    hidden = tuple(
        max(0, kv_len - length + 1 - window)
        for kv_len, length in zip(kv_lens, lengths, strict=True)
    )
    case = paged_case(kv_lens, page_size=page_size, key=16, hidden_before=hidden)
    got = check(case, lengths, path, heads=1, window=window)
    if window == 1:
        values = torch.cat((case.request_values[0][-97:], case.request_values[1][-2:]))
        torch.testing.assert_close(got, values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("key", "value"), [(60, 60), (100, 100), (96, 64), (24, 100), (192, 128), (5, 3)]
)
def test_any_head_dimension(path: str, key: int, value: int, dtype: torch.dtype) -> None:
    check(paged_case((67,), key=key, value=value, dtype=dtype), (40,), path, heads=1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dim", [128, 256])
def test_large_heads(path: str, dim: int) -> None:
    check(paged_case((140,), key=dim, dtype=torch.bfloat16), (129,), path, heads=1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_logits_do_not_overflow(path: str, dtype: torch.dtype) -> None:
    """Logits reach about 1e3: e to that is no float32. Few keys matter, and rounded scores pick
    among them, so float32 is held to the rounding of its logits."""
    case = paged_case((100,), key=64, dtype=dtype, key_factor=16.0)
    tolerance = 5e-3 if dtype is torch.float32 else None
    got = check(case, (70,), path, query_factor=16.0, tolerance=tolerance)
    assert got.isfinite().all()


@pytest.mark.parametrize("path", PATHS)
def test_scale_is_a_factor_of_the_logits(path: str) -> None:
    case = paged_case((50,), key=16)
    plain = check(case, (20,), path, heads=1)
    assert relative_error(check(case, (20,), path, heads=1, scale=0.9), plain) > 1e-2
    assert (
        relative_error(check(case, (20,), path, heads=1, scale=0.25), plain) < 1e-6
    )  # the default


@pytest.mark.parametrize("path", PATHS)
def test_a_sequence_may_bring_no_token(path: str) -> None:
    check(paged_case((0, 40, 20, 0, 33), key=16), (0, 40, 0, 0, 5), path, heads=1)


@pytest.mark.parametrize("path", PATHS)
def test_no_token_at_all(path: str) -> None:
    case = paged_case((5,), key=16)
    q = torch.empty(0, 2, 16, device=DEVICE)
    out = paged_prefill(q, case.keys, case.values, case.table, path=path)
    assert out.shape == (0, 2, 16)


@pytest.mark.parametrize("path", PATHS)
def test_neighbours_change_nothing(path: str) -> None:
    """Bit for bit."""
    case = paged_case((90, 130, 41), key=16)
    lengths = (37, 40, 41)
    q = random_queries(sum(lengths), 1, 16, memory=None)
    together = paged_prefill(
        q,
        case.keys,
        case.values,
        case.table,
        cu_seqlens=Sequences.of_lengths(lengths),
        path=path,
    ).split(lengths)
    for request, part in enumerate(q.split(lengths)):
        alone = type(case.table).trusted(
            case.table.pages[request : request + 1],
            case.table.kv_lens[request : request + 1],
            page_size=case.table.page_size,
            num_pages=case.table.num_pages,
            max_kv_len=130,
        )
        got = paged_prefill(part, case.keys, case.values, alone, path=path)
        assert torch.equal(got, together[request])


@pytest.mark.parametrize("path", PATHS)
def test_a_resumed_prefill_continues_the_first(path: str) -> None:
    case = paged_case((130,), key=16)
    q = random_queries(130, 1, 16, memory=None)
    whole = paged_prefill(q, case.keys, case.values, case.table, path=path)
    for cut in (1, 65):
        rest = paged_prefill(q[cut:], case.keys, case.values, case.table, path=path)
        assert relative_error(rest, whole[cut:]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("path", PATHS)
def test_queries_may_be_a_view_of_a_fused_projection(path: str) -> None:
    case = paged_case((40,), kv_heads=2, key=16)
    fused = random_queries(40, 8 * 16, memory=None)
    q = fused[:, : 4 * 16].unflatten(-1, (4, 16))
    got = paged_prefill(q, case.keys, case.values, case.table, path=path)
    truth = paged_prefill(q, case.keys, case.values, case.table, path="reference")
    assert relative_error(got, truth) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("path", PATHS)
def test_it_agrees_with_the_attention_of_transformers(path: str) -> None:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    case = paged_case((50,), kv_heads=2, key=32)
    q = random_queries(30, 6, 32, memory=None)
    layer = torch.nn.Module()
    layer.num_key_value_groups = 3  # type: ignore[assignment]
    layer.eval()
    mask = torch.full((30, 50), float("-inf"), device=DEVICE).triu(21)
    truth, _ = eager_attention_forward(
        layer,
        q.transpose(0, 1)[None],
        case.request_keys[0].transpose(0, 1)[None],
        case.request_values[0].transpose(0, 1)[None],
        mask,
        scaling=0.2,
    )
    got = paged_prefill(q, case.keys, case.values, case.table, scale=0.2, path=path)
    assert relative_error(got, truth[0]) < TOLERANCE[torch.float32]


def test_long_sequences_are_cut_for_the_mask_of_torch() -> None:
    case = paged_case((1500,), page_size=64, key=16)
    q = random_queries(1200, 2, 16, memory=None)
    whole = case.request_keys[0].transpose(0, 1), case.request_values[0].transpose(0, 1)
    for window in (None, 300):
        mask = torch.ones(1200, 1500, dtype=torch.bool, device=DEVICE).tril(300)
        if window is not None:
            mask = mask.triu(301 - window)
        truth = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1).double(),
            *(x.expand(2, -1, -1).double() for x in whole),
            attn_mask=mask,
        ).transpose(0, 1)
        got = paged_prefill(q, case.keys, case.values, case.table, window=window, path="torch")
        assert relative_error(got, truth) < TOLERANCE[torch.float32]
