"""Phi 3 and 4: llama with fused products. Phi 1 and 2: layer norms, parallel branches, a part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig, WeightNames
from octavo.core.models.families.reading import DROPOUTS, GATES, read_base, read_one_window, read_sizes
from octavo.core.models.rope import derived_max_position, read_rope


def read_phi3(values: Mapping[str, Any]) -> DecoderConfig:
    """Phi3ForCausalLM, which Phi 4 is too. Raises CheckpointError."""
    reader = ConfigReader(values)
    base = read_base(reader, default_fraction=1.0, schemes=("longrope",))
    config = DecoderConfig(
        **base,
        windows=read_one_window(reader, base["num_layers"]),
        names=WeightNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    )
    reader.finish(inert=DROPOUTS)
    return config


def read_phi(values: Mapping[str, Any]) -> DecoderConfig:
    """PhiForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    sizes = read_sizes(reader)
    rope = read_rope(reader, sizes["head_dim"], default_theta=10_000.0, default_fraction=0.5)
    config = DecoderConfig(
        **sizes | {"max_position": derived_max_position(sizes["max_position"], [rope])},
        order="parallel",
        norm="layer",
        norm_bias=True,
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        qk_norm="head" if reader.boolean("qk_layernorm", False) else None,
        ropes=(rope,) * sizes["num_layers"],
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gate=None,
        activation=reader.choice("hidden_act", GATES, "gelu_new"),
        tied=reader.boolean("tie_word_embeddings", False),
        head_bias=True,
        names=WeightNames(
            final_norm="model.final_layernorm",
            o="self_attn.dense",
            up="mlp.fc1",
            down="mlp.fc2",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
        ),
    )
    reader.finish(inert=DROPOUTS)
    return config
