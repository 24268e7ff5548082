"""OLMo 2: branches read the stream as it is and are normed before they are added; q and k are normed over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig
from octavo.core.models.families.reading import read_base


def read_olmo2(values: Mapping[str, Any]) -> DecoderConfig:
    """Olmo2ForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    bias = reader.boolean("attention_bias", False)
    base = read_base(reader, default_eps=1e-5)
    config = DecoderConfig(**base, order="post", qk_norm="width", qkv_bias=bias, out_bias=bias)
    reader.finish()
    return config
