"""GLM 4: neighbouring pairs of half of each head are rotated; the later class norms each branch before it is added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig, WeightNames
from octavo.core.models.families.reading import read_base

FUSED = WeightNames(gate_up="mlp.gate_up_proj")
SANDWICH = WeightNames(
    gate_up="mlp.gate_up_proj",
    attention_out_norm="post_self_attn_layernorm",
    feed_forward_norm="post_attention_layernorm",
    feed_forward_out_norm="post_mlp_layernorm",
)


def read_glm(values: Mapping[str, Any]) -> DecoderConfig:
    """GlmForCausalLM. Raises CheckpointError."""
    return DecoderConfig(**_read(values), names=FUSED)


def read_glm4(values: Mapping[str, Any]) -> DecoderConfig:
    """Glm4ForCausalLM. Raises CheckpointError."""
    return DecoderConfig(**_read(values), order="sandwich", names=SANDWICH)


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    reader = ConfigReader(values)
    fields = read_base(reader, default_fraction=0.5, default_eps=1.5625e-7)
    fields |= {"interleaved_rope": True, "qkv_bias": reader.boolean("attention_bias", True)}
    reader.finish()
    return fields
