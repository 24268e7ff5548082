"""Qwen 2: llama with biases on q, k and v. Qwen 3: with normed heads in their place. Both also with experts."""

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
    read_no_windows,
    read_one_window,
    read_windows,
)


def read_qwen2(values: Mapping[str, Any]) -> DecoderConfig:
    """Qwen2ForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    base = read_base(reader)
    config = DecoderConfig(**base, qkv_bias=True, windows=_windows(reader, base["num_layers"]))
    reader.finish()
    return config


def read_qwen3(values: Mapping[str, Any]) -> DecoderConfig:
    """Qwen3ForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    base = read_base(reader)
    config = DecoderConfig(**base, **_normed_heads(reader), windows=_windows(reader, base["num_layers"]))
    reader.finish()
    return config


def read_qwen2_moe(values: Mapping[str, Any]) -> DecoderConfig:
    """Qwen2MoeForCausalLM: with a shared expert, by as much as its gate says. Raises CheckpointError."""
    reader = ConfigReader(values)
    base = read_base(reader)
    config = DecoderConfig(
        **base,
        qkv_bias=reader.boolean("qkv_bias", True),
        windows=_windows(reader, base["num_layers"]),
        moe=MoeConfig(
            **_experts(reader, base, "num_experts", 60, 4, 1408),
            shared="mlp.shared_expert",
            shared_intermediate_size=reader.integer("shared_expert_intermediate_size", 5632),
            shared_gate="mlp.shared_expert_gate",
        ),
        moe_layers=_expert_layers(reader, base["num_layers"]),
    )
    reader.finish(inert=ROUTER_TRAINING)
    return config


def read_qwen3_moe(values: Mapping[str, Any]) -> DecoderConfig:
    """Qwen3MoeForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    base = read_base(reader)
    experts = "num_local_experts" if reader.has("num_local_experts") else "num_experts"
    is_sliding = reader.boolean("use_sliding_window", False)
    if not is_sliding:
        reader.skip("sliding_window")
    config = DecoderConfig(
        **base,
        **_normed_heads(reader),
        windows=read_one_window(reader, base["num_layers"]) if is_sliding else (),
        moe=MoeConfig(**_experts(reader, base, experts, 128, 8, 768)),
        moe_layers=_expert_layers(reader, base["num_layers"]),
    )
    reader.skip("max_window_layers")
    reader.finish(inert=ROUTER_TRAINING)
    return config


def _normed_heads(reader: ConfigReader) -> dict[str, Any]:
    bias = reader.boolean("attention_bias", False)
    return {"qk_norm": "head", "qkv_bias": bias, "out_bias": bias}


def _windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The first max_window_layers see all; the others have a window where the config asks for windows at all."""
    first = reader.count("max_window_layers", 28)
    if not reader.boolean("use_sliding_window", False):
        return read_no_windows(reader, num_layers)
    default = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return read_windows(reader, read_layer_types(reader, num_layers, default), default=4096)


def _experts(
    reader: ConfigReader, base: Mapping[str, Any], field: str, experts: int, top_k: int, width: int
) -> dict[str, Any]:
    """Arguments of a mixture; `field` holds the number of experts, the rest are the class's defaults."""
    return {
        "num_experts": reader.integer(field, experts),
        "top_k": reader.integer("num_experts_per_tok", top_k),
        "intermediate_size": reader.integer("moe_intermediate_size", width),
        "renormalize": reader.boolean("norm_topk_prob", False),
        "gate_function": base["gate"],
    }


def _expert_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """The layers with experts: every `decoder_sparse_step`-th, but those named in `mlp_only_layers`."""
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.integers("mlp_only_layers", ())
    return tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)
