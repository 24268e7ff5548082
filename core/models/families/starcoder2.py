"""StarCoder 2: layer norms, a feed-forward without a gate, biases everywhere, one window in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig, WeightNames
from octavo.core.models.families.reading import DROPOUTS, read_base, read_one_window


def read_starcoder2(values: Mapping[str, Any]) -> DecoderConfig:
    """Starcoder2ForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    base = read_base(reader, eps="norm_epsilon", default_eps=1e-5, activation="gelu_pytorch_tanh", tied=True)
    bias = reader.boolean("use_bias", True)
    config = DecoderConfig(
        **base | {"gate": None},
        activation=base["gate"],
        norm="layer",
        norm_bias=True,
        windows=read_one_window(reader, base["num_layers"]),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        names=WeightNames(up="mlp.c_fc", down="mlp.c_proj"),
    )
    reader.finish(inert=DROPOUTS, neutral={"mlp_type": "default", "norm_type": "layer_norm"})
    return config
