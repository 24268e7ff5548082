"""DeepSeek V2 and V3: latent attention, and experts chosen from the best groups beside experts that all tokens visit.

V2   scores by softmax; a group counts as much as its best expert
V3   scores by sigmoid; a bias corrects the choice; a group counts as much as its best two
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.layers.rope_scaling import YarnScaling
from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig, MlaConfig, MoeConfig
from octavo.core.models.families.reading import GATES, ROUTER_TRAINING, read_sizes
from octavo.core.models.rope import derived_max_position, read_rope


def read_deepseek_v2(values: Mapping[str, Any]) -> DecoderConfig:
    """DeepseekV2ForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    fields = _attention(reader)
    methods = {"greedy": False, "group_limited_greedy": True}
    grouped = reader.choice("topk_method", methods, "greedy")
    moe = MoeConfig(**_experts(reader, fields, grouped=grouped), renormalize=False)
    bias = reader.boolean("mlp_bias", False)
    if bias:
        raise reader.refuse("mlp_bias", "biases of the feed-forward are not implemented for the family")
    config = DecoderConfig(
        **fields, interleaved_rope=True, moe=moe, moe_layers=_expert_layers(reader, fields["num_layers"], 0)
    )
    reader.finish(inert=INERT, neutral={"scoring_func": "softmax", "moe_layer_freq": 1})
    return config


def read_deepseek_v3(values: Mapping[str, Any]) -> DecoderConfig:
    """DeepseekV3ForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    fields = _attention(reader)
    moe = MoeConfig(
        **_experts(reader, fields, grouped=True),
        scoring="sigmoid",
        renormalize=reader.boolean("norm_topk_prob", True),
        correction_bias="mlp.gate.e_score_correction_bias",
    )
    config = DecoderConfig(
        **fields,
        interleaved_rope=reader.boolean("rope_interleave", True),
        moe=moe,
        moe_layers=_expert_layers(reader, fields["num_layers"], 3),
    )
    reader.finish(inert=INERT, neutral={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})
    return config


INERT = (*ROUTER_TRAINING, "ep_size", "seq_aux", "aux_loss_alpha", "num_nextn_predict_layers")
"""How training went, and layers for drafts that are not loaded."""


def _attention(reader: ConfigReader) -> dict[str, Any]:
    """Everything but the experts, as arguments of `DecoderConfig`."""
    rope_dim, nope_dim = reader.integer("qk_rope_head_dim", 64), reader.integer("qk_nope_head_dim", 128)
    reader.expect("head_dim", rope_dim)
    reader.expect("qk_head_dim", nope_dim + rope_dim)
    sizes = read_sizes(reader) | {"head_dim": nope_dim + rope_dim}
    reader.expect("num_key_value_heads", sizes["num_heads"])  # of latent attention there is but one kind of head
    rope = read_rope(reader, rope_dim, default_theta=10_000.0)
    factor = rope.scaling.softmax_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    bias = reader.boolean("attention_bias", False)
    q_lora_rank = reader.optional_integer("q_lora_rank")
    if bias and q_lora_rank is None:
        raise reader.refuse("attention_bias", "without q_lora_rank biases of attention are not implemented")
    return sizes | {
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
        "gate": reader.choice("hidden_act", GATES, "silu"),
        "ropes": (rope,) * sizes["num_layers"],
        "max_position": derived_max_position(sizes["max_position"], [rope]),
        "tied": reader.boolean("tie_word_embeddings", False),
        "qkv_bias": bias,
        "out_bias": bias,
        "score_scale": (nope_dim + rope_dim) ** -0.5 * factor,
        "mla": MlaConfig(
            q_lora_rank=q_lora_rank,
            kv_lora_rank=reader.integer("kv_lora_rank", 512),
            nope_head_dim=nope_dim,
            rope_head_dim=rope_dim,
            v_head_dim=reader.integer("v_head_dim", 128),
        ),
    }


def _experts(reader: ConfigReader, fields: Mapping[str, Any], *, grouped: bool) -> dict[str, Any]:
    width = reader.integer("moe_intermediate_size")
    shared = reader.integer("n_shared_experts")
    groups, top_groups = reader.integer("n_group", 1), reader.integer("topk_group", 1)
    num_experts = reader.integer("n_routed_experts")
    if num_experts % groups or top_groups > groups:
        raise reader.refuse("n_group", f"it must divide n_routed_experts, {num_experts}, and hold topk_group groups")
    return {
        "num_experts": num_experts,
        "top_k": reader.integer("num_experts_per_tok"),
        "intermediate_size": width,
        "num_groups": groups if grouped else 1,
        "top_groups": top_groups if grouped else 1,
        "scale": reader.number("routed_scaling_factor", 1.0),
        "gate_function": fields["gate"],
        "shared": "mlp.shared_experts",
        "shared_intermediate_size": width * shared,
    }


def _expert_layers(reader: ConfigReader, num_layers: int, default: int) -> tuple[int, ...]:
    return tuple(range(reader.count("first_k_dense_replace", default), num_layers))
