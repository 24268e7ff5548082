"""Configs are read strictly: what changes the mathematics is implemented or refused, what does not is passed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.backend.opset import OpSet
from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.layers.rope_scaling import LinearScaling, Llama3Scaling
from octavo.core.models.decoder.config import DecoderConfig
from octavo.core.models.registry import build_model, read_config
from tests.models.step_runner import ReferenceBackend

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 128256,
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
CONFIGS = {"llama": LLAMA, "gemma3": GEMMA}
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def changed(family: str, **changes: Any) -> dict[str, Any]:
    return CONFIGS[family] | changes


def test_published_configs_are_read():
    llama = read_config(LLAMA)
    assert isinstance(llama, DecoderConfig)
    assert (llama.vocab_size, llama.max_position, llama.num_layers, llama.head_dim) == (128256, 131072, 16, 64)
    assert llama.ropes[0].theta == 500000.0
    assert llama.ropes[0].scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    gemma = read_config(GEMMA)
    assert isinstance(gemma, DecoderConfig)
    assert gemma.tied
    assert [layer for layer in range(26) if gemma.window(layer) is None] == [5, 11, 17, 23]
    assert (gemma.ropes[0].theta, gemma.ropes[5].theta) == (10000.0, 1000000.0)
    specs = gemma.kv_specs(torch.float32, 16)
    assert [spec.window for spec in specs[:6]] == [512] * 5 + [None]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", REQUIRED)
def test_required_fields(family, name):
    for config in (
        {key: value for key, value in CONFIGS[family].items() if key != name},
        changed(family, **{name: None}),
    ):
        with pytest.raises(CheckpointError, match=name) as caught:
            read_config(config)
        assert caught.value.field == name


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", [*REQUIRED, "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, "8", True, 1.5, [8], {"a": 1}, float("nan"), float("inf")])
def test_integers_of_wrong_type_or_range(family, name, value):
    with pytest.raises(CheckpointError, match=name) as caught:
        read_config(changed(family, **{name: value}))
    assert "\n" not in str(caught.value)


REFUSED = [
    ("llama", "quantization_config", {"quant_method": "awq", "bits": 4}),
    ("llama", "sliding_window", 4096),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "attn_logit_softcapping", 50.0),
    ("llama", "final_logit_softcapping", 30.0),
    ("llama", "query_pre_attn_scalar", 256),
    ("llama", "embedding_multiplier", 12.0),
    ("llama", "residual_multiplier", 0.22),
    ("llama", "num_local_experts", 8),
    ("llama", "auto_map", {"AutoModelForCausalLM": "modeling_custom.Model"}),
    ("llama", "hidden_act", "relu"),
    ("llama", "hidden_act", 3),
    ("llama", "attention_bias", "yes"),
    ("llama", "tie_word_embeddings", 1),
    ("llama", "rms_norm_eps", 0),
    ("llama", "rms_norm_eps", "1e-5"),
    ("llama", "rope_theta", -1.0),
    ("llama", "num_key_value_heads", 5),
    ("llama", "head_dim", 63),
    ("llama", "rope_scaling", "linear"),
    ("llama", "a_field_from_next_year", 1),
    ("gemma3", "use_bidirectional_attention", True),
    ("gemma3", "mlp_bias", True),
    ("gemma3", "hidden_act", "silu"),
    ("gemma3", "hidden_activation", "tanh"),
    ("gemma3", "layer_types", ["full_attention"] * 25),
    ("gemma3", "layer_types", ["chunked_attention"] * 26),
    ("gemma3", "sliding_window", 0),
    ("gemma3", "sliding_window_pattern", 0),
    ("gemma3", "query_pre_attn_scalar", "256"),
    ("gemma3", "vision_config", {"hidden_size": 1152}),
]


@pytest.mark.parametrize(("family", "name", "value"), REFUSED)
def test_fields_that_are_not_implemented_or_wrong_are_named(family, name, value):
    with pytest.raises(CheckpointError, match=name) as caught:
        read_config(changed(family, **{name: value}))
    assert caught.value.field == name
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("initializer_range", 0.5),
        ("attention_dropout", 0.1),
        ("use_cache", False),
        ("torch_dtype", "float32"),
        ("dtype", "float16"),
        ("bos_token_id", 7),
        ("eos_token_id", [1, 106]),
        ("pad_token_id", 0),
        ("_name_or_path", "somebody/model"),
        ("quantization_config", None),
        ("sliding_window_for_future_use", None),
        ("use_something_new", False),
        ("some_list", []),
    ],
)
def test_inert_and_unused_fields_change_nothing(family, name, value):
    assert read_config(changed(family, **{name: value})) == read_config(CONFIGS[family])


def test_optional_fields_fall_back_as_in_hugging_face():
    minimal = {name: LLAMA[name] for name in ("architectures", *REQUIRED)}
    config = read_config(minimal)
    assert isinstance(config, DecoderConfig)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps, config.gate) == (32, 64, 1e-6, "silu")
    assert (config.ropes[0].theta, config.ropes[0].scaling, config.tied) == (10_000.0, None, False)
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        read_config(minimal | {"hidden_size": 2050, "num_attention_heads": 4})


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "default"},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "linear", "type": "linear", "factor": 2.0},
        LLAMA["rope_scaling"],
    ],
)
def test_old_and_new_form_of_rotary_parameters_mean_the_same(scaling):
    old = changed("llama", rope_scaling=scaling, rope_theta=3000.0)
    new = changed("llama", rope_parameters=(scaling or {"rope_type": "default"}) | {"rope_theta": 3000.0})
    del new["rope_scaling"], new["rope_theta"]
    assert read_config(old) == read_config(new)


def test_old_and_new_form_of_gemma_configs_mean_the_same():
    old = changed("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = changed(
        "gemma3",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        layer_types=[("full" if (layer + 1) % 6 == 0 else "sliding") + "_attention" for layer in range(26)],
        _sliding_window_pattern=6,
        use_bidirectional_attention=False,
    )
    for name in ("rope_scaling", "rope_theta", "rope_local_base_freq", "sliding_window_pattern"):
        del new[name]
    config = read_config(old)
    assert config == read_config(new)
    assert isinstance(config, DecoderConfig)
    assert (config.ropes[5].scaling, config.ropes[0].scaling) == (LinearScaling(8.0), None)


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"rope_type": "ntk", "factor": 4.0}, "rope_type"),
        ({"type": "mrope", "mrope_section": [2, 3, 3]}, "type"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "original_max_position_embeddings"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.5}, "attention_factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "original"),
        (LLAMA["rope_scaling"] | {"high_freq_factor": 1.0}, "high_freq_factor"),
    ],
)
def test_rotary_scalings_that_are_not_implemented_or_incomplete(scaling, name):
    with pytest.raises(CheckpointError, match=rf"rope_scaling\..*{name}"):
        read_config(changed("llama", rope_scaling=scaling))


def test_two_forms_of_rotary_parameters_at_once():
    for family in CONFIGS:
        both = changed(family, rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 5.0})
        with pytest.raises(CheckpointError, match="rope_scaling"):
            read_config(both)


def test_unknown_architectures_are_refused_with_the_nearest():
    for name, near in (
        ("LlamaForCausalLMEagle", "LlamaForCausalLM"),
        ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    ):
        with pytest.raises(CheckpointError, match=rf"{name} is not implemented.*{near}"):
            read_config(changed("llama", architectures=[name]))
    with pytest.raises(CheckpointError, match="LlamaForCausalLM, Llama4ForCausalLM, MistralForCausalLM"):
        read_config(changed("llama", architectures=["T5"]))


@pytest.mark.parametrize("architectures", [[], "LlamaForCausalLM", [3], {}])
def test_malformed_architectures(architectures):
    with pytest.raises(CheckpointError, match="architectures"):
        read_config(changed("llama", architectures=architectures))


def test_model_type_stands_in_for_a_missing_architecture():
    without = {name: value for name, value in GEMMA.items() if name != "architectures"}
    assert read_config(without) == read_config(GEMMA)
    with pytest.raises(CheckpointError, match="nosuch is not implemented"):
        read_config(without | {"model_type": "nosuch"})
    with pytest.raises(CheckpointError, match="architectures"):
        read_config({})


def test_limits_of_a_build():
    backend = ReferenceBackend()
    options: dict[str, Any] = {
        "backend": backend,
        "opset": OpSet(backend),
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "block_size": 16,
        "max_num_batched_tokens": 8,
        "max_model_len": 64,
    }
    with pytest.raises(ConfigError, match=r"max_model_len is 131073.*131072"):
        build_model(LLAMA, **(options | {"max_model_len": 131073}))
    with pytest.raises(ConfigError, match=r"dtype is float16.*float32, bfloat16"):
        build_model(LLAMA, **(options | {"dtype": torch.float16}))
