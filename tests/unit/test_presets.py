"""Known models: sizes from their published configs, and the figures of arXiv 2604.15039."""

from __future__ import annotations

import pytest

from prfaas.core import DType
from prfaas.errors import ConfigError
from prfaas.spec import PRESETS, ModelSpec, preset

K = 1024
MIB = 2**20
PAPER_LENGTHS = (1024, 8192, 32_000, 130_000)  # what the paper prints as 1K, 8K, 32K, 128K

# name: layers, full layers, bytes per token, fixed MiB with float32 and with bfloat16 state
SIZES = {
    "kimi-linear-48b": (27, 7, 8_064, 41.40625, 21.40625),
    "mimo-v2-flash": (48, 9, 23_040, 24.375, 24.375),
    "qwen3.5-397b": (60, 15, 30_720, 183.1640625, 93.1640625),
    "ring-2.5-1t": (80, 10, 11_520, 280.0, 140.0),
    "minimax-m2.5": (62, 62, 253_952, 0.0, 0.0),
    "qwen3-235b": (94, 94, 192_512, 0.0, 0.0),
    "qwen3-next-80b": (48, 12, 24_576, 73.6875, 37.6875),
    "deepseek-v3": (61, 61, 70_272, 0.0, 0.0),
    "paper-1t": (57, 15, 17_280, 173.90625, 89.90625),
}
# name: MiB at 1K, 8K, 32K, 128K (binary), then at 32K with float8 KV, rounded
TOTALS_MIB = {
    "minimax-m2.5": (248, 1_984, 7_936, 31_744, 3_968),
    "qwen3-235b": (188, 1_504, 6_016, 24_064, 3_008),
    "mimo-v2-flash": (47, 204, 744, 2_904, 372),
    "qwen3.5-397b": (213, 423, 1_143, 4_023, 662),
    "qwen3-next-80b": (98, 266, 842, 3_146, 457),
    "kimi-linear-48b": (49, 104, 293, 1_049, 167),
    "ring-2.5-1t": (291, 370, 640, 1_720, 460),
    "deepseek-v3": (69, 549, 2_196, 8_784, 1_098),
    "paper-1t": (191, 309, 714, 2_334, 441),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_follow_the_published_configs(name):
    num_layers, num_full, bytes_per_token, fixed_mib, fixed_half_mib = SIZES[name]
    model = preset(name)
    assert len(model.layers) == num_layers
    assert model.groups[0].num_layers == num_full
    assert model.bytes_per_token == bytes_per_token
    assert model.fixed_bytes / MIB == fixed_mib
    assert preset(name, state_dtype=DType.BFLOAT16).fixed_bytes / MIB == fixed_half_mib


@pytest.mark.parametrize("name", TOTALS_MIB)
def test_totals_at_four_lengths_and_with_float8(name):
    model = preset(name)
    quantised = preset(name, kv_dtype=DType.FLOAT8)
    totals = [model.kv_bytes(n * K) for n in (1, 8, 32, 128)] + [quantised.kv_bytes(32 * K)]
    assert tuple(round(total / MIB) for total in totals) == TOTALS_MIB[name]


def test_float8_rows_can_keep_the_conv_columns_in_the_models_dtype():
    rows_only = preset("qwen3.5-397b", kv_dtype=DType.FLOAT8, conv_dtype=DType.BFLOAT16)
    assert rows_only.bytes_per_token == 15_360
    assert rows_only.fixed_bytes == preset("qwen3.5-397b").fixed_bytes


def test_table_5_sizes_of_the_papers_model():
    printed_mib = (190.8, 308.9, 701.3, 2316.3)
    for num_tokens, expected in zip(PAPER_LENGTHS, printed_mib, strict=True):
        assert preset("paper-1t").kv_bytes(num_tokens) / MIB == pytest.approx(expected, abs=0.06)


# name: KV throughput in Gbps (table 3), and the prefill seconds that the sizes then imply
TABLE_3 = {
    "kimi-linear-48b": ((1.19, 2.29, 3.87, 4.88), (0.35, 0.38, 0.62, 1.79)),
    "mimo-v2-flash": ((0.82, 2.85, 4.66, 4.71), (0.48, 0.60, 1.31, 5.13)),
    "qwen3.5-397b": ((4.13, 6.28, 8.25, 7.47), (0.43, 0.57, 1.14, 4.48)),
    "ring-2.5-1t": ((7.27, 4.47, 2.59, 1.46), (0.34, 0.69, 2.05, 9.8)),
    "minimax-m2.5": ((4.94, 32.87, 59.93, 47.82), (0.42, 0.51, 1.09, 5.52)),
    "qwen3-235b": ((4.12, 22.42, 33.35, 21.50), (0.38, 0.56, 1.48, 9.31)),
}


@pytest.mark.parametrize("name", TABLE_3)
def test_table_3_rates_imply_plausible_prefill_times(name):
    rates_gbps, implied_s = TABLE_3[name]
    for num_tokens, rate, expected in zip(PAPER_LENGTHS, rates_gbps, implied_s, strict=True):
        prefill_s = preset(name).kv_bytes(num_tokens) * 8 / (rate * 1e9)
        assert prefill_s == pytest.approx(expected, rel=0.02)


def test_layer_positions():
    def full(name):
        return list(preset(name).groups[0].layer_indices)

    assert full("kimi-linear-48b") == [3, 7, 11, 15, 19, 23, 26]
    assert full("mimo-v2-flash") == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    assert full("paper-1t") == [*range(3, 56, 4), 56]
    assert full("ring-2.5-1t") == list(range(7, 80, 8))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="paper-2t") as refusal:
        preset("paper-2t")
    assert all(name in str(refusal.value) for name in PRESETS)


def test_presets_have_distinct_fingerprints():
    assert len({preset(name).fingerprint() for name in PRESETS}) == len(PRESETS)


KIMI_CHECKPOINT = {
    "model_type": "kimi_linear",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
MIMO_CHECKPOINT = {
    "model_type": "mimo_v2_flash",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": [0] + [1, 1, 1, 1, 0] + [1, 1, 1, 1, 1, 0] * 7,
}
QWEN_NEXT_CHECKPOINT = {
    "model_type": "qwen3_next",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("kimi-linear-48b", KIMI_CHECKPOINT),
        ("mimo-v2-flash", MIMO_CHECKPOINT),
        ("qwen3-next-80b", QWEN_NEXT_CHECKPOINT),
    ],
)
def test_a_checkpoints_own_config_gives_the_preset(name, config):
    assert ModelSpec.from_hf_config(config, name=name) == preset(name)
