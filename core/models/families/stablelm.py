"""StableLM: llama with layer norms and a quarter of each head rotated; some have parallel branches or normed heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig, WeightNames
from octavo.core.models.families.reading import read_base


def read_stablelm(values: Mapping[str, Any]) -> DecoderConfig:
    """StableLmForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    config = DecoderConfig(
        **read_base(reader, default_fraction=0.25, eps="layer_norm_eps", default_eps=1e-5),
        norm="layer",
        norm_bias=True,
        order="parallel" if reader.boolean("use_parallel_residual", False) else "pre",
        qkv_bias=reader.boolean("use_qkv_bias", False),
        qk_norm="own_layers" if reader.boolean("qk_layernorm", False) else None,
        names=WeightNames(q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm"),
    )
    reader.finish()
    return config
