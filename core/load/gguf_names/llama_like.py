"""Llama, Mistral and Mixtral, which GGUF calls one architecture, and those that differ from them by little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.load.gguf_names.architecture import (
    ATTENTION,
    GATED,
    NORMS,
    QK_NORMS,
    RMS_KEYS,
    WINDOW_KEYS,
    Architecture,
    Facts,
    Key,
    layer_norm_keys,
)
from octavo.core.load.gguf_names.rules import Experts, Heads, Pairs, Rule, Same

_PAIRED: Mapping[str, Rule] = {
    **ATTENTION,
    "attn_q": Pairs("self_attn.q_proj", "num_attention_heads"),
    "attn_k": Pairs("self_attn.k_proj", "num_key_value_heads"),
}
_SILU = {"hidden_act": "silu", "rope_theta": 10_000.0}


def _llama(facts: Facts) -> Mapping[str, Any]:
    """Which of the three: experts make it Mixtral, a window Mistral."""
    window = facts.own.get("attention.sliding_window") or None
    if facts.own.get("expert_count", 0):
        if not facts.own.get("expert_used_count", 0):
            raise facts.refuse("expert_used_count", "a mixture of experts must say how many a token visits")
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": facts.own["expert_count"],
            "num_experts_per_tok": facts.own["expert_used_count"],
            "sliding_window": window,
        }
    if window is None:
        return {}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    keys={**RMS_KEYS, "attention.sliding_window": Key("count")},
    layer={
        **NORMS,
        **_PAIRED,
        **GATED,
        "ffn_gate_inp": Same("block_sparse_moe.gate"),
        "ffn_gate_exps": Experts("block_sparse_moe.experts.{}.w1"),
        "ffn_down_exps": Experts("block_sparse_moe.experts.{}.w2"),
        "ffn_up_exps": Experts("block_sparse_moe.experts.{}.w3"),
        "ffn_gate.#": Same("block_sparse_moe.experts.{}.w1"),
        "ffn_down.#": Same("block_sparse_moe.experts.{}.w2"),
        "ffn_up.#": Same("block_sparse_moe.experts.{}.w3"),
    },
    defaults=_SILU,
    derive=_llama,
)

GRANITE = Architecture(
    name="GraniteForCausalLM",
    model_type="granite",
    keys={
        **RMS_KEYS,
        "attention.scale": Key("number", "attention_multiplier"),
        "embedding_scale": Key("number", "embedding_multiplier"),
        "residual_scale": Key("number", "residual_multiplier"),
        "logit_scale": Key("number", "logits_scaling"),
    },
    layer={**NORMS, **_PAIRED, **GATED},
    # Without the key, scores are scaled as they are in llama; Hugging Face's class would not scale them at all.
    derive=lambda facts: (
        {} if "attention.scale" in facts.own else {"attention_multiplier": facts.config["head_dim"] ** -0.5}
    ),
    defaults=_SILU,
)

SMOLLM3 = Architecture(
    name="SmolLM3ForCausalLM",
    model_type="smollm3",
    keys=RMS_KEYS,
    layer={**NORMS, **_PAIRED, **GATED},
    # Every fourth layer has no positions; no key says so.
    defaults={**_SILU, "no_rope_layer_interval": 4},
)

OLMO2 = Architecture(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    keys=RMS_KEYS,
    layer={
        **ATTENTION,
        **QK_NORMS,
        **GATED,
        "post_attention_norm": Same("post_attention_layernorm"),
        "post_ffw_norm": Same("post_feedforward_layernorm"),
    },
    defaults=_SILU,
)

STABLELM = Architecture(
    name="StableLmForCausalLM",
    model_type="stablelm",
    keys={**layer_norm_keys("layer_norm_eps"), "use_parallel_residual": Key("flag")},
    layer={
        **NORMS,
        **ATTENTION,
        **GATED,
        "attn_q_norm": Heads("self_attn.q_layernorm.norms.{}"),
        "attn_k_norm": Heads("self_attn.k_layernorm.norms.{}"),
    },
    bias_fields={"use_qkv_bias": "attn_q"},
    rotary="partial",
    # Files of models whose config has no such field say that branches are parallel when they aren't; the norm between
    # the branches tells the truth.
    derive=lambda facts: {
        "use_parallel_residual": not facts.layers_with("ffn_norm"),
        "qk_layernorm": bool(facts.layers_with("attn_q_norm")),
    },
    defaults=_SILU,
)

STARCODER2 = Architecture(
    name="Starcoder2ForCausalLM",
    model_type="starcoder2",
    keys={**layer_norm_keys("norm_epsilon"), "attention.sliding_window": WINDOW_KEYS["attention.sliding_window"]},
    layer={**NORMS, **ATTENTION, "ffn_up": Same("mlp.c_fc"), "ffn_down": Same("mlp.c_proj")},
    bias_fields={"use_bias": "attn_q"},
    derive=lambda facts: {"sliding_window": facts.own.get("attention.sliding_window") or None},
    defaults={"hidden_act": "gelu_pytorch_tanh", "rope_theta": 10_000.0},
)
