"""Qwen 2 and 3, plain and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.load.gguf_names.architecture import (
    ATTENTION,
    GATED,
    MOE_KEYS,
    NORMS,
    QK_NORMS,
    RMS_KEYS,
    Architecture,
    Facts,
    Key,
)
from octavo.core.load.gguf_names.rules import Experts, Rule, Same

EXPERTS: Mapping[str, Rule] = {
    "ffn_gate_inp": Same("mlp.gate"),
    "ffn_gate_exps": Experts("mlp.experts.{}.gate_proj"),
    "ffn_up_exps": Experts("mlp.experts.{}.up_proj"),
    "ffn_down_exps": Experts("mlp.experts.{}.down_proj"),
}
_SILU = {"hidden_act": "silu", "rope_theta": 10_000.0}


def _experts(facts: Facts) -> Mapping[str, Any]:
    """Sizes of experts, which older files leave to the tensors."""
    if facts.own.get("expert_gating_func", 1) != 1:
        raise facts.refuse("expert_gating_func", "only 1 (softmax) is what the model's class has")
    if facts.own.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise facts.refuse("expert_weights_scale", "the model's class scales nothing")
    return {
        "num_experts": facts.own.get("expert_count", 0),
        "moe_intermediate_size": facts.own.get("expert_feed_forward_length") or facts.rows("ffn_gate_exps"),
        "shared_expert_intermediate_size": facts.own.get("expert_shared_feed_forward_length")
        or facts.rows("ffn_gate_shexp"),
    }


QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    keys=RMS_KEYS,
    layer={**NORMS, **ATTENTION, **GATED},
    bias_fields={},
    defaults=_SILU,
)

QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    keys=RMS_KEYS,
    layer={**NORMS, **ATTENTION, **QK_NORMS, **GATED},
    bias_fields={"attention_bias": "attn_q"},
    defaults=_SILU,
)

QWEN2MOE = Architecture(
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    keys={**RMS_KEYS, **MOE_KEYS, "expert_shared_feed_forward_length": Key()},
    layer={
        **NORMS,
        **ATTENTION,
        **EXPERTS,
        "ffn_gate_inp_shexp": Same("mlp.shared_expert_gate", as_row=True),
        "ffn_gate_shexp": Same("mlp.shared_expert.gate_proj"),
        "ffn_up_shexp": Same("mlp.shared_expert.up_proj"),
        "ffn_down_shexp": Same("mlp.shared_expert.down_proj"),
    },
    bias_fields={"qkv_bias": "attn_q"},
    defaults={**_SILU, "norm_topk_prob": False},
    derive=_experts,
)

QWEN3MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    keys={**RMS_KEYS, **MOE_KEYS},
    layer={**NORMS, **ATTENTION, **QK_NORMS, **EXPERTS},
    bias_fields={"attention_bias": "attn_q"},
    # All published models renormalise; the key came later than their files.
    defaults={**_SILU, "norm_topk_prob": True},
    derive=_experts,
)
