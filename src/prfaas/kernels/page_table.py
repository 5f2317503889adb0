"""Which pages of a KV cache the requests of a batch have."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arguments import whole_numbers


class PageTable:
    """Pages of the KV cache that each request holds, checked against the cache.

    Args:
        pages: per request its page ids in token order, each once. Requests may share pages, as a
            common prefix; nobody sees to it that only one of them writes to such a page.
        kv_lens: per request the tokens that are in the cache, those of this call included.
        page_size: tokens per page.
        num_pages: pages of the cache.
        device: where the cache is.

    Raises:
        ConfigError: a page outside of the cache, or too few pages for a length.
    """

    def __init__(
        self,
        pages: Iterable[Iterable[int]],
        kv_lens: Iterable[int],
        *,
        page_size: int,
        num_pages: int,
        device: torch.device | str,
    ) -> None:
        if not isinstance(pages, Iterable):
            raise ConfigError(f"pages is {pages!r}; give one list of page ids per request")
        rows = [whole_numbers("pages", row) for row in pages]
        lens = whole_numbers("kv_lens", kv_lens)
        if type(page_size) is not int or page_size < 1:
            raise ConfigError(f"page_size is {page_size!r}; a page has at least 1 token")
        if len(rows) != len(lens):
            raise ConfigError(
                f"pages has {len(rows)} rows for {len(lens)} kv_lens; give one of each per request"
            )
        for index, (row, length) in enumerate(zip(rows, lens, strict=True)):
            wrong = [page for page in row if not 0 <= page < num_pages]
            if wrong:
                raise ConfigError(
                    f"pages of request {index} hold {wrong[0]}; the cache has pages 0 to "
                    f"{num_pages - 1}"
                )
            if len(set(row)) < len(row):
                twice = next(page for page in row if row.count(page) > 1)
                raise ConfigError(
                    f"pages of request {index} hold {twice} twice; each holds other tokens"
                )
            if not 0 <= length <= len(row) * page_size:
                raise ConfigError(
                    f"kv_lens of request {index} is {length}; its {len(row)} pages hold 0 to "
                    f"{len(row) * page_size} tokens"
                )
        width = max((len(row) for row in rows), default=1) or 1
        table = [row + (0,) * (width - len(row)) for row in rows]
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_kv_len = max(lens, default=0)
        self.host_kv_lens: tuple[int, ...] | None = lens
        self.pages = torch.tensor(table, dtype=torch.int32, device=device).reshape(-1, width)
        self.kv_lens = torch.tensor(lens, dtype=torch.int32, device=device)

    @classmethod
    def trusted(
        cls,
        pages: torch.Tensor,
        kv_lens: torch.Tensor,
        *,
        page_size: int,
        num_pages: int,
        max_kv_len: int,
    ) -> PageTable:
        """Over int32 tensors [num_requests, most_pages] and [num_requests] that are not looked at,
        for captured graphs whose content changes later. A page outside of the cache is then
        undefined behaviour."""
        if pages.dtype != torch.int32 or pages.ndim != 2 or not pages.is_contiguous():
            raise ConfigError(f"pages is {pages.dtype} {list(pages.shape)}; use int32, contiguous")
        if kv_lens.dtype != torch.int32 or kv_lens.shape != pages.shape[:1]:
            raise ConfigError(f"kv_lens is {kv_lens.dtype} {list(kv_lens.shape)}; use int32 [rows]")
        made = cls.__new__(cls)
        made.pages, made.kv_lens, made.host_kv_lens = pages, kv_lens, None
        made.page_size, made.num_pages, made.max_kv_len = page_size, num_pages, max_kv_len
        return made

    @property
    def num_requests(self) -> int:
        return int(self.pages.shape[0])

    def __repr__(self) -> str:
        return f"<PageTable of {self.num_requests} requests, pages of {self.page_size} tokens>"
