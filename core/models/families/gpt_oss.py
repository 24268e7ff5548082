"""gpt-oss: experts with biases and a clamped gate in every layer, heads with sinks, windows in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig, MoeConfig
from octavo.core.models.families.reading import (
    FULL,
    ROUTER_TRAINING,
    SLIDING,
    read_base,
    read_layer_types,
    read_windows,
)


def read_gpt_oss(values: Mapping[str, Any]) -> DecoderConfig:
    """GptOssForCausalLM. Raises CheckpointError.

    `experts_are_split` is in no config.json: a reader of files that hold experts one by one sets it.
    """
    reader = ConfigReader(values)
    base = read_base(reader, default_theta=150_000.0, default_eps=1e-5)
    num_layers = base["num_layers"]
    default = tuple(SLIDING if layer % 2 == 0 else FULL for layer in range(num_layers))
    types = read_layer_types(reader, num_layers, default)
    bias = reader.boolean("attention_bias", True)
    # `experts_per_token` repeats num_experts_per_tok in older files.
    top_k = reader.integer("num_experts_per_tok", reader.integer("experts_per_token", 4))
    config = DecoderConfig(
        **base,
        windows=read_windows(reader, types, default=128),
        sinks=True,
        qkv_bias=bias,
        out_bias=bias,
        moe=MoeConfig(
            num_experts=reader.integer("num_local_experts", 128),
            top_k=top_k,
            intermediate_size=base["intermediate_size"],
            router="mlp.router",
            router_bias=True,
            stacked="interleaved",
            split=reader.boolean("experts_are_split", False),
            bias=True,
            gate_function="swiglu_clamped",
        ),
    )
    reader.finish(
        inert=(*ROUTER_TRAINING, "initial_context_length"), neutral={"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    )
    return config
