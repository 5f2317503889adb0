"""Layer specs, the groups they form, and the model they add up to."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core import DType
from prfaas.errors import ConfigError
from prfaas.spec import (
    HF_MODEL_TYPES,
    FullAttentionSpec,
    LinearStateSpec,
    MLASpec,
    ModelSpec,
    SlidingWindowSpec,
    TensorPart,
    preset,
)

FULL = FullAttentionSpec(num_kv_heads=2, key_dim=6, value_dim=4, dtype=DType.BFLOAT16)
MLA = MLASpec(kv_lora_rank=8, rope_dim=2, dtype=DType.BFLOAT16)
WINDOW = SlidingWindowSpec(
    num_kv_heads=3, key_dim=5, value_dim=4, window_tokens=10, dtype=DType.FLOAT16
)
STATE = LinearStateSpec.delta_rule(
    num_heads=2, key_dim=4, value_dim=6, conv_channels=20, conv_columns=3
)
HYBRID = ModelSpec(name="hybrid", layers=(STATE, WINDOW, FULL, None, STATE, FULL, WINDOW, STATE))
LAYERS = st.lists(
    st.sampled_from([FULL, MLA, WINDOW, STATE, None]), min_size=1, max_size=12
).filter(any)


def part_shapes(spec):
    return [(part.name, part.shape, part.num_bytes) for part in spec.parts]


def test_rows_are_the_concatenation_of_their_parts():
    assert part_shapes(FULL) == [("key", (2, 6), 24), ("value", (2, 4), 16)]
    assert part_shapes(MLA) == [("latent", (8,), 16), ("rope", (2,), 4)]
    assert part_shapes(WINDOW) == [("key", (3, 5), 30), ("value", (3, 4), 24)]
    for spec in (FULL, MLA, WINDOW):
        assert spec.row_bytes == sum(part.num_bytes for part in spec.parts)


def test_a_delta_rule_state_has_a_recurrent_and_a_conv_part():
    assert part_shapes(STATE) == [("recurrent", (2, 4, 6), 192), ("conv", (20, 3), 120)]
    assert [part.dtype for part in STATE.parts] == [DType.FLOAT32, DType.BFLOAT16]
    assert STATE.slot_bytes == 312


def test_relatives_of_the_delta_rule_leave_a_part_out():
    lightning = LinearStateSpec.delta_rule(num_heads=2, key_dim=4, value_dim=4)
    assert [part.name for part in lightning.parts] == ["recurrent"]
    short_conv = LinearStateSpec.delta_rule(
        num_heads=0, key_dim=0, value_dim=0, conv_channels=8, conv_columns=2
    )
    assert part_shapes(short_conv) == [("conv", (8, 2), 32)]


def test_token_kinds_grow_slots_do_not():
    assert [spec.is_token_kind for spec in (FULL, MLA, WINDOW, STATE)] == [True, True, False, False]
    assert [FULL.entry_bytes(n) for n in (0, 1, 100)] == [0, 40, 4000]
    assert [MLA.entry_bytes(n) for n in (0, 1, 100)] == [0, 20, 2000]
    assert [WINDOW.entry_bytes(n) for n in (0, 1, 10, 11)] == [0, 54, 540, 540]
    assert WINDOW.slot_bytes == 540
    assert [STATE.entry_bytes(n) for n in (0, 1, 100)] == [312, 312, 312]


@pytest.mark.parametrize("spec", [FULL, MLA, WINDOW, STATE], ids=lambda spec: spec.kind)
def test_a_negative_length_is_refused(spec):
    with pytest.raises(ConfigError, match="num_tokens is -1"):
        spec.entry_bytes(-1)


@pytest.mark.parametrize("spec", [FULL, MLA, WINDOW], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("bad", [0, -1, 2.0, True, None])
def test_every_dimension_is_a_positive_whole_number(spec, bad):
    dimensions = [field.name for field in attrs.fields(type(spec)) if field.name != "dtype"]
    for name in dimensions:
        with pytest.raises(ConfigError, match=name):
            attrs.evolve(spec, **{name: bad})
    with pytest.raises(ConfigError, match="DType"):
        attrs.evolve(spec, dtype="bfloat16")


@pytest.mark.parametrize("shape", [(), (0,), (2, -1), (2.0,), [2, 3], (True,)])
def test_part_shapes_are_checked(shape):
    with pytest.raises(ConfigError, match="shape"):
        TensorPart(name="x", shape=shape, dtype=DType.FLOAT32)


def test_states_are_checked():
    part = TensorPart(name="x", shape=(2,), dtype=DType.FLOAT32)
    for parts in ((), [part]):
        with pytest.raises(ConfigError, match="at least 1 TensorPart"):
            LinearStateSpec(parts=parts)
    with pytest.raises(ConfigError, match="repeat"):
        LinearStateSpec(parts=(part, part))


def test_equal_layers_form_one_group_token_kinds_first():
    groups = HYBRID.groups
    assert [(g.group_id, g.name, g.layer_indices) for g in groups] == [
        (0, "full_attention", (2, 5)),
        (1, "linear_state", (0, 4, 7)),
        (2, "sliding_window", (1, 6)),
    ]
    assert [g.num_layers for g in groups] == [2, 3, 2]
    assert groups[0].row_bytes == 80
    assert groups[1].slot_bytes == 3 * 312
    assert (groups[2].row_bytes, groups[2].slot_bytes) == (108, 1080)
    assert [g.entry_bytes(5) for g in groups] == [400, 936, 540]
    assert [g.layer_entry_bytes(5) for g in groups] == [200, 312, 270]


def test_groups_of_one_kind_are_told_apart_by_name():
    wide = attrs.evolve(FULL, num_kv_heads=4)
    model = ModelSpec(name="m", layers=(wide, STATE, FULL))
    assert [(g.name, g.layer_spec) for g in model.groups] == [
        ("full_attention", wide),
        ("full_attention_1", FULL),
        ("linear_state", STATE),
    ]


def test_a_group_refuses_the_size_it_does_not_have():
    with pytest.raises(ConfigError, match="use row_bytes"):
        _ = HYBRID.groups[0].slot_bytes
    with pytest.raises(ConfigError, match="use slot_bytes"):
        _ = HYBRID.groups[1].row_bytes


@given(LAYERS, st.integers(0, 40), st.integers(0, 40))
def test_model_bytes_are_the_sum_of_its_layers(layers, n, held):
    model = ModelSpec(name="m", layers=tuple(layers))
    kept = [layer for layer in layers if layer is not None]
    assert model.kv_bytes(n) == sum(layer.entry_bytes(n) for layer in kept)
    assert model.kv_bytes(n) == sum(group.entry_bytes(n) for group in model.groups)
    assert model.kv_bytes(50) == 50 * model.bytes_per_token + model.fixed_bytes
    assert sorted(i for g in model.groups for i in g.layer_indices) == [
        i for i, layer in enumerate(layers) if layer is not None
    ]
    held = min(held, n)
    rows = sum(layer.entry_bytes(held) for layer in kept if layer.is_token_kind)
    assert model.kv_bytes_delta(n, held) == model.kv_bytes(n) - rows


@pytest.mark.parametrize(("n", "held"), [(5, 6), (5, -1), (-1, 0)])
def test_a_receiver_holds_from_none_to_all_of_the_tokens(n, held):
    with pytest.raises(ConfigError, match="num_"):
        HYBRID.kv_bytes_delta(n, held)


@pytest.mark.parametrize("n", [1.5, True, "5", None, -1])
def test_a_length_is_a_whole_number(n):
    with pytest.raises(ConfigError, match=f"num_tokens is {n!r}; a length is a whole number"):
        HYBRID.kv_bytes(n)
    for layer in (FULL, MLA, WINDOW, STATE):
        with pytest.raises(ConfigError, match="whole number"):
            layer.entry_bytes(n)


def test_the_dense_equivalent_copies_the_models_own_full_layer():
    dense = HYBRID.as_full_attention()
    assert [layer == FULL for layer in dense.layers] == [
        layer is not None for layer in HYBRID.layers
    ]
    assert dense.layers[3] is None
    assert dense.kv_bytes(100) == 7 * FULL.entry_bytes(100)
    assert dense.fingerprint() != HYBRID.fingerprint()
    ring = preset("ring-2.5-1t")
    assert ring.as_full_attention().bytes_per_token == 8 * ring.bytes_per_token
    with pytest.raises(ConfigError, match="no full-attention layer"):
        ModelSpec(name="m", layers=(STATE,)).as_full_attention()


def test_the_fingerprint_covers_everything_that_decides_the_cache():
    variants = [
        HYBRID,
        attrs.evolve(HYBRID, name="other"),
        attrs.evolve(HYBRID, revision="2"),
        attrs.evolve(HYBRID, granule_tokens=128),
        attrs.evolve(HYBRID, layers=HYBRID.layers[::-1]),
        attrs.evolve(HYBRID, layers=(*HYBRID.layers, None)),
        attrs.evolve(HYBRID, layers=(MLA, *HYBRID.layers[1:])),
        *(
            attrs.evolve(HYBRID, layers=(STATE, attrs.evolve(WINDOW, **change)))
            for change in (
                {},
                {"num_kv_heads": 4},
                {"key_dim": 6},
                {"value_dim": 5},
                {"window_tokens": 11},
                {"dtype": DType.BFLOAT16},
            )
        ),
        # The same bytes and parts, but another kind of layer.
        ModelSpec(name="hybrid", layers=(FULL,)),
        ModelSpec(name="hybrid", layers=(LinearStateSpec(parts=FULL.parts),)),
    ]
    fingerprints = {model.fingerprint() for model in variants}
    assert len(fingerprints) == len(variants)
    assert {len(fingerprint) for fingerprint in fingerprints} == {16}
    assert attrs.evolve(HYBRID).fingerprint() == HYBRID.fingerprint()


def test_golden_fingerprint():
    """A changed value here means that clusters of two releases cannot share cache entries."""
    assert HYBRID.fingerprint().hex() == "ef2a82e577e380bc44cc46f570185dc7"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, "none has a cache"),
        ({"layers": (None, None)}, "none has a cache"),
        ({"layers": (FULL, "full")}, "layer 1"),
        ({"layers": [FULL]}, "use a tuple"),
        ({"granule_tokens": 0}, "granule_tokens is 0"),
        ({"granule_tokens": 64.0}, "granule_tokens is 64.0"),
        ({"name": ""}, "name"),
    ],
)
def test_a_model_is_checked_at_the_door(change, message):
    with pytest.raises(ConfigError, match=message):
        attrs.evolve(HYBRID, **change)


def test_describe_names_every_group():
    text = preset("mimo-v2-flash").describe()
    assert "9 x full_attention, 23,040 B per token" in text
    assert "39 x sliding_window, 24.4 MiB per request" in text


def test_values_are_frozen_and_slotted():
    for value in (FULL, MLA, WINDOW, STATE, HYBRID, HYBRID.groups[0], FULL.parts[0]):
        assert not hasattr(value, "__dict__")
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            value.name = "x"


def test_the_package_loads_nothing_heavy():
    script = (
        "import sys, prfaas.spec, prfaas.hashing, prfaas.capacity; "
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert output == "set()\n"


QWEN3 = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
KIMI = {
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "num_hidden_layers": 3,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
}


def without(config, name):
    return {key: value for key, value in config.items() if key != name}


def test_a_config_object_without_to_dict_is_read_by_its_attributes():
    assert ModelSpec.from_hf_config(SimpleNamespace(**QWEN3)) == ModelSpec.from_hf_config(QWEN3)


def test_dtypes_come_from_the_config_unless_they_are_given():
    assert ModelSpec.from_hf_config(QWEN3).layers[0].dtype is DType.BFLOAT16
    half = ModelSpec.from_hf_config({**without(QWEN3, "dtype"), "torch_dtype": "torch.float16"})
    assert half.layers[0].dtype is DType.FLOAT16
    quantised = ModelSpec.from_hf_config(KIMI, kv_dtype=DType.FLOAT8, state_dtype=DType.BFLOAT16)
    assert quantised.layers[1].dtype is DType.FLOAT8
    assert [part.dtype for part in quantised.layers[0].parts] == [DType.BFLOAT16, DType.FLOAT8]
    rows_only = ModelSpec.from_hf_config(KIMI, kv_dtype=DType.FLOAT8, conv_dtype=DType.BFLOAT16)
    assert [part.dtype for part in rows_only.layers[0].parts] == [DType.FLOAT32, DType.BFLOAT16]


def test_the_dtype_beside_a_text_config_counts():
    outer = {"text_config": without(QWEN3, "dtype"), "dtype": "float32", "model_type": "some_vl"}
    assert ModelSpec.from_hf_config(outer).layers[0].dtype is DType.FLOAT32


def test_name_revision_and_granule_are_kept():
    spec = ModelSpec.from_hf_config(QWEN3, name="mine", revision="r1", granule_tokens=32)
    assert (spec.name, spec.revision, spec.granule_tokens) == ("mine", "r1", 32)
    assert ModelSpec.from_hf_config(QWEN3).name == "qwen3"


def test_head_dim_defaults_to_the_hidden_size_per_head():
    spec = ModelSpec.from_hf_config({**without(QWEN3, "head_dim"), "hidden_size": 64})
    assert spec.layers[0].key_dim == 8


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 3}, "ssfs"),
        ({"model_type": "bamba", "attn_layer_indices": [1, 2]}, "lffl"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E"}, "l.f."),
        ({"model_type": "qwen3_next", "full_attention_interval": 2}, "lflf"),
        ({"model_type": "lfm2", "full_attn_idxs": [0]}, "flll"),
    ],
)
def test_older_spellings_of_the_layer_list(config, expected):
    """Checkpoints state positions as a pattern, an interval or indices."""
    geometry = {
        **QWEN3,
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "conv_L_cache": 3,
        "mamba_n_heads": 2,
        "mamba_d_head": "auto",
        "mamba_expand": 2,
        "mamba_d_state": 4,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    letters = {"full_attention": "f", "sliding_window": "s", "linear_state": "l"}
    spec = ModelSpec.from_hf_config({**geometry, **config})
    assert "".join("." if s is None else letters[s.kind] for s in spec.layers) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN3, "model_type": "gpt2"}, "'gpt2' is not supported"),
        (without(QWEN3, "model_type"), "None is not supported"),
        (without(QWEN3, "dtype"), "names no dtype; pass kv_dtype="),
        ({**QWEN3, "dtype": "int4"}, "dtype='int4'"),
        (without(QWEN3, "num_hidden_layers"), "num_hidden_layers"),
        ({**QWEN3, "num_key_value_heads": "2"}, "num_key_value_heads='2'"),
        ({**QWEN3, "use_sliding_window": True}, "use_sliding_window"),
        ({**QWEN3, "layer_types": ["full_attention"]}, "lists 1 layers but num_hidden_layers is 2"),
        ({**QWEN3, "layer_types": ["full_attention", "hybrid"]}, "layer 1 .* is 'hybrid'"),
        ({**QWEN3, "layer_types": ["full_attention", "linear_attention"]}, "not known for this"),
        ({**QWEN3, "model_type": "qwen3_next"}, "layer_types or full_attention_interval"),
        ({**QWEN3, "model_type": "bamba"}, "layer_types or attn_layer_indices"),
        ({**QWEN3, "model_type": "gpt_oss"}, "layer_types"),
        ({**KIMI, "linear_attn_config": {}}, "layer_types"),
        ({**KIMI, "num_hidden_layers": 4}, "each of the layers 1 to 4 once"),
        ({**KIMI, "layer_types": ["linear_attention"] * 3}, "contradicts itself"),
        (
            {
                **QWEN3,
                "model_type": "mimo_v2_flash",
                "hybrid_layer_pattern": [0, 1],
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "hybrid_layer_pattern means",
        ),
        (7, "config is a int"),
    ],
)
def test_what_a_config_does_not_state_is_an_error(config, message):
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_hf_config(config)


def test_an_unknown_model_type_lists_the_supported_ones():
    with pytest.raises(ConfigError) as refusal:
        ModelSpec.from_hf_config({"model_type": "gpt2"})
    assert all(name in str(refusal.value) for name in HF_MODEL_TYPES)


def test_an_automatic_mamba_head_dim_follows_from_the_expansion():
    config = {
        **QWEN3,
        "model_type": "bamba",
        "attn_layer_indices": [1],
        "hidden_size": 32,
        "mamba_expand": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 3,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    }
    state = ModelSpec.from_hf_config(config).layers[0]
    assert part_shapes(state) == [("recurrent", (4, 16, 3), 768), ("conv", (70, 3), 420)]


def test_the_listed_layers_of_a_checkpoint_are_one_based():
    kinds = [layer.kind for layer in ModelSpec.from_hf_config(KIMI).layers]
    assert kinds == ["linear_state", "mla", "linear_state"]
    agreeing = {**KIMI, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    assert ModelSpec.from_hf_config(agreeing) == ModelSpec.from_hf_config(KIMI)
