"""Gemma 1 to 3. Their norm weights have the 1 already added; what scales the scores is not in the files."""

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
)
from octavo.core.load.gguf_names.rules import Rule, Same
from octavo.core.load.gguf_names.windows import window_fields

_SANDWICH: Mapping[str, Rule] = {
    **ATTENTION,
    **GATED,
    "attn_norm": Same("input_layernorm"),
    "post_attention_norm": Same("post_attention_layernorm"),
    "ffn_norm": Same("pre_feedforward_layernorm"),
    "post_ffw_norm": Same("post_feedforward_layernorm"),
}
_KEYS: Mapping[str, Key] = {
    **RMS_KEYS,
    **WINDOW_KEYS,
    "attention.key_length": Key("integer", "head_dim", required=True),
    "attention.sliding_window": Key("count", required=True),
    "attn_logit_softcapping": Key("number", "attn_logit_softcapping"),
    "final_logit_softcapping": Key("number", "final_logit_softcapping"),
}


def _scalar(facts: Facts, layers_of_27b: int) -> int:
    """What scores are scaled by: the 27B models alone take the width per head, and not head_dim."""
    config = facts.config
    is_27b = config["num_hidden_layers"] == layers_of_27b
    scalar: int = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return scalar


def _gemma2(facts: Facts) -> Mapping[str, Any]:
    return {**window_fields(facts, 2), "query_pre_attn_scalar": _scalar(facts, 46)}


def _gemma3(facts: Facts) -> Mapping[str, Any]:
    return {**window_fields(facts, 6), "query_pre_attn_scalar": _scalar(facts, 62)}


GEMMA = Architecture(
    name="GemmaForCausalLM",
    model_type="gemma",
    keys=RMS_KEYS,
    layer={**NORMS, **ATTENTION, **GATED},
    bias_fields={},
    defaults={"hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10_000.0},
)

GEMMA2 = Architecture(
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    keys=_KEYS,
    layer=_SANDWICH,
    bias_fields={},
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 10_000.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    derive=_gemma2,
)

GEMMA3 = Architecture(
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    keys={**_KEYS, "rope.freq_base_swa": Key("number", "rope_local_base_freq")},
    layer={**_SANDWICH, **QK_NORMS},
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    derive=_gemma3,
)
