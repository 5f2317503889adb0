"""One row per Hugging Face model type: where its config states the layers and their geometry.

A field or a layer list that a config does not state is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from prfaas.errors import ConfigError
from prfaas.spec.layers import (
    CacheDTypes,
    FullAttentionSpec,
    LayerSpec,
    LinearStateSpec,
    MLASpec,
    SlidingWindowSpec,
)

_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@attrs.frozen
class HFConfig:
    """The fields of one text model's config, with look-ups that fail by the field's name."""

    model_type: str
    fields: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """Return a field, or None; ``outer.inner`` looks into a nested mapping."""
        value: Any = self.fields
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def count(self, *names: str) -> int:
        """Return the first of ``names`` that is set, which must be a positive whole number."""
        for name in names:
            value = self.get(name)
            if value is not None:
                if type(value) is not int or value < 1:
                    raise ConfigError(
                        f"{self.model_type} config has {name}={value!r}; "
                        "a whole number of at least 1 is needed"
                    )
                return value
        raise self.missing(" or ".join(names))

    def missing(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.model_type} config does not state {what}; add it, or pass the loaded config "
            "object, which has every default filled in"
        )

    @property
    def listed_layers(self) -> list[str] | None:
        value = self.get("layer_types") or self.get("layers_block_type")
        return None if value is None else list(value)

    @property
    def num_kv_heads(self) -> int:
        return self.count("num_key_value_heads", "num_attention_heads")

    @property
    def head_dim(self) -> int:
        if self.get("head_dim") is None:
            return self.count("hidden_size") // self.count("num_attention_heads")
        return self.count("head_dim")


_LayerRule: TypeAlias = Callable[[HFConfig, CacheDTypes], LayerSpec]
_ListRule: TypeAlias = Callable[[HFConfig], "list[str]"]


def _grouped_query(config: HFConfig, dtypes: CacheDTypes) -> LayerSpec:
    dim = config.head_dim
    return FullAttentionSpec(
        num_kv_heads=config.num_kv_heads, key_dim=dim, value_dim=dim, dtype=dtypes.kv
    )


def _latent(config: HFConfig, dtypes: CacheDTypes) -> LayerSpec:
    return MLASpec(
        kv_lora_rank=config.count("kv_lora_rank"),
        rope_dim=config.count("qk_rope_head_dim"),
        dtype=dtypes.kv,
    )


def _sliding(config: HFConfig, dtypes: CacheDTypes) -> LayerSpec:
    dim = config.head_dim
    # A window of w tokens includes the query itself, so w - 1 older rows are kept.
    return SlidingWindowSpec(
        num_kv_heads=config.num_kv_heads,
        key_dim=dim,
        value_dim=dim,
        window_tokens=config.count("sliding_window") - 1,
        dtype=dtypes.kv,
    )


def _mimo_full(config: HFConfig, dtypes: CacheDTypes) -> LayerSpec:
    return FullAttentionSpec(
        num_kv_heads=config.count("num_key_value_heads"),
        key_dim=config.count("head_dim"),
        value_dim=config.count("v_head_dim"),
        dtype=dtypes.kv,
    )


def _mimo_sliding(config: HFConfig, dtypes: CacheDTypes) -> LayerSpec:
    # The checkpoint's sliding_window_size counts the older tokens only; the config class turns it
    # into sliding_window, which includes the query.
    if config.get("sliding_window_size") is not None:
        window_tokens = config.count("sliding_window_size")
    else:
        window_tokens = config.count("sliding_window") - 1
    if config.get("swa_num_key_value_heads") is not None:
        num_kv_heads = config.count("swa_num_key_value_heads")
    else:
        num_kv_heads = 2 * config.count("num_key_value_heads")
    return SlidingWindowSpec(
        num_kv_heads=num_kv_heads,
        key_dim=config.count("swa_head_dim", "head_dim"),
        value_dim=config.count("swa_v_head_dim", "v_head_dim"),
        window_tokens=window_tokens,
        dtype=dtypes.kv,
    )


def _gated_delta_net(config: HFConfig, dtypes: CacheDTypes) -> LayerSpec:
    key_heads = config.count("linear_num_key_heads")
    key_dim = config.count("linear_key_head_dim")
    value_heads = config.count("linear_num_value_heads")
    value_dim = config.count("linear_value_head_dim")
    return LinearStateSpec.delta_rule(
        num_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_channels=2 * key_heads * key_dim + value_heads * value_dim,
        conv_columns=config.count("linear_conv_kernel_dim") - 1,
        state_dtype=dtypes.state,
        conv_dtype=dtypes.conv,
    )


def _kimi_delta(*, heads: Sequence[str], dim: Sequence[str], kernel: Sequence[str]) -> _LayerRule:
    """KDA: square states, with one convolution over q, k and v; the fields differ by family."""

    def rule(config: HFConfig, dtypes: CacheDTypes) -> LayerSpec:
        num_heads, head_dim = config.count(*heads), config.count(*dim)
        return LinearStateSpec.delta_rule(
            num_heads=num_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            conv_channels=3 * num_heads * head_dim,
            conv_columns=config.count(*kernel) - 1,
            state_dtype=dtypes.state,
            conv_dtype=dtypes.conv,
        )

    return rule


def _mamba2(config: HFConfig, dtypes: CacheDTypes) -> LayerSpec:
    heads = config.count("mamba_n_heads", "mamba_num_heads")
    if config.get("mamba_d_head") == "auto":
        head_dim = config.count("mamba_expand") * config.count("hidden_size") // heads
    else:
        head_dim = config.count("mamba_d_head", "mamba_head_dim")
    state_dim = config.count("mamba_d_state", "ssm_state_size")
    groups = config.count("mamba_n_groups", "n_groups")
    return LinearStateSpec.delta_rule(
        num_heads=heads,
        key_dim=head_dim,
        value_dim=state_dim,
        conv_channels=heads * head_dim + 2 * groups * state_dim,
        conv_columns=config.count("mamba_d_conv", "conv_kernel") - 1,
        state_dtype=dtypes.state,
        conv_dtype=dtypes.conv,
    )


def _short_conv(config: HFConfig, dtypes: CacheDTypes) -> LayerSpec:
    return LinearStateSpec.delta_rule(
        num_heads=0,
        key_dim=0,
        value_dim=0,
        conv_channels=config.count("hidden_size"),
        conv_columns=config.count("conv_L_cache") - 1,
        conv_dtype=dtypes.conv,
    )


def _listed(config: HFConfig) -> list[str]:
    if config.listed_layers is None:
        raise config.missing("layer_types")
    return config.listed_layers


def _all_full(config: HFConfig) -> list[str]:
    if config.listed_layers is None and config.get("use_sliding_window"):
        raise config.missing("layer_types, which a model with use_sliding_window needs")
    return config.listed_layers or ["full_attention"] * config.count("num_hidden_layers")


def _every(field: str, other: str) -> _ListRule:
    """Full attention in the last layer of every ``field`` layers, ``other`` elsewhere."""

    def rule(config: HFConfig) -> list[str]:
        if config.listed_layers is not None:
            return config.listed_layers
        if config.get(field) is None:
            raise config.missing(f"layer_types or {field}")
        interval = config.count(field)
        return [
            other if (index + 1) % interval else "full_attention"
            for index in range(config.count("num_hidden_layers"))
        ]

    return rule


def _full_at(field: str, other: str) -> _ListRule:
    """Full attention at the 0-based indices listed in ``field``, ``other`` elsewhere."""

    def rule(config: HFConfig) -> list[str]:
        if config.listed_layers is not None:
            return config.listed_layers
        if config.get(field) is None:
            raise config.missing(f"layer_types or {field}")
        full = set(config.get(field))
        return [
            "full_attention" if index in full else other
            for index in range(config.count("num_hidden_layers"))
        ]

    return rule


def _uncontradicted(config: HFConfig, names: list[str], field: str) -> list[str]:
    if config.listed_layers not in (None, names):
        raise ConfigError(
            f"{config.model_type} config contradicts itself: layer_types is "
            f"{config.listed_layers} but {field} means {names}; remove one of them"
        )
    return names


def _kimi_layers(config: HFConfig) -> list[str]:
    """Read the 1-based lists of a checkpoint, which ``layer_types`` must not contradict."""
    full = config.get("linear_attn_config.full_attn_layers")
    linear = config.get("linear_attn_config.kda_layers")
    if full is None or linear is None:
        return _listed(config)
    num_layers = config.count("num_hidden_layers")
    if sorted([*full, *linear]) != list(range(1, num_layers + 1)):
        raise ConfigError(
            f"{config.model_type} config lists full_attn_layers {full} and kda_layers {linear}; "
            f"together they must name each of the layers 1 to {num_layers} once"
        )
    names = [
        "full_attention" if number in full else "linear_attention"
        for number in range(1, num_layers + 1)
    ]
    return _uncontradicted(config, names, "linear_attn_config (1-based)")


def _mimo_layers(config: HFConfig) -> list[str]:
    """Read the 0/1 flags of a checkpoint, which ``layer_types`` must not contradict."""
    pattern = config.get("hybrid_layer_pattern")
    if pattern is None:
        return _listed(config)
    names = ["sliding_attention" if flag else "full_attention" for flag in pattern]
    return _uncontradicted(config, names, "hybrid_layer_pattern")


def _nemotron_layers(config: HFConfig) -> list[str]:
    pattern = config.get("hybrid_override_pattern")
    if config.listed_layers is not None or pattern is None:
        return _listed(config)
    return [_NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]


@attrs.frozen
class HFFamily:
    """How one model type spells its layer list and the geometry of each kind of layer."""

    layers: _ListRule
    full: _LayerRule
    linear: _LayerRule | None = None
    sliding: _LayerRule | None = None

    def rule(self, layer_type: str) -> _LayerRule | None:
        """Return the rule for one entry of the layer list, old and new spellings alike."""
        match layer_type:
            case "full_attention" | "attention":
                return self.full
            case "linear_attention" | "mamba" | "conv":
                return self.linear
            case "sliding_attention":
                return self.sliding
            case _:
                return None


_DENSE = HFFamily(_all_full, _grouped_query, sliding=_sliding)
_QWEN_HYBRID = HFFamily(
    _every("full_attention_interval", "linear_attention"), _grouped_query, _gated_delta_net
)
HF_FAMILIES = {
    "bailing_hybrid": HFFamily(
        _every("layer_group_size", "linear_attention"),
        _latent,
        _kimi_delta(
            heads=("linear_num_heads", "num_attention_heads"),
            dim=("linear_head_dim", "head_dim"),
            kernel=("linear_conv_kernel_dim", "short_conv_kernel_size"),
        ),
    ),
    "bamba": HFFamily(_full_at("attn_layer_indices", "mamba"), _grouped_query, _mamba2),
    "deepseek_v3": HFFamily(_all_full, _latent),
    "gemma3_text": HFFamily(
        _every("sliding_window_pattern", "sliding_attention"), _grouped_query, sliding=_sliding
    ),
    "gpt_oss": HFFamily(_listed, _grouped_query, sliding=_sliding),
    "granitemoehybrid": HFFamily(_listed, _grouped_query, _mamba2),
    "kimi_linear": HFFamily(
        _kimi_layers,
        _latent,
        _kimi_delta(
            heads=("linear_attn_config.num_heads", "linear_num_heads"),
            dim=("linear_attn_config.head_dim", "linear_head_dim"),
            kernel=("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"),
        ),
    ),
    "lfm2": HFFamily(_full_at("full_attn_idxs", "conv"), _grouped_query, _short_conv),
    "llama": _DENSE,
    "mimo_v2_flash": HFFamily(_mimo_layers, _mimo_full, sliding=_mimo_sliding),
    "minimax_m2": _DENSE,
    "nemotron_h": HFFamily(_nemotron_layers, _grouped_query, _mamba2),
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_moe": _DENSE,
    "qwen3_next": _QWEN_HYBRID,
}
