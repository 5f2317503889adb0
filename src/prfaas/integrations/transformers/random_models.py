"""Tiny hybrid models with random weights, built from a local configuration: nothing is downloaded.

The default initialisation makes logits almost independent of the context; here weights are scaled
so that every cached tensor matters, and an exchange of caches that goes wrong shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from prfaas.errors import ConfigError

VOCAB_SIZE = 256
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GATED_DELTA_NET: Mapping[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_THREE_TO_ONE = ["linear_attention"] * 3 + ["full_attention"]


def _qwen3_5() -> Any:
    return transformers.Qwen3_5TextConfig(
        **_COMMON,
        **_GATED_DELTA_NET,
        num_hidden_layers=8,
        layer_types=_THREE_TO_ONE * 2,
    )


def _qwen3_next() -> Any:
    return transformers.Qwen3NextConfig(
        **_COMMON,
        **_GATED_DELTA_NET,
        num_hidden_layers=8,
        layer_types=_THREE_TO_ONE * 2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def _kimi_linear() -> Any:
    # Full attention at every fourth layer and at the last, the pattern of the published model.
    return transformers.KimiLinearConfig(
        **_COMMON,
        num_hidden_layers=6,
        layer_types=[*_THREE_TO_ONE, "linear_attention", "full_attention"],
        num_key_value_heads=4,
        moe_intermediate_size=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        linear_head_dim=16,
        linear_num_heads=4,
    )


_CONFIGS: Mapping[str, Callable[[], Any]] = {
    "kimi_linear": _kimi_linear,
    "qwen3_5": _qwen3_5,
    "qwen3_next": _qwen3_next,
}
FAMILIES = tuple(_CONFIGS)


def random_model(family: str, *, seed: int = 0) -> Any:
    """A model of one family, float32, eval mode; the same for the same seed.

    Raises:
        ConfigError: unknown family.
    """
    if family not in _CONFIGS:
        raise ConfigError(f"unknown model family {family!r}; known: {', '.join(FAMILIES)}")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[family]()).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = _scale(name, parameter)
            if scale is not None:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * scale)
    return model.float()


def _scale(name: str, parameter: Any) -> float | None:
    """Standard deviation for a parameter; None leaves it as the model made it."""
    if "A_log" in name or "dt" in name or "norm" in name:
        return None
    if "embed" in name or "conv" in name:
        return 0.5 if parameter.ndim > 1 else None
    if parameter.ndim == 2 or (parameter.ndim == 3 and "expert" in name):
        return 1 / math.sqrt(parameter.shape[-1])
    return None
