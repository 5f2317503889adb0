"""A cache that never hits: the baseline that every other cache must beat and agree with."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.cache.paged import PagedHybridCache
from prfaas.core import BlockHash, RequestId
from prfaas.seams.cache import PrefixMatch


class NullCache(PagedHybridCache):
    """Hands out blocks and slots of a pool, makes nothing findable, and has nothing to evict."""

    def match(self, block_hashes: Sequence[BlockHash], *, max_tokens: int) -> PrefixMatch:
        return PrefixMatch()

    def commit(
        self, request_id: RequestId, block_hashes: Sequence[BlockHash], num_tokens: int, now: float
    ) -> None:
        """Checks the arguments only."""
        self._committable(request_id, block_hashes, num_tokens)
