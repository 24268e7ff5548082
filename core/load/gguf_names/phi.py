"""Phi 1 and 2 (`phi2`), Phi 3 and 4 (`phi3`)."""

from __future__ import annotations

from octavo.core.load.gguf_names.architecture import (
    ATTENTION,
    NORMS,
    RMS_KEYS,
    TOP,
    Architecture,
    Key,
    layer_norm_keys,
)
from octavo.core.load.gguf_names.rules import Same, Sections

PHI2 = Architecture(
    name="PhiForCausalLM",
    model_type="phi",
    keys=layer_norm_keys("layer_norm_eps"),
    layer={
        **ATTENTION,
        "attn_norm": Same("input_layernorm"),
        "attn_qkv": Sections(),
        "attn_output": Same("self_attn.dense"),
        "ffn_up": Same("mlp.fc1"),
        "ffn_down": Same("mlp.fc2"),
    },
    top={**TOP, "output_norm": Same("model.final_layernorm")},
    bias_fields={},
    rotary="partial",
    defaults={"hidden_act": "gelu_new", "rope_theta": 10_000.0},
)

PHI3 = Architecture(
    name="Phi3ForCausalLM",
    model_type="phi3",
    keys={**RMS_KEYS, "attention.sliding_window": Key("count")},
    layer={
        **NORMS,
        "attn_qkv": Same("self_attn.qkv_proj"),
        "attn_output": Same("self_attn.o_proj"),
        "ffn_up": Same("mlp.gate_up_proj"),
        "ffn_down": Same("mlp.down_proj"),
    },
    bias_fields={},
    rotary="partial",
    # 0 says that there is no window.
    derive=lambda facts: {"sliding_window": facts.own.get("attention.sliding_window") or None},
    defaults={"hidden_act": "silu", "rope_theta": 10_000.0},
)
