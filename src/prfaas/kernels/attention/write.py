"""Appends the rows of new tokens to a paged cache."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arguments import check_tensor
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.page_table import PageTable
from prfaas.kernels.sequences import Sequences

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)


def paged_write(
    rows: torch.Tensor,
    cache: torch.Tensor,
    page_table: PageTable,
    *,
    cu_seqlens: Sequences | Iterable[int] | None = None,
    path: str | None = None,
) -> None:
    """Writes each sequence's new rows where its last tokens belong: token ``r`` of ``n`` new ones
    goes to position ``kv_len - n + r``.

    Args:
        rows: [num_tokens, heads, dim] or [num_tokens, dim], packed.
        cache: [num_pages, page_size, heads, dim] or [num_pages, page_size, dim], same dtype; the
            strides of its first dimensions are free.
        page_table: pages and lengths of the sequences, these tokens included.
        cu_seqlens: 0, then the end of each request's new tokens; None for one request. A decode
            step has one token each: ``Sequences.of_lengths([1] * num_requests)``.
        path: see `prfaas.kernels.dispatch`.

    Raises:
        ConfigError: an argument does not fit; nothing was written.
    """
    sequences = _check(rows, cache, page_table, cu_seqlens)
    if rows.ndim == 2:
        rows, cache = rows[:, None], cache[:, :, None]
    chosen = choose("paged_write", cache.device, path)
    if chosen is Path.REFERENCE:
        _write_one_by_one(rows, cache, page_table, sequences)
    elif chosen is Path.TORCH:
        pages, slots = _places(page_table, sequences, cache.device)
        cache[pages, slots] = rows
    else:
        from prfaas.kernels.attention.write_launches import build

        build(rows, cache, page_table, sequences).run()


def _check(
    rows: torch.Tensor,
    cache: torch.Tensor,
    page_table: PageTable,
    cu_seqlens: Sequences | Iterable[int] | None,
) -> Sequences:
    wide = isinstance(rows, torch.Tensor) and rows.ndim == 2
    check_tensor(
        "rows",
        rows,
        shape=("num_tokens", "dim") if wide else ("num_tokens", "heads", "dim"),
        dtypes=DTYPES,
    )
    check_tensor(
        "cache",
        cache,
        shape=("num_pages", page_table.page_size, *rows.shape[1:]),
        dtypes=(rows.dtype,),
        device=rows.device,
    )
    if page_table.num_pages > cache.shape[0] or page_table.pages.device != cache.device:
        raise ConfigError(
            f"page_table was checked against {page_table.num_pages} pages on "
            f"{page_table.pages.device}; cache has {cache.shape[0]} on {cache.device}"
        )
    count = page_table.num_requests
    sequences = Sequences.of(cu_seqlens, rows.shape[0])
    if sequences.num_sequences != count:
        raise ConfigError(
            f"cu_seqlens has {sequences.num_sequences} sequences, page_table {count} requests; "
            "these must be equal"
        )
    if page_table.host_kv_lens is not None:
        for index, (new, held) in enumerate(
            zip(sequences.lengths, page_table.host_kv_lens, strict=True)
        ):
            if new > held:
                raise ConfigError(
                    f"page_table: kv_lens of request {index} is {held}, less than its {new} new "
                    "tokens; kv_lens includes them"
                )
    return sequences


def _places(
    page_table: PageTable, sequences: Sequences, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and slot of every new token, int64 [num_tokens]."""
    owner = sequences.sequence_ids(device).long()
    ends = sequences.offset_tensor(device)[1:]
    tokens = torch.arange(sequences.num_tokens, device=device)
    position = page_table.kv_lens.long()[owner] - ends[owner] + tokens
    column = position // page_table.page_size
    return page_table.pages[owner, column].long(), position % page_table.page_size


def _write_one_by_one(
    rows: torch.Tensor, cache: torch.Tensor, page_table: PageTable, sequences: Sequences
) -> None:
    pages, lengths = page_table.pages.tolist(), page_table.kv_lens.tolist()
    for index, held in enumerate(lengths):
        start, stop = sequences.offsets[index], sequences.offsets[index + 1]
        for token in range(start, stop):
            column, slot = divmod(held - stop + token, page_table.page_size)
            cache[pages[index][column], slot] = rows[token]
