"""Granite: llama with a factor at the embedding, at the scores, at every branch and at the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig
from octavo.core.models.families.reading import read_base


def read_granite(values: Mapping[str, Any]) -> DecoderConfig:
    """GraniteForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    attention_bias = reader.boolean("attention_bias", False)
    config = DecoderConfig(
        **read_base(reader),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=reader.boolean("mlp_bias", False),
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        score_scale=reader.number("attention_multiplier", 1.0),
        residual_scale=reader.number("residual_multiplier", 1.0),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
    )
    reader.finish()
    return config
