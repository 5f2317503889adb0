"""Models of transformers whose linear-attention layers compute with our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from kernel_paths import DEVICE, PATHS
from prfaas.errors import ConfigError
from prfaas.integrations.transformers import TransformersEngine, random_model, use_kernels
from prfaas.integrations.transformers import linear_attention as module
from prfaas.kernels import PrefillResult, report

TOLERANCE = 1e-3
"""Largest difference of a float32 logit; their standard deviation is about 1."""


def _bamba() -> Any:
    torch.manual_seed(0)
    config = transformers.BambaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_chunk_size=32,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_5": lambda: random_model("qwen3_5"),
    "qwen3_next": lambda: random_model("qwen3_next"),
    "kimi_linear": lambda: random_model("kimi_linear"),
    "bamba": _bamba,
}
CALLS = {"bamba": ("ssd", "ssd_step")}


@torch.inference_mode()
def run(model: Any, batch: int = 1) -> torch.Tensor:
    """Logits of a prefill, of its extension, and of four steps."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 128, (batch, 137), generator=generator).to(model.device)
    cache = transformers.DynamicCache(config=model.config)
    logits, at = [], 0
    for size in (100, 33, 1, 1, 1, 1):
        output = model(
            input_ids=tokens[:, at : at + size],
            position_ids=torch.arange(at, at + size, device=model.device).expand(batch, -1),
            cache=cache,
            use_cache=True,
        )
        logits.append(output.logits)
        at += size
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("path", PATHS)
def test_logits_are_those_of_the_librarys_own_functions(path: str, family: str, batch: int) -> None:
    prefill, step = CALLS.get(family, ("delta_rule", "delta_rule_step"))
    before = report().calls
    ours, theirs = MODELS[family]().to(DEVICE), MODELS[family]().to(DEVICE)
    num_layers = use_kernels(ours, path=path)
    difference = (run(ours, batch) - run(theirs, batch)).abs().max().item()
    assert difference <= TOLERANCE
    ran = report().calls
    assert ran[prefill, path] - before.get((prefill, path), 0) == 2 * num_layers
    assert ran[step, path] - before.get((step, path), 0) == 4 * num_layers


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
@pytest.mark.parametrize("path", PATHS)
def test_a_kernel_that_forgets_the_state_is_noticed(
    path: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.delta_rule

    def forgetful(*args: Any, **kwargs: Any) -> PrefillResult:
        return real(*args, **{**kwargs, "initial_state": None})

    monkeypatch.setattr(module, "delta_rule", forgetful)
    ours, theirs = MODELS[family]().to(DEVICE), MODELS[family]().to(DEVICE)
    use_kernels(ours, path=path)
    assert (run(ours) - run(theirs)).abs().max().item() > 10 * TOLERANCE


def test_other_models_keep_the_librarys_functions() -> None:
    changed, untouched = random_model("qwen3_5"), random_model("qwen3_5")
    use_kernels(changed)
    before = report().calls
    run(untouched)
    assert report().calls == before


@pytest.mark.parametrize("family", MODELS)
def test_a_gradient_is_refused_not_forgotten(family: str) -> None:
    model = MODELS[family]()
    use_kernels(model)
    with pytest.raises(ConfigError, match="requires a gradient, and the kernels have none"):
        model(input_ids=torch.ones(1, 5, dtype=torch.int64))


@pytest.mark.parametrize("family", MODELS)
def test_packed_rows_are_refused(family: str) -> None:
    """The layers would mix the sequences: not every function is told the borders."""
    model = MODELS[family]()
    use_kernels(model)
    borders = torch.tensor([0, 3, 5], dtype=torch.int32)
    with torch.no_grad(), pytest.raises(ConfigError, match="a layer was given"):
        model(
            input_ids=torch.ones(1, 5, dtype=torch.int64),
            position_ids=torch.tensor([[0, 1, 2, 0, 1]]),
            cu_seqlens=borders,
            cu_seq_lens_q=borders,
            seq_idx=torch.tensor([[0, 0, 0, 1, 1]], dtype=torch.int32),
        )


def test_a_layer_is_not_changed_behind_its_users_back() -> None:
    model = random_model("kimi_linear")
    assert use_kernels(model) == use_kernels(model) == 4
    layer = next(m for m in model.modules() if type(m).__name__ == "KimiLinearDeltaAttention")
    with torch.no_grad(), pytest.raises(ConfigError, match="got cache_params; its name is cache"):
        layer(torch.zeros(1, 3, 64), cache_params=transformers.DynamicCache(config=model.config))
    layer.forward = lambda *_, **__: None
    with pytest.raises(ConfigError, match="already has a forward method of its own"):
        use_kernels(model)


def test_the_reference_path_runs_a_whole_model() -> None:
    ours, theirs = random_model("kimi_linear"), random_model("kimi_linear")
    use_kernels(ours, path="reference")
    assert (run(ours) - run(theirs)).abs().max().item() <= TOLERANCE
    with pytest.raises(ConfigError, match="path is 'cuda'; use one of reference, torch, triton"):
        use_kernels(ours, path="cuda")


def test_a_model_without_linear_layers_is_refused() -> None:
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="no layer of Qwen3ForCausalLM"):
        use_kernels(model)


def test_the_engines_switch() -> None:
    with pytest.raises(ConfigError, match="linear_attention is 'fla'; use transformers or prfaas"):
        TransformersEngine(random_model("qwen3_5"), linear_attention="fla")
    engine = TransformersEngine(random_model("qwen3_5"), linear_attention="prfaas")
    engine.open("r")
    engine.prefill("r", [1, 2, 3], 0)
    config = engine.effective_config()
    assert config["linear_attention"] == "prfaas"
    assert "delta_rule" in config["kernel_calls"]
    assert TransformersEngine(random_model("qwen3_5")).effective_config()["linear_attention"] == (
        "transformers"
    )
