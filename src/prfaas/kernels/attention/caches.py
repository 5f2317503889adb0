"""Checks that are the same for every attention operation: caches, pages and options."""

from __future__ import annotations

import functools

import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arguments import check_finite_number, check_multiple, check_tensor
from prfaas.kernels.attention.tiles import MAX_SPLITS
from prfaas.kernels.page_table import PageTable

LARGEST_HEAD = 256
"""Largest head dimension that the Triton kernels of full attention take."""


def check_caches(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, table: PageTable
) -> None:
    """Refuses caches that do not fit the queries, each other or the page table."""
    check_tensor("q", q, shape=("num_tokens", "heads", "head_dim"))
    check = functools.partial(check_tensor, dtypes=(q.dtype,), device=q.device)
    check("key_cache", key_cache, shape=("num_pages", "page_size", "kv_heads", q.shape[2]))
    check("value_cache", value_cache, shape=(*key_cache.shape[:3], "value_dim"))
    check_multiple("q", q.shape[1], "key_cache", key_cache.shape[2])
    check_pages(table, key_cache, "key_cache")


def check_pages(table: PageTable, cache: torch.Tensor, name: str) -> None:
    """Refuses a page table that was made for another cache."""
    if not isinstance(table, PageTable):
        raise ConfigError(
            f"page_table is a {type(table).__name__}; make a prfaas.kernels.PageTable once per "
            "batch"
        )
    if (table.num_pages, table.page_size) != tuple(cache.shape[:2]):
        raise ConfigError(
            f"page_table was made for {table.num_pages} pages of {table.page_size} tokens, {name} "
            f"has {cache.shape[0]} pages of {cache.shape[1]}; make it with the cache's numbers"
        )
    if table.pages.device != cache.device or table.kv_lens.device != cache.device:
        raise ConfigError(
            f"page_table is on {table.pages.device}, {name} is on {cache.device}; make it with "
            "the cache's device"
        )


def check_requests(table: PageTable, count: int, what: str) -> None:
    """Refuses a page table of another number of requests."""
    if table.num_requests != count:
        raise ConfigError(
            f"page_table has {table.num_requests} requests, {what} has {count}; give one each"
        )


def check_scale(scale: float | None, head_dim: int) -> float:
    """The factor of the logits; None is ``head_dim ** -0.5``."""
    return float(head_dim**-0.5) if scale is None else check_positive("scale", scale)


def check_positive(name: str, value: object) -> float:
    """Refuses a factor of the logits that is not above zero: the kernels find the largest logit
    before they scale."""
    number = check_finite_number(name, value)
    if number <= 0:
        raise ConfigError(f"{name} is {number}; it must be positive")
    return number


def check_count(name: str, value: int | None, most: int | None = None) -> None:
    """Refuses a window or a number of splits that is no whole number of at least 1."""
    if value is None:
        return
    if type(value) is not int or value < 1 or (most is not None and value > most):
        limit = "at least 1" if most is None else f"1 to {most}"
        raise ConfigError(f"{name} is {value!r}; use a whole number, {limit}, or None")


def check_splits(num_splits: int | None) -> None:
    check_count("num_splits", num_splits, MAX_SPLITS)


def refuse_heads(*widths: int) -> str | None:
    """Why the kernels cannot take these head dimensions; None if they can."""
    if max(widths) > LARGEST_HEAD:
        return f"a head dimension of {max(widths)} is more than {LARGEST_HEAD}"
    return None
