"""Paged attention in torch: pages are gathered, then torch's own attention runs on them.

Slots that no visible token fills are cut off or set to zero by selection after the gathering, so
that stale NaN in them reaches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
import torch.nn.functional as F

from prfaas.kernels.page_table import PageTable
from prfaas.kernels.sequences import Sequences

_MOST_ROWS = 512
_MOST_MASK = 2**22
"""Query rows, and elements of the mask, of one call of torch's attention: its mask is dense."""

_MOST_GATHERED = 2**22
"""Elements that a decode gathers at once, unless one request has more in one head: new memory of
tens of megabytes comes from the kernel page by page, which is slower than the copy."""


def gathered_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: PageTable,
    sequences: Sequences,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """[num_tokens, heads, value_dim]; arguments are checked."""
    output = q.new_empty(*q.shape[:2], value_cache.shape[-1])
    for request, kv_len in enumerate(_lengths(table)):
        begin, end = sequences.offsets[request : request + 2]
        if begin == end:
            continue
        context = kv_len - (end - begin)
        low = _first_seen(context + 1, window)
        page = low // table.page_size
        ids = table.pages[request, page : -(-kv_len // table.page_size)]
        keys, values = (
            cache.index_select(0, ids).flatten(0, 1)[: kv_len - page * table.page_size]
            for cache in (key_cache, value_cache)
        )
        output[begin:end] = _attend(
            q[begin:end], keys, values, context, page * table.page_size, scale, window
        )
    return output


def _lengths(table: PageTable) -> tuple[int, ...]:
    return table.host_kv_lens or tuple(table.kv_lens.tolist())


def _first_seen(kv_len: int, window: int | None) -> int:
    return 0 if window is None else max(0, kv_len - window)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: int,
    dropped: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """One sequence: [tokens, heads, value_dim]. ``keys`` and ``values`` [kept, kv_heads, dim] begin
    with position ``dropped``; the tokens' own positions begin with ``context``."""
    tokens, heads, width = q.shape
    value_width, kv_heads = values.shape[-1], keys.shape[1]
    # torch's fast attention wants one head dimension. Key heads are the batch, and the query heads
    # that share one are its heads, so that keys are expanded without a copy.
    wide = max(width, value_width)
    if width != value_width:
        q, keys, values = (F.pad(x, (0, wide - x.shape[-1])) for x in (q, keys, values))
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, wide).permute(1, 2, 0, 3)
    keys, values = (
        x.transpose(0, 1)[:, None].expand(-1, heads // kv_heads, -1, -1) for x in (keys, values)
    )
    is_whole = context == 0 and (window is None or window >= tokens)
    if is_whole:
        made = F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
        return made.permute(2, 0, 1, 3).reshape(tokens, heads, wide)[..., :value_width]
    output = q.new_empty(tokens, kv_heads, heads // kv_heads, wide)
    rows = max(16, min(_MOST_ROWS, _MOST_MASK // keys.shape[2]))
    for first in range(0, tokens, rows):
        last = min(tokens, first + rows)
        position = torch.arange(context + first, context + last, device=q.device)[:, None]
        low = max(_first_seen(context + first + 1, window), dropped)
        seen = torch.arange(low, context + last, device=q.device)
        mask = seen <= position
        if window is not None:
            mask &= seen > position - window
        visible = slice(low - dropped, context + last - dropped)
        output[first:last] = F.scaled_dot_product_attention(
            grouped[:, :, first:last],
            keys[:, :, visible],
            values[:, :, visible],
            attn_mask=mask,
            scale=scale,
        ).permute(2, 0, 1, 3)
    return output.reshape(tokens, heads, wide)[..., :value_width]


def gathered_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    table: PageTable,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """[num_requests, heads, value_dim]; without ``value_cache`` the keys are the values. Arguments
    are checked."""
    caches = [cache for cache in (key_cache, value_cache) if cache is not None]
    kv_heads = key_cache.shape[2]
    output = q.new_empty(*q.shape[:2], caches[-1].shape[-1])
    grouped = q.unflatten(1, (kv_heads, -1))
    result = output.unflatten(1, (kv_heads, -1))
    spans = [_Span.of(kv_len, window, table.page_size) for kv_len in _lengths(table)]
    row_elements = sum(cache.shape[-1] for cache in caches)
    for group in _groups(spans, table.page_size * kv_heads * row_elements):
        if spans[group[-1]].num_pages == 0:
            output[group] = 0
            continue
        most = max(spans[request].num_pages for request in group)
        elements = len(group) * most * table.page_size * row_elements
        step = max(1, _MOST_GATHERED // elements)
        for first in range(0, kv_heads, step):
            heads = slice(first, first + step)
            result[group, heads] = _decode_group(
                grouped[group, heads],
                [cache[:, :, heads] for cache in caches],
                table,
                group,
                [spans[request] for request in group],
                scale,
            )
    return output


@attrs.frozen(kw_only=True)
class _Span:
    """What one request sees: ``num_pages`` pages from the entry ``first_page`` of its row, and of
    their slots those from ``begin`` to ``end - 1``."""

    first_page: int
    num_pages: int
    begin: int
    end: int

    @classmethod
    def of(cls, kv_len: int, window: int | None, page_size: int) -> _Span:
        low = _first_seen(kv_len, window)
        first = low // page_size
        return cls(
            first_page=first,
            num_pages=-(-kv_len // page_size) - first,
            begin=low - first * page_size,
            end=kv_len - first * page_size,
        )


def _groups(spans: list[_Span], page_elements: int) -> Iterator[list[int]]:
    """Requests that are gathered together: of like lengths, since all are padded to the longest,
    and few enough to bound the memory. Those that see nothing come first and alone."""
    order = sorted(range(len(spans)), key=lambda request: spans[request].num_pages)
    group: list[int] = []
    for request in order:
        pages = spans[request].num_pages
        is_other = group and pages > 0 and spans[group[-1]].num_pages == 0
        if group and (pages * page_elements * (len(group) + 1) > _MOST_GATHERED or is_other):
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def _decode_group(
    q: torch.Tensor,
    caches: list[torch.Tensor],
    table: PageTable,
    group: list[int],
    spans: list[_Span],
    scale: float,
) -> torch.Tensor:
    """[requests, kv_heads, heads of each, value_dim], as ``q``."""
    most = max(span.num_pages for span in spans)
    columns = torch.tensor([span.first_page for span in spans], device=q.device)[:, None]
    columns = (columns + torch.arange(most, device=q.device)).clamp_(max=table.pages.shape[1] - 1)
    ids = table.pages[torch.tensor(group, device=q.device)[:, None], columns]
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    mask = None
    if len({(span.begin, span.end) for span in spans}) > 1:
        low, high = (
            torch.tensor(bounds, device=q.device)[:, None]
            for bounds in ([span.begin for span in spans], [span.end for span in spans])
        )
        slots = torch.arange(begin, end, device=q.device)
        mask = (slots >= low) & (slots < high)
    gathered = []
    for cache in caches:
        rows = cache.index_select(0, ids.flatten()).unflatten(0, ids.shape).flatten(1, 2)
        for row, span in zip(rows, spans, strict=True):
            row[begin : span.begin] = 0
            row[span.end : end] = 0
        gathered.append(rows[:, begin:end].transpose(1, 2))
    keys, values = gathered[0], gathered[-1]
    width, value_width = keys.shape[-1], values.shape[-1]
    if width != value_width:
        wide = max(width, value_width)
        q, keys, values = (F.pad(x, (0, wide - x.shape[-1])) for x in (q, keys, values))
    # One token: the query heads that share a key head are the rows of the attention.
    made = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=None if mask is None else mask[:, None, None], scale=scale
    )
    return made[..., :value_width]
