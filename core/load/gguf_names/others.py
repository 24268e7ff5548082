"""Command R, GLM 4, gpt-oss and BERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.load.gguf_names.architecture import (
    ATTENTION,
    BASE_KEYS,
    GATED,
    MOE_KEYS,
    NORMS,
    QK_NORMS,
    RMS_KEYS,
    WINDOW_KEYS,
    Architecture,
    Facts,
    Key,
    layer_norm_keys,
)
from octavo.core.load.gguf_names.rules import ElementPairs, ExpertPairs, Experts, Rule, Same, Sections
from octavo.core.load.gguf_names.windows import window_fields

_SILU = {"hidden_act": "silu", "rope_theta": 10_000.0}
_COHERE_KEYS: Mapping[str, Key] = {
    **layer_norm_keys("layer_norm_eps"),
    "logit_scale": Key("number", "logit_scale", required=True),
}

COMMAND_R = Architecture(
    name="CohereForCausalLM",
    model_type="cohere",
    keys=_COHERE_KEYS,
    layer={**ATTENTION, **QK_NORMS, **GATED, "attn_norm": Same("input_layernorm")},
    bias_fields={"attention_bias": "attn_q"},
    derive=lambda facts: {"use_qk_norm": bool(facts.layers_with("attn_q_norm"))},
    defaults=_SILU,
)

COHERE2 = Architecture(
    name="Cohere2ForCausalLM",
    model_type="cohere2",
    keys={**_COHERE_KEYS, **WINDOW_KEYS, "attention.sliding_window": Key("integer", required=True)},
    layer={**ATTENTION, **GATED, "attn_norm": Same("input_layernorm")},
    bias_fields={"attention_bias": "attn_q"},
    derive=lambda facts: window_fields(facts, 4),
    defaults=_SILU,
)

_GLM_FUSED: Mapping[str, Rule] = {
    **ATTENTION,
    "attn_qkv": Sections(),
    "ffn_up": Same("mlp.gate_up_proj"),
    "ffn_down": Same("mlp.down_proj"),
}


def _glm(facts: Facts) -> Mapping[str, Any]:
    biased = ("attn_q.bias", "attn_qkv.bias")
    return {"attention_bias": any(name.endswith(biased) for name in facts.tensors)}


GLM4 = Architecture(
    name="Glm4ForCausalLM",
    model_type="glm4",
    keys=RMS_KEYS,
    layer={
        **_GLM_FUSED,
        "attn_norm": Same("input_layernorm"),
        "post_attention_norm": Same("post_self_attn_layernorm"),
        "ffn_norm": Same("post_attention_layernorm"),
        "post_ffw_norm": Same("post_mlp_layernorm"),
    },
    bias_fields={},
    rotary="partial",
    derive=_glm,
    defaults=_SILU,
)

CHATGLM = Architecture(
    name="GlmForCausalLM",
    model_type="glm",
    keys=RMS_KEYS,
    layer={**NORMS, **_GLM_FUSED},
    bias_fields={},
    rotary="partial",
    derive=_glm,
    defaults=_SILU,
)


def _gpt_oss(facts: Facts) -> Mapping[str, Any]:
    if facts.own.get("expert_gating_func", 3) != 3:
        raise facts.refuse("expert_gating_func", "only 3 (softmax over the chosen) is what the model's class has")
    return {
        **window_fields(facts, 2),
        "num_local_experts": facts.own.get("expert_count", 0),
        "intermediate_size": facts.own.get("expert_feed_forward_length", facts.config["intermediate_size"]),
        "moe_intermediate_size": None,
        "experts_are_split": True,
    }


GPT_OSS = Architecture(
    name="GptOssForCausalLM",
    model_type="gpt_oss",
    keys={
        **RMS_KEYS,
        **WINDOW_KEYS,
        **{key: MOE_KEYS[key] for key in ("expert_used_count", "expert_gating_func", "expert_feed_forward_length")},
        "attention.sliding_window": Key("integer", required=True),
    },
    layer={
        **ATTENTION,
        "attn_norm": Same("input_layernorm"),
        "post_attention_norm": Same("post_attention_layernorm"),
        "attn_sinks.weight": Same("self_attn.sinks"),
        "ffn_gate_inp": Same("mlp.router"),
        "ffn_gate_exps.weight ffn_up_exps.weight": ExpertPairs("mlp.experts.{}.gate_up_proj.weight"),
        "ffn_gate_exps.bias ffn_up_exps.bias": ElementPairs("mlp.experts.gate_up_proj_bias"),
        "ffn_down_exps.weight": Experts("mlp.experts.{}.down_proj.weight"),
        "ffn_down_exps.bias": Same("mlp.experts.down_proj_bias"),
    },
    bias_fields={"attention_bias": "attn_q"},
    yarn={"truncate": False},
    derive=_gpt_oss,
    defaults={"hidden_act": "silu", "rope_theta": 150_000.0},
)


def _bert(facts: Facts) -> Mapping[str, Any]:
    """Sizes of the tables; a RoBERTa file's table of positions begins with a text's first one, as BERT's does."""
    sizes = {}
    for field, name in (("max_position_embeddings", "position_embd"), ("type_vocab_size", "token_types")):
        tensor = facts.tensors.get(f"{name}.weight")
        if tensor is None:
            raise facts.refuse(f"{name}.weight", "the tensor is missing")
        sizes[field] = tensor.shape[0] if len(tensor.shape) == 2 else 1
    return {**sizes, "head_dim": None, "num_key_value_heads": None, "tie_word_embeddings": None}


BERT = Architecture(
    name="BertModel",
    model_type="bert",
    keys={**BASE_KEYS, "attention.layer_norm_epsilon": Key("number", "layer_norm_eps", required=True)},
    top={
        "token_embd": Same("embeddings.word_embeddings"),
        "token_embd_norm": Same("embeddings.LayerNorm"),
        "token_types": Same("embeddings.token_type_embeddings", as_row=True),
        "position_embd": Same("embeddings.position_embeddings"),
    },
    layer={
        "attn_q": Same("attention.self.query"),
        "attn_k": Same("attention.self.key"),
        "attn_v": Same("attention.self.value"),
        "attn_output": Same("attention.output.dense"),
        "attn_output_norm": Same("attention.output.LayerNorm"),
        "ffn_up": Same("intermediate.dense"),
        "ffn_down": Same("output.dense"),
        "layer_output_norm": Same("output.LayerNorm"),
    },
    layer_prefix="encoder.layer.{}.",
    bias_fields={},
    rotary="none",
    derive=_bert,
    defaults={"hidden_act": "gelu"},
)
