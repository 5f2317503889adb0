"""Both caches keep the contract, and the conformance function notices caches that do not."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from prfaas.cache import NullCache, PagedHybridCache
from prfaas.core import BlockHash, RequestId
from prfaas.seams import CacheEvent, PrefixMatch
from prfaas.testing.cache import check_cache
from strategies import BLOCK_SIZE, LAYERS, small_geometry


@pytest.mark.parametrize("layers", LAYERS)
def test_paged_hybrid_cache(layers: tuple) -> None:
    check_cache(
        lambda: PagedHybridCache(small_geometry(layers, num_slabs=24)), block_size=BLOCK_SIZE
    )


@pytest.mark.parametrize("layers", LAYERS)
def test_null_cache(layers: tuple) -> None:
    check_cache(
        lambda: NullCache(small_geometry(layers, num_slabs=24)), block_size=BLOCK_SIZE, hits=False
    )


class Leaking(PagedHybridCache):
    def release(self, request_id: RequestId) -> None:
        if request_id != "later":
            super().release(request_id)


class Silent(PagedHybridCache):
    def take_events(self) -> tuple[CacheEvent, ...]:
        return super().take_events()[:1]


class Generous(PagedHybridCache):
    def match(self, block_hashes: Sequence[BlockHash], *, max_tokens: int) -> PrefixMatch:
        return super().match(block_hashes, max_tokens=max_tokens + BLOCK_SIZE)


class Lax(PagedHybridCache):
    def commit(
        self, request_id: RequestId, block_hashes: Sequence[BlockHash], num_tokens: int, now: float
    ) -> None:
        num_tokens = min(num_tokens, len(block_hashes) * BLOCK_SIZE)
        super().commit(request_id, block_hashes[: num_tokens // BLOCK_SIZE], num_tokens, now)


class Nameless(PagedHybridCache):
    def match(self, block_hashes: Sequence[BlockHash], *, max_tokens: int) -> PrefixMatch:
        match = super().match(block_hashes, max_tokens=max_tokens)
        return attrs.evolve(match, held_hash=match.cached_hash)


@pytest.mark.parametrize("broken", [Leaking, Silent, Generous, Lax, Nameless, NullCache])
def test_a_broken_cache_is_found_out(broken: type[PagedHybridCache]) -> None:
    with pytest.raises(AssertionError):
        check_cache(lambda: broken(small_geometry(num_slabs=24)), block_size=BLOCK_SIZE)
