"""Small models, pools and prompts that many tests share, and hypothesis strategies over them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from prfaas.cache import PoolGeometry
from prfaas.core import BlockHash, DType
from prfaas.hashing import hash_granules, root_hash
from prfaas.spec import (
    FullAttentionSpec,
    LayerSpec,
    LinearStateSpec,
    MLASpec,
    ModelSpec,
    SlidingWindowSpec,
)

BLOCK_SIZE = 4
SLAB_BYTES = 256
"""Holds 4 blocks of `FULL`, 4 of `LATENT` (2 if it has two layers), 2 slots of `LINEAR`, 4 of
`WINDOW`."""

FULL = FullAttentionSpec(num_kv_heads=1, key_dim=4, value_dim=4, dtype=DType.BFLOAT16)
LATENT = MLASpec(kv_lora_rank=6, rope_dim=2, dtype=DType.BFLOAT16)
LINEAR = LinearStateSpec.delta_rule(
    num_heads=1, key_dim=4, value_dim=4, conv_channels=4, conv_columns=2
)
WINDOW = SlidingWindowSpec(
    num_kv_heads=1, key_dim=4, value_dim=4, window_tokens=3, dtype=DType.BFLOAT16
)

HYBRID = (LINEAR, FULL)
LAYERS: tuple[tuple[LayerSpec | None, ...], ...] = (
    HYBRID,
    (FULL,),
    (LINEAR, WINDOW, FULL, None, LATENT, LATENT),
    (LINEAR, WINDOW),
)
"""Hybrid; dense; several groups of each kind with unequal units; states only."""


def small_spec(
    layers: tuple[LayerSpec | None, ...] = HYBRID, *, granule_tokens: int = BLOCK_SIZE
) -> ModelSpec:
    return ModelSpec(name="small", layers=layers, granule_tokens=granule_tokens)


def small_geometry(
    layers: tuple[LayerSpec | None, ...] = HYBRID, *, num_slabs: int = 16
) -> PoolGeometry:
    return PoolGeometry(
        spec=small_spec(layers),
        block_size=BLOCK_SIZE,
        slab_bytes=SLAB_BYTES,
        num_slabs=num_slabs,
    )


def chain_of(tokens: Sequence[int], block_size: int = BLOCK_SIZE) -> tuple[BlockHash, ...]:
    """One hash per complete block."""
    return hash_granules(root_hash(b"small"), tokens, block_size)


def forked_prompts(max_blocks: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts over two kinds of blocks, so that prefixes are often shared, with any tail."""
    blocks = st.lists(st.integers(0, 1), max_size=max_blocks)
    tail = st.integers(0, BLOCK_SIZE - 1)
    return st.tuples(blocks, tail).map(_prompt).filter(bool)


def _prompt(shape: tuple[list[int], int]) -> tuple[int, ...]:
    blocks, num_tail = shape
    tokens = [kind for kind in blocks for _ in range(BLOCK_SIZE)]
    return (*tokens, *[7] * num_tail)
