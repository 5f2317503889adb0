"""Cache layouts read from configs, against the caches that transformers really builds."""

from __future__ import annotations

import warnings

import pytest

from prfaas.core import DType
from prfaas.spec import HF_MODEL_TYPES, ModelSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WINDOW = 24
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GATED_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_chunk_size": 32, "mamba_n_groups": 2}

# model_type -> (config class, the fields that differ from COMMON)
COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = {
    "bailing_hybrid": (
        "BailingHybridConfig",
        {
            **LATENT,
            "num_hidden_layers": 4,
            "layer_group_size": 2,
            "head_dim": 16,
            "num_local_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_mtp_layers": 0,
        },
    ),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**LATENT, "q_lora_rank": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    ),
    "gemma3_text": ("Gemma3TextConfig", {"num_hidden_layers": 6, "sliding_window": WINDOW}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": WINDOW, "num_local_experts": 4}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "shared_intermediate_size": 32,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **LATENT,
            "num_local_experts": 4,
            "linear_attn_config": {
                "kda_layers": [1, 3],
                "full_attn_layers": [2],
                "num_heads": 2,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "lfm2": ("Lfm2Config", {"full_attn_idxs": [1], "block_multiple_of": 16}),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            "moe_intermediate_size": 32,
            "head_dim": 24,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
        },
    ),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba"],
            "num_hidden_layers": None,
            "ssm_state_size": 12,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 32,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**MOE, **GATED_DELTA}),
    "qwen3_5_text": ("Qwen3_5TextConfig", GATED_DELTA),
    "qwen3_moe": ("Qwen3MoeConfig", {**MOE, "head_dim": 32}),
    "qwen3_next": ("Qwen3NextConfig", {**MOE, **GATED_DELTA}),
}


def tiny_config(model_type):
    class_name, fields = TINY[model_type]
    fields = {name: value for name, value in {**COMMON, **fields}.items() if value is not None}
    return getattr(transformers, class_name)(**fields)


def prefilled_layers(config, num_tokens):
    """The cache layers of a random bfloat16 model after a prefill of one request."""
    with warnings.catch_warnings():  # the fallbacks of missing kernels warn once each
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
        cache = transformers.DynamicCache(config=config)
        with torch.inference_mode():
            model(
                input_ids=torch.randint(3, 60, (1, num_tokens)),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
    return cache.layers


def live_bytes(layer):
    """Bytes of one cache layer that a later step reads: all but the oldest conv column."""
    total = 0
    for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
        if tensor is not None:
            total += tensor.numel() * tensor.element_size()
    for tensor in getattr(layer, "recurrent_states", {}).values():
        total += 0 if tensor is None else tensor.numel() * tensor.element_size()
    for tensor in getattr(layer, "conv_states", {}).values():
        total += 0 if tensor is None else tensor[..., 1:].numel() * tensor.element_size()
    return total


def test_every_supported_type_is_tested():
    assert sorted(TINY) == sorted(HF_MODEL_TYPES)


@pytest.mark.parametrize("model_type", TINY)
def test_layer_bytes_equal_those_of_a_real_cache(model_type):
    config = tiny_config(model_type)
    spec = ModelSpec.from_hf_config(config, kv_dtype=DType.BFLOAT16)
    num_tokens = WINDOW + 11
    layers = prefilled_layers(config, num_tokens)
    expected = [0 if s is None else s.entry_bytes(num_tokens) for s in spec.layers]
    assert expected == [live_bytes(layer) for layer in layers]
    assert spec.kv_bytes(num_tokens) == sum(expected)


def test_a_short_request_fills_only_part_of_the_window():
    config = tiny_config("gemma3_text")
    spec = ModelSpec.from_hf_config(config, kv_dtype=DType.BFLOAT16)
    assert spec.kv_bytes(9) == sum(live_bytes(layer) for layer in prefilled_layers(config, 9))


def test_the_text_config_of_a_multimodal_config_is_read():
    text = tiny_config("qwen3_5_text")
    outer = transformers.Qwen3_5Config(text_config=text.to_dict())
    inside = ModelSpec.from_hf_config(outer, kv_dtype=DType.BFLOAT16)
    assert inside == ModelSpec.from_hf_config(text, kv_dtype=DType.BFLOAT16)


def test_a_loaded_checkpoint_config_keeps_its_listed_full_layers():
    """The lists are 1-based; the class's own default pattern would place the full layer wrongly."""
    config = tiny_config("kimi_linear")
    kinds = [s.kind for s in ModelSpec.from_hf_config(config, kv_dtype=DType.BFLOAT16).layers]
    assert kinds == ["linear_state", "mla", "linear_state"]


def test_the_dtype_that_a_loaded_config_names_is_used():
    config = tiny_config("qwen3")
    config.dtype = torch.float16
    spec = ModelSpec.from_hf_config(config)
    assert {layer.dtype for layer in spec.layers} == {DType.FLOAT16}


def test_the_window_of_a_reloaded_mimo_checkpoint_counts_older_tokens_only():
    raw = {**TINY["mimo_v2_flash"][1], "sliding_window": 128, "sliding_window_size": 128}
    config = transformers.MiMoV2FlashConfig(**{**COMMON, **raw})
    spec = ModelSpec.from_hf_config(config, kv_dtype=DType.BFLOAT16)
    assert spec.layers[1].window_tokens == 128
    assert config.sliding_window == 129
