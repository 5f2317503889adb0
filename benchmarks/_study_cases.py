"""What the study asks about: models, the systems that hold them, and laws of prompt lengths."""

from __future__ import annotations

from functools import cache

import attrs

from prfaas.capacity import LogNormalLengths
from prfaas.paper.profiles import LENGTHS as PAPER_LENGTHS
from prfaas.spec import ModelSpec, preset

LAWS = {
    "paper": PAPER_LENGTHS,
    "chat": LogNormalLengths(mu=8.35, sigma=1.0, min_tokens=128, max_tokens=32_768),
    "agent": LogNormalLengths(mu=11.2, sigma=0.7, min_tokens=1024, max_tokens=131_072),
}


def law_mean(name: str) -> int:
    """Mean prompt of a law, in tokens."""
    return round(LAWS[name].mean_above(0) or 0)


@attrs.frozen(kw_only=True)
class Hardware:
    name: str
    database: str
    num_gpus: int = 8
    expert_parallel: int | None = None


@attrs.frozen(kw_only=True)
class Case:
    """One model in one precision, on the systems that hold it and that the database knows."""

    model: str
    checkpoint: str
    systems: tuple[Hardware, ...]
    weights: str | None = None


def _hardware(names: str, num_gpus: int = 8) -> tuple[Hardware, ...]:
    known = {
        "A100": "a100_sxm",
        "H100": "h100_sxm",
        "H200": "h200_sxm",
        "B200": "b200_sxm",
        "L40S": "l40s",
        "RTX6000": "rtx_pro_6000_server",
    }
    return tuple(Hardware(name=n, database=known[n], num_gpus=num_gpus) for n in names.split())


CASES = (
    Case(
        model="qwen3.5-397b",
        checkpoint="Qwen/Qwen3.5-397B-A17B",
        weights="fp8_block",
        systems=_hardware("H100 H200 B200"),
    ),
    Case(
        model="mimo-v2-flash",
        checkpoint="XiaomiMiMo/MiMo-V2-Flash",
        weights="fp8_block",
        systems=_hardware("H100 H200 B200"),
    ),
    Case(
        model="minimax-m2.5",
        checkpoint="MiniMaxAI/MiniMax-M2.5",
        weights="fp8_block",
        systems=_hardware("H100 H200 B200"),
    ),
    Case(
        model="qwen3-235b",
        checkpoint="Qwen/Qwen3-235B-A22B",
        weights="fp8_block",
        systems=_hardware("H100 H200 B200"),
    ),
    Case(
        model="mimo-v2-flash",
        checkpoint="XiaomiMiMo/MiMo-V2-Flash",
        weights="bfloat16",
        systems=_hardware("RTX6000 H200"),
    ),
    Case(
        model="minimax-m2.5",
        checkpoint="MiniMaxAI/MiniMax-M2.5",
        weights="bfloat16",
        systems=_hardware("A100 H200"),
    ),
    Case(
        model="qwen3-235b",
        checkpoint="Qwen/Qwen3-235B-A22B",
        weights="bfloat16",
        systems=_hardware("A100 RTX6000 H200 B200"),
    ),
    Case(
        model="qwen3.5-397b",
        checkpoint="Qwen/Qwen3.5-397B-A17B",
        weights="bfloat16",
        systems=_hardware("H200 B200"),
    ),
    Case(
        model="qwen3.5-35b",
        checkpoint="Qwen/Qwen3.5-35B-A3B",
        weights="bfloat16",
        systems=_hardware("L40S RTX6000 H100 H200 B200", num_gpus=2),
    ),
    Case(
        model="kimi-k3",
        checkpoint="moonshotai/Kimi-K3",
        systems=(
            Hardware(name="GB200", database="gb200", num_gpus=16, expert_parallel=1),
            Hardware(name="B300", database="b300_sxm"),
        ),
    ),
)


_STAGES = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
_KIMI_FULL = [*range(4, 93, 4), 93]
_CONFIGS = {
    "qwen3.5-35b": {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "layer_types": _STAGES * 10,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "kimi-k3": {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "num_hidden_layers": 93,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": _KIMI_FULL,
            "kda_layers": [layer for layer in range(1, 94) if layer not in _KIMI_FULL],
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
}
"""What decides the size of the cache in the public config.json, where no preset has it."""


@cache
def spec_of(model: str) -> ModelSpec:
    """The model's cache, with bf16 rows as the times are measured."""
    if model in _CONFIGS:
        return ModelSpec.from_hf_config(_CONFIGS[model], name=model)
    return preset(model)
