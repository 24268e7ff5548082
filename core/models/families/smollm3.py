"""SmolLM 3: llama with layers that have no positions, every fourth by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig
from octavo.core.models.families.reading import (
    FULL,
    SLIDING,
    read_base,
    read_layer_types,
    read_no_windows,
    read_rotated,
    read_windows,
)


def read_smollm3(values: Mapping[str, Any]) -> DecoderConfig:
    """SmolLM3ForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    base = read_base(reader, default_theta=2_000_000.0, tied=True)
    is_rotated = read_rotated(reader, base["num_layers"])
    bias = reader.boolean("attention_bias", False)
    config = DecoderConfig(
        **base | {"ropes": tuple(r if has else None for r, has in zip(base["ropes"], is_rotated, strict=True))},
        windows=_windows(reader, is_rotated),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.boolean("mlp_bias", False),
    )
    reader.finish()
    return config


def _windows(reader: ConfigReader, is_rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    if not reader.boolean("use_sliding_window", False):
        return read_no_windows(reader, len(is_rotated))
    default = tuple(FULL if has or not reader.has("sliding_window") else SLIDING for has in is_rotated)
    return read_windows(reader, read_layer_types(reader, len(is_rotated), default))
