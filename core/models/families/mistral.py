"""Mistral: llama with one window in all layers. Mixtral: the same with experts in place of the feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig, MoeConfig
from octavo.core.models.families.reading import ROUTER_TRAINING, read_base, read_one_window


def read_mistral(values: Mapping[str, Any]) -> DecoderConfig:
    """MistralForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    base = read_base(reader)
    config = DecoderConfig(**base, windows=read_one_window(reader, base["num_layers"]))
    reader.finish()
    return config


def read_mixtral(values: Mapping[str, Any]) -> DecoderConfig:
    """MixtralForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    base = read_base(reader, default_theta=1_000_000.0)
    moe = MoeConfig(
        num_experts=reader.integer("num_local_experts", 8),
        top_k=reader.integer("num_experts_per_tok", 2),
        intermediate_size=base["intermediate_size"],
        gate_function=base["gate"],
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
    )
    config = DecoderConfig(**base, windows=read_one_window(reader, base["num_layers"]), moe=moe)
    reader.finish(inert=ROUTER_TRAINING)
    return config
