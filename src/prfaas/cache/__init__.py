"""The hybrid prefix cache: bookkeeping of blocks and states. Its bytes live in `prfaas.store`.

Engines that own their allocator use `PrefixIndex` and `LeaseTable` alone.
"""

from __future__ import annotations

from prfaas.cache.checkpoints import checkpoint_positions
from prfaas.cache.geometry import PoolGeometry, UnitLayout
from prfaas.cache.leases import LeaseTable
from prfaas.cache.null import NullCache
from prfaas.cache.paged import PagedHybridCache
from prfaas.cache.prefix_index import PrefixIndex
from prfaas.cache.slabs import SlabAllocator

__all__ = [
    "LeaseTable",
    "NullCache",
    "PagedHybridCache",
    "PoolGeometry",
    "PrefixIndex",
    "SlabAllocator",
    "UnitLayout",
    "checkpoint_positions",
]
