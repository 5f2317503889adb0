"""Tiny models, and memory that holds one entry of them at random places."""

from __future__ import annotations

import random
from collections.abc import Iterable

from prfaas.cache.geometry import PoolGeometry
from prfaas.cache.slabs import SlabAllocator
from prfaas.core import DType
from prfaas.seams.transport import Span
from prfaas.spec import (
    FullAttentionSpec,
    LayerSpec,
    LinearStateSpec,
    MLASpec,
    ModelSpec,
    SlidingWindowSpec,
)
from prfaas.transfer import (
    EntryLayout,
    EntryPlace,
    place,
)

FULL = FullAttentionSpec(num_kv_heads=1, key_dim=3, value_dim=2, dtype=DType.FLOAT8)
MLA = MLASpec(kv_lora_rank=3, rope_dim=1, dtype=DType.BFLOAT16)
WINDOW = SlidingWindowSpec(
    num_kv_heads=1, key_dim=2, value_dim=1, window_tokens=6, dtype=DType.FLOAT8
)
STATE = LinearStateSpec.delta_rule(
    num_heads=1, key_dim=2, value_dim=3, conv_channels=5, conv_columns=3
)


def tiny_spec(*layers: LayerSpec | None) -> ModelSpec:
    """A model of a few bytes per token whose blocks are multiples of 4 tokens."""
    return ModelSpec(name="tiny", layers=layers, granule_tokens=4)


HYBRID = tiny_spec(STATE, WINDOW, FULL, None, STATE, FULL, MLA)


def gather(memory: bytes | bytearray, spans: Iterable[Span]) -> bytes:
    return b"".join(bytes(memory[span.offset : span.offset + span.num_bytes]) for span in spans)


def scatter(memory: bytearray, spans: Iterable[Span], data: bytes) -> None:
    at = 0
    for span in spans:
        memory[span.offset : span.offset + span.num_bytes] = data[at : at + span.num_bytes]
        at += span.num_bytes
    assert at == len(data)


class Pool:
    """Memory of one side, with blocks and slots for one entry at random places."""

    def __init__(
        self, spec: ModelSpec, num_tokens: int, block_size: int, fill: int, rng: random.Random
    ) -> None:
        self.geometry = PoolGeometry.for_spec(spec, block_size=block_size, pool_bytes=1 << 15)
        self.memory = bytearray([fill]) * self.geometry.pool_bytes
        allocator = SlabAllocator(self.geometry)
        needs = {group.group_id: 1 for group in spec.groups}
        for group_id in self.geometry.token_groups:
            needs[group_id] = -(-num_tokens // block_size) + 2
        units = {g: rng.sample(ids, len(ids)) for g, ids in allocator.allocate_many(needs).items()}
        self.tables = {g: units[g] for g in self.geometry.token_groups}
        self.slots = {g: units[g][0] for g in self.geometry.slot_groups}

    def place(self, layout: EntryLayout) -> EntryPlace:
        return place(layout, self.geometry, self.tables, self.slots)

    def read(self, layout: EntryLayout, offset: int, num_bytes: int) -> bytes:
        return gather(self.memory, self.place(layout).spans(offset, num_bytes))

    def write(self, layout: EntryLayout, offset: int, data: bytes) -> None:
        scatter(self.memory, self.place(layout).spans(offset, len(data)), data)
