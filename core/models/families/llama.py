"""Llama 2 and 3, and whoever uses its classes: the decoder that the options' defaults describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig
from octavo.core.models.families.reading import read_base


def read_llama(values: Mapping[str, Any]) -> DecoderConfig:
    """LlamaForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    attention_bias = reader.boolean("attention_bias", False)
    config = DecoderConfig(
        **read_base(reader),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=reader.boolean("mlp_bias", False),
    )
    reader.finish(neutral={"partial_rotary_factor": 1.0})
    return config
