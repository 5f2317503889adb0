"""Read cache layouts from Hugging Face model configs without importing transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prfaas.core import DType
from prfaas.errors import ConfigError
from prfaas.spec.hf_families import HF_FAMILIES, HFConfig, HFFamily
from prfaas.spec.layers import CacheDTypes, LayerSpec

_CACHELESS = ("mlp", "moe")
_DTYPES = {dtype.label: dtype for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)}

HF_MODEL_TYPES = tuple(HF_FAMILIES)
"""The text model types that can be read; multimodal configs are read by their ``text_config``."""


def _fields(config: object) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        fields: Mapping[str, Any] = to_dict()
        return fields
    if not hasattr(config, "__dict__"):
        raise ConfigError(
            f"config is a {type(config).__name__}; pass the contents of a config.json as a "
            "mapping, or a config object"
        )
    return {"model_type": getattr(config, "model_type", None), **vars(config)}


def _named_dtype(model_type: str, *levels: Mapping[str, Any]) -> DType:
    for fields in levels:
        for key in ("dtype", "torch_dtype"):
            if fields.get(key) is not None:
                label = str(fields[key]).removeprefix("torch.")
                if label not in _DTYPES:
                    raise ConfigError(
                        f"{model_type} config has {key}={label!r}, known are "
                        f"{', '.join(_DTYPES)}; pass kv_dtype=, or change it in the config"
                    )
                return _DTYPES[label]
    raise ConfigError(
        f"{model_type} config names no dtype; pass kv_dtype=, or add it to the config"
    )


def read_hf_config(
    config: object,
    *,
    kv_dtype: DType | None,
    state_dtype: DType,
    conv_dtype: DType | None,
) -> tuple[str, tuple[LayerSpec | None, ...]]:
    """Return the text model's type and one spec per layer; see ``ModelSpec.from_hf_config``."""
    outer = _fields(config)
    inner = outer if outer.get("text_config") is None else _fields(outer["text_config"])
    model_type = inner.get("model_type")
    family = HF_FAMILIES.get(str(model_type))
    if family is None:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported are "
            f"{', '.join(HF_FAMILIES)}; build a ModelSpec from layer specs instead"
        )
    reader = HFConfig(str(model_type), inner)
    kv = _named_dtype(reader.model_type, inner, outer) if kv_dtype is None else kv_dtype
    dtypes = CacheDTypes(kv=kv, state=state_dtype, conv=conv_dtype or kv)
    return reader.model_type, _build_layers(reader, family, dtypes)


def _build_layers(
    config: HFConfig, family: HFFamily, dtypes: CacheDTypes
) -> tuple[LayerSpec | None, ...]:
    layer_types = family.layers(config)
    if config.get("num_hidden_layers") not in (None, len(layer_types)):
        raise ConfigError(
            f"{config.model_type} config lists {len(layer_types)} layers but num_hidden_layers is "
            f"{config.get('num_hidden_layers')}; make them agree"
        )
    specs: dict[str, LayerSpec | None] = dict.fromkeys(_CACHELESS)
    for index, layer_type in enumerate(layer_types):
        if layer_type not in specs:
            rule = family.rule(layer_type)
            if rule is None:
                raise ConfigError(
                    f"layer {index} of the {config.model_type} config is {layer_type!r}, which is "
                    "not known for this model type; build a ModelSpec from layer specs instead"
                )
            specs[layer_type] = rule(config, dtypes)
    return tuple(specs[layer_type] for layer_type in layer_types)
