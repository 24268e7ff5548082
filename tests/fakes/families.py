"""A tiny random model of every family of decoders, made by Hugging Face's own classes: what parity tests run over.

    FAMILIES[name] = TinyFamily(config class, model class, sizes, variants, ...)

`sizes` are chosen so that every field of the config that can matter does: windows shorter than prompts, epsilons that
are seen beside activations, factors other than 1. `variants` change fields that `sizes` can't all have at once. What
else is known of a family's fields stands beside them with its reason; see `TinyFamily`. test_families.py and
test_config_fields.py run over this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.fakes.tiny_family import TinyFamily

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
RMS = SIZES | {"rms_norm_eps": 1e-3}
LAYER = SIZES | {"layer_norm_eps": 1e-3}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 12.0],
}


ROUTER_OUTPUT = {"output_router_logits": "another runtime's output"}
ROUTER_LOSS = ROUTER_OUTPUT | {"router_aux_loss_coef": "training only"}
ROUTER_TRAINING = ROUTER_LOSS | {"router_jitter_noise": "training only"}
WINDOWS_OFF = {
    "sliding_window": "use_sliding_window is false",
    "use_sliding_window": "layer_types says which layers have a window",
    "max_window_layers": "layer_types says which layers have a window",
}
DROPOUT = {"resid_pdrop": "training only", "embd_pdrop": "training only"}

FAMILIES: Mapping[str, TinyFamily] = {
    "llama": TinyFamily(
        "LlamaConfig",
        "LlamaForCausalLM",
        RMS,
        {"biases": {"attention_bias": True, "mlp_bias": True}, "tied": {"tie_word_embeddings": True}},
    ),
    "llama4": TinyFamily(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        RMS
        | {
            "head_dim": 16,
            "intermediate_size_mlp": 56,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": 512,
            "floor_scale": 512,
        },
        {"no-norms": {"use_qk_norm": False}},
        inert=ROUTER_TRAINING
        | {
            "interleave_moe_layer_step": "moe_layers says it",
            "no_rope_layer_interval": "no_rope_layers says it",
        },
        unseen={
            "attn_scale": "positions below floor_scale have no temperature",
            "attn_temperature_tuning": "positions below floor_scale have no temperature",
        },
        others={"attention_chunk_size": (24,), "floor_scale": (24,)},
    ),
    "mistral": TinyFamily(
        "MistralConfig",
        "MistralForCausalLM",
        RMS | {"head_dim": 16, "sliding_window": 8},
        {"full": {"sliding_window": None}},
    ),
    "mixtral": TinyFamily(
        "MixtralConfig",
        "MixtralForCausalLM",
        RMS | {"head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8},
        inert=ROUTER_TRAINING,
    ),
    "qwen2": TinyFamily(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        RMS | {"tie_word_embeddings": True},
        {
            "windows": {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "layer_types": [FULL, SLIDING],
            }
        },
        unseen=WINDOWS_OFF,
    ),
    "qwen2_moe": TinyFamily(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        RMS
        | {
            "num_hidden_layers": 3,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
        },
        {"normed": {"norm_topk_prob": True}, "every-second": {"decoder_sparse_step": 2, "mlp_only_layers": []}},
        inert=ROUTER_LOSS,
        unseen=WINDOWS_OFF,
    ),
    "qwen3": TinyFamily(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        RMS | {"head_dim": 16},
        {"biases": {"attention_bias": True}, "yarn": {"rope_parameters": YARN}},
        unseen=WINDOWS_OFF,
    ),
    "qwen3_moe": TinyFamily(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        RMS
        | {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
        {"not-normed": {"norm_topk_prob": False}, "windows": {"use_sliding_window": True, "sliding_window": 8}},
        inert=ROUTER_LOSS,
        unseen={"sliding_window": WINDOWS_OFF["sliding_window"], "use_sliding_window": "there is no sliding_window"},
    ),
    "gemma": TinyFamily(
        "GemmaConfig",
        "GemmaForCausalLM",
        RMS | {"head_dim": 16, "num_key_value_heads": 1},
        unseen={"hidden_act": "gelu means the approximation, as gelu_pytorch_tanh does"},
    ),
    "gemma2": TinyFamily(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        RMS
        | {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": TinyFamily(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        RMS
        | {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 2.0,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 100_000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 1_000.0},
            },
        },
        inert={"_sliding_window_pattern": "layer_types says it"},
        exempt={"attn_logit_softcapping": "Hugging Face's class reads it and does not apply it"},
    ),
    "phi3": TinyFamily(
        "Phi3Config",
        "Phi3ForCausalLM",
        RMS | {"original_max_position_embeddings": 512},
        {
            "windows": {"sliding_window": 8},
            "longrope": {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
            "partial": {
                "original_max_position_embeddings": 64,
                "rope_parameters": LONGROPE
                | {
                    "partial_rotary_factor": 0.67,
                    "short_factor": [1.0, 1.2, 1.4, 1.6],
                    "long_factor": [2.0, 4.0, 6.0, 9.0],
                },
            },
        },
        inert=DROPOUT,
        unseen={
            "original_max_position_embeddings": "read by longrope alone",
            "rope_parameters.original_max_position_embeddings": "the one beside the object counts",
            "rope_parameters.short_factor": "the prompt is a long one",
        },
        others={"rope_type": ("default", "linear")},
    ),
    "phi": TinyFamily(
        "PhiConfig",
        "PhiForCausalLM",
        LAYER | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
        inert=DROPOUT,
    ),
    "deepseek_v2": TinyFamily(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        RMS
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        },
        {
            "no-query-latent": {"q_lora_rank": None, "topk_method": "greedy"},
            "yarn": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
        },
        inert=ROUTER_OUTPUT,
        unseen={"n_group": "the greedy choice has no groups", "topk_group": "the greedy choice has no groups"},
    ),
    "deepseek_v3": TinyFamily(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        RMS
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        },
        {
            "no-query-latent": {"q_lora_rank": None},
            "yarn": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.2}},
            "halves": {"rope_interleave": False},
        },
        inert=ROUTER_OUTPUT | {"num_nextn_predict_layers": "layers of a draft head, which generation does without"},
    ),
    "gpt_oss": TinyFamily(
        "GptOssConfig",
        "GptOssForCausalLM",
        RMS
        | {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": [SLIDING, FULL],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 1.0, "truncate": False},
        },
        inert=ROUTER_LOSS,
        unseen={"hidden_act": "the experts have a gate of their own"},
        scales={"gate_up_proj": 8.0, "sinks": 20.0},
    ),
    "glm": TinyFamily(
        "GlmConfig",
        "GlmForCausalLM",
        RMS
        | {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
        {"biases": {"attention_bias": True}},
    ),
    "glm4": TinyFamily(
        "Glm4Config",
        "Glm4ForCausalLM",
        RMS
        | {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
        {"no-biases": {"attention_bias": False}},
    ),
    "granite": TinyFamily(
        "GraniteConfig",
        "GraniteForCausalLM",
        RMS
        | {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.4,
        },
        {"biases": {"attention_bias": True, "mlp_bias": True}},
    ),
    "olmo2": TinyFamily("Olmo2Config", "Olmo2ForCausalLM", RMS, {"biases": {"attention_bias": True}}),
    "stablelm": TinyFamily(
        "StableLmConfig",
        "StableLmForCausalLM",
        LAYER
        | {
            "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        },
        {"parallel": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}},
    ),
    "smollm3": TinyFamily(
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        RMS | {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
        {
            "windows": {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": [SLIDING, FULL, SLIDING],
            }
        },
        inert={"no_rope_layer_interval": "no_rope_layers says it"},
        unseen={name: reason for name, reason in WINDOWS_OFF.items() if name != "max_window_layers"},
    ),
    "starcoder2": TinyFamily(
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        SIZES | {"norm_epsilon": 1e-3, "sliding_window": 8},
        {"no-biases": {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}},
        inert={"residual_dropout": "training only", "embedding_dropout": "training only"},
    ),
    "cohere": TinyFamily(
        "CohereConfig",
        "CohereForCausalLM",
        LAYER | {"logit_scale": 0.3},
        {"normed": {"use_qk_norm": True}, "biases": {"attention_bias": True, "tie_word_embeddings": False}},
    ),
    "cohere2": TinyFamily(
        "Cohere2Config",
        "Cohere2ForCausalLM",
        LAYER | {"head_dim": 16, "logit_scale": 0.3, "sliding_window": 8, "layer_types": [SLIDING, FULL]},
        {"biases": {"attention_bias": True}},
    ),
}
"""Never written to."""
