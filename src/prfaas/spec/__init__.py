"""Models as their caches see them: layer specs, KV cache groups, sizes and fingerprints."""

from __future__ import annotations

from prfaas.spec.hf import HF_MODEL_TYPES
from prfaas.spec.layers import (
    FullAttentionSpec,
    LayerSpec,
    LinearStateSpec,
    MLASpec,
    SlidingWindowSpec,
    SlotSpec,
    TensorPart,
    TokenSpec,
)
from prfaas.spec.model import KVCacheGroup, ModelSpec
from prfaas.spec.presets import PRESETS, preset

__all__ = [
    "HF_MODEL_TYPES",
    "PRESETS",
    "FullAttentionSpec",
    "KVCacheGroup",
    "LayerSpec",
    "LinearStateSpec",
    "MLASpec",
    "ModelSpec",
    "SlidingWindowSpec",
    "SlotSpec",
    "TensorPart",
    "TokenSpec",
    "preset",
]
