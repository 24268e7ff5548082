"""Cohere's Command: layer norms without bias, parallel branches, neighbouring pairs rotated, scaled logits.

The second class has windows in three of four layers, and positions in those alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig
from octavo.core.models.families.reading import FULL, SLIDING, read_base, read_layer_types, read_windows


def read_cohere(values: Mapping[str, Any]) -> DecoderConfig:
    """CohereForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    config = DecoderConfig(
        **_common(reader, 500_000.0), qk_norm="own" if reader.boolean("use_qk_norm", False) else None
    )
    reader.finish()
    return config


def read_cohere2(values: Mapping[str, Any]) -> DecoderConfig:
    """Cohere2ForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    fields = _common(reader, 10_000.0)
    num_layers = fields["num_layers"]
    period = reader.integer("sliding_window_pattern", reader.integer("_sliding_window_pattern", 4))
    default = tuple(FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers))
    types = read_layer_types(reader, num_layers, default)
    ropes = tuple(rope if kind == SLIDING else None for rope, kind in zip(fields["ropes"], types, strict=True))
    config = DecoderConfig(**fields | {"ropes": ropes}, windows=read_windows(reader, types, default=4096))
    reader.finish(neutral={"rotary_pct": 1.0, "order_of_interleaved_layers": "local_attn_first"})
    return config


def _common(reader: ConfigReader, theta: float) -> dict[str, Any]:
    bias = reader.boolean("attention_bias", False)
    return read_base(reader, default_theta=theta, eps="layer_norm_eps", default_eps=1e-5, tied=True) | {
        "norm": "layer",
        "order": "parallel",
        "interleaved_rope": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "logit_scale": reader.number("logit_scale", 0.0625),
    }
