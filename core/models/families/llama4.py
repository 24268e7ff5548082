"""Llama 4's text model: experts weigh their inputs, most layers have positions and see one chunk, heads are normed.

Attention in chunks and the temperature of far positions are neutral below their own lengths; the model is read for
positions up to there (8,191 as published), and `max_position` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig, MoeConfig, WeightNames
from octavo.core.models.families.reading import FULL, ROUTER_TRAINING, read_base, read_rotated

CHUNKED = "chunked_attention"


def read_llama4(values: Mapping[str, Any]) -> DecoderConfig:
    """Llama4ForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    # Schemes that lengthen rotated heads are left out: the class norms them afterwards, we before.
    base = read_base(
        reader, default_theta=500_000.0, default_eps=1e-5, schemes=("linear", "dynamic", "llama3", "proportional")
    )
    num_layers, expert_size = base["num_layers"], base["intermediate_size"]
    is_rotated = read_rotated(reader, num_layers)
    bias = reader.boolean("attention_bias", False)
    config = DecoderConfig(
        **base
        | {
            "intermediate_size": reader.integer("intermediate_size_mlp", 16384),
            "max_position": min(base["max_position"], _neutral_length(reader, num_layers)),
            "ropes": tuple(r if has else None for r, has in zip(base["ropes"], is_rotated, strict=True)),
        },
        interleaved_rope=True,
        qk_norm="unit" if reader.boolean("use_qk_norm", True) else None,
        qkv_bias=bias,
        out_bias=bias,
        moe=MoeConfig(
            num_experts=reader.integer("num_local_experts", 16),
            top_k=_one_expert(reader),
            intermediate_size=expert_size,
            scoring="sigmoid",
            renormalize=False,
            weigh_inputs=True,
            router="feed_forward.router",
            experts="feed_forward.experts",
            stacked="halves",
            gate_function=base["gate"],
            shared="feed_forward.shared_expert",
            shared_intermediate_size=expert_size,
        ),
        moe_layers=_expert_layers(reader, num_layers),
        names=WeightNames(gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj"),
    )
    reader.finish(inert=ROUTER_TRAINING)
    return config


def _neutral_length(reader: ConfigReader, num_layers: int) -> int:
    """Positions below which chunks and temperature change nothing."""
    lengths = []
    types = reader.choices("layer_types", (CHUNKED, FULL), num_layers)
    if types is None or CHUNKED in types:
        lengths.append(reader.integer("attention_chunk_size", 8192))
    floor, _ = reader.integer("floor_scale", 8192), reader.number("attn_scale", 0.1)
    if reader.boolean("attn_temperature_tuning", True):
        lengths.append(floor - 1)
    reader.skip("attention_chunk_size")
    return min(lengths, default=1 << 40)


def _one_expert(reader: ConfigReader) -> int:
    top_k = reader.integer("num_experts_per_tok", 1)
    if top_k != 1:
        raise reader.refuse("num_experts_per_tok", "only one expert per token is implemented for the family")
    return top_k


def _expert_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    step = reader.integer("interleave_moe_layer_step", 1)
    return reader.integers("moe_layers", tuple(range(step - 1, num_layers, step)))
