"""Public models and the paper's 1T model as data, from their published configs.

Sources: the checkpoints' ``config.json``; for ``ring-2.5-1t`` and ``paper-1t``, whose configs are
not public, layer counts fitted to published sizes (arXiv 2604.15039, tables 1, 3 and 5).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TypeAlias

import attrs

from prfaas.core import DType
from prfaas.errors import ConfigError
from prfaas.spec.layers import (
    CacheDTypes,
    FullAttentionSpec,
    LayerSpec,
    LinearStateSpec,
    MLASpec,
    SlidingWindowSpec,
)
from prfaas.spec.model import ModelSpec

_Build: TypeAlias = Callable[[CacheDTypes], LayerSpec]


def _gqa(num_kv_heads: int, key_dim: int, value_dim: int) -> _Build:
    return lambda dtypes: FullAttentionSpec(
        num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim, dtype=dtypes.kv
    )


def _mla(kv_lora_rank: int, rope_dim: int) -> _Build:
    return lambda dtypes: MLASpec(kv_lora_rank=kv_lora_rank, rope_dim=rope_dim, dtype=dtypes.kv)


def _window(num_kv_heads: int, key_dim: int, value_dim: int, window_tokens: int) -> _Build:
    return lambda dtypes: SlidingWindowSpec(
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        window_tokens=window_tokens,
        dtype=dtypes.kv,
    )


def _state(num_heads: int, dim: int, conv_channels: int, conv_columns: int) -> _Build:
    return lambda dtypes: LinearStateSpec.delta_rule(
        num_heads=num_heads,
        key_dim=dim,
        value_dim=dim,
        conv_channels=conv_channels,
        conv_columns=conv_columns,
        state_dtype=dtypes.state,
        conv_dtype=dtypes.conv,
    )


@attrs.frozen
class Preset:
    """A model as data: ``pattern`` has one letter per layer, F for full attention, B for bounded.

    ``full`` and ``bounded`` build the layer specs once the dtypes are known.
    """

    pattern: str
    full: _Build = attrs.field(repr=False)
    bounded: _Build | None = attrs.field(default=None, repr=False)


_MLA_512 = _mla(512, 64)
PRESETS = MappingProxyType(
    {
        "kimi-linear-48b": Preset("BBBF" * 6 + "BBF", _MLA_512, _state(32, 128, 12_288, 3)),
        "mimo-v2-flash": Preset(
            "F" + "BBBBF" + "BBBBBF" * 7, _gqa(4, 192, 128), _window(8, 192, 128, 128)
        ),
        "qwen3.5-397b": Preset("BBBF" * 15, _gqa(2, 256, 256), _state(64, 128, 12_288, 3)),
        "ring-2.5-1t": Preset("BBBBBBBF" * 10, _MLA_512, _state(64, 128, 0, 0)),
        "minimax-m2.5": Preset("F" * 62, _gqa(8, 128, 128)),
        "qwen3-235b": Preset("F" * 94, _gqa(4, 128, 128)),
        "qwen3-next-80b": Preset("BBBF" * 12, _gqa(2, 256, 256), _state(32, 128, 8_192, 3)),
        "deepseek-v3": Preset("F" * 61, _MLA_512),
        "paper-1t": Preset("BBBF" * 14 + "F", _MLA_512, _state(64, 128, 24_576, 3)),
    }
)
"""The known models by name; ``preset(name)`` builds one."""


def preset(
    name: str,
    *,
    kv_dtype: DType = DType.BFLOAT16,
    state_dtype: DType = DType.FLOAT32,
    conv_dtype: DType | None = None,
) -> ModelSpec:
    """Build a known model.

    Args:
        name: a key of ``PRESETS``.
        kv_dtype: dtype of KV rows and windows.
        state_dtype: dtype of recurrent states.
        conv_dtype: dtype of convolution states; by default ``kv_dtype``. An engine that
            quantises only the KV rows passes its model dtype here.

    Raises:
        ConfigError: the name is not known.
    """
    known = PRESETS.get(name)
    if known is None:
        raise ConfigError(f"preset {name!r} is not known; known are {', '.join(PRESETS)}")
    dtypes = CacheDTypes(kv=kv_dtype, state=state_dtype, conv=conv_dtype or kv_dtype)
    kinds: dict[str, LayerSpec] = {"F": known.full(dtypes)}
    if known.bounded is not None:
        kinds["B"] = known.bounded(dtypes)
    return ModelSpec(name=name, layers=tuple(kinds[letter] for letter in known.pattern))
