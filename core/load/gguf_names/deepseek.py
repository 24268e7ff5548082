"""DeepSeek V2 and V3, which GGUF calls one architecture.

attention.key_length          of a head with its positions; in newer files of the latent, beside key_length_mla
attn_kv_b, or attn_k_b with attn_v_b      one product, or its keys, transposed, and its values apart
expert_gating_func            1 softmax: V2; 2 sigmoid, with exp_probs_b: V3
rope.scaling.yarn_log_multiplier          0.1 · mscale_all_dim
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.load.gguf_names.architecture import GATED, MOE_KEYS, NORMS, RMS_KEYS, Architecture, Facts, Key
from octavo.core.load.gguf_names.qwen import EXPERTS
from octavo.core.load.gguf_names.rules import LatentPair, Same

_GROUPS: Mapping[tuple[int, int], tuple[int, int]] = {(160, 1): (8, 3), (256, 2): (8, 4)}
"""Groups of experts and how many of them count, by number of experts and gating: older files of the two models that
have groups, DeepSeek V2 and V3, don't say it."""


def _deepseek(facts: Facts) -> Mapping[str, Any]:
    own, config = facts.own, facts.config
    key_dim = own.get("attention.key_length_mla", own.get("attention.key_length", 0))
    value_dim = own.get("attention.value_length_mla", own.get("attention.value_length", 0))
    rope_dim = own["rope.dimension_count"]
    if key_dim <= rope_dim or not value_dim:
        raise facts.refuse("attention.key_length", f"a head needs more than the {rope_dim} elements with positions")
    gating = own.get("expert_gating_func") or 1
    if gating not in (1, 2):
        raise facts.refuse("expert_gating_func", "1 (softmax) and 2 (sigmoid) are implemented")
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope_dim,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": value_dim,
        "n_routed_experts": own.get("expert_count", 0),
        "rope_scaling": _with_mscale(facts),
        "norm_topk_prob": own.get("expert_weights_norm", False),
        "routed_scaling_factor": own.get("expert_weights_scale") or 1.0,
        **_choice(own, gating),
    }


def _choice(own: Mapping[str, Any], gating: int) -> Mapping[str, Any]:
    """How experts are chosen."""
    groups, top_groups = _GROUPS.get((own.get("expert_count", 0), gating), (1, 1))
    groups = own.get("expert_group_count") or groups
    top_groups = own.get("expert_group_used_count") or top_groups
    fields: dict[str, Any] = {"n_group": groups, "topk_group": top_groups}
    if gating == 2:
        return fields | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return fields | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _with_mscale(facts: Facts) -> dict[str, Any] | None:
    """The scaling with both of its temperatures. Files hold one; in all published models they are the same."""
    scaling: dict[str, Any] | None = facts.config["rope_scaling"]
    tenth = facts.own.get("rope.scaling.yarn_log_multiplier", 0.0)
    if scaling is None or scaling["rope_type"] != "yarn" or not tenth:
        return scaling
    mscale = float(f"{10 * tenth:.6g}")
    return scaling | {"mscale": mscale, "mscale_all_dim": mscale}


DEEPSEEK2 = Architecture(
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    keys={
        **RMS_KEYS,
        **MOE_KEYS,
        "expert_weights_norm": Key("flag"),
        "attention.key_length": Key(),
        "attention.key_length_mla": Key(),
        "attention.value_length_mla": Key(),
        "attention.q_lora_rank": Key("integer", "q_lora_rank"),
        "attention.kv_lora_rank": Key("integer", "kv_lora_rank", required=True),
        "leading_dense_block_count": Key("count", "first_k_dense_replace", required=True),
        "expert_shared_count": Key("count", "n_shared_experts"),
        "expert_group_count": Key("count"),
        "expert_group_used_count": Key("count"),
        "rope.dimension_count": Key("integer", required=True),
        "rope.scaling.yarn_log_multiplier": Key("amount"),
    },
    layer={
        **NORMS,
        **GATED,
        **EXPERTS,
        "attn_q": Same("self_attn.q_proj"),
        "attn_q_a": Same("self_attn.q_a_proj"),
        "attn_q_a_norm": Same("self_attn.q_a_layernorm"),
        "attn_q_b": Same("self_attn.q_b_proj"),
        "attn_kv_a_mqa": Same("self_attn.kv_a_proj_with_mqa"),
        "attn_kv_a_norm": Same("self_attn.kv_a_layernorm"),
        "attn_kv_b": Same("self_attn.kv_b_proj"),
        "attn_k_b attn_v_b": LatentPair("self_attn.kv_b_proj"),
        "attn_output": Same("self_attn.o_proj"),
        "exp_probs_b.bias": Same("mlp.gate.e_score_correction_bias"),
        "ffn_gate_shexp": Same("mlp.shared_experts.gate_proj"),
        "ffn_up_shexp": Same("mlp.shared_experts.up_proj"),
        "ffn_down_shexp": Same("mlp.shared_experts.down_proj"),
    },
    bias_fields={},
    rotary="latent",
    derive=_deepseek,
    defaults={"hidden_act": "silu", "rope_theta": 10_000.0},
)
