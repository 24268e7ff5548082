"""Gemma: norms that multiply by 1 + weight, embeddings scaled by √M, and from the second on layers with windows.

gemma     the order of llama
gemma 2   sandwich norms, softcaps of scores and logits, every second layer has a window
gemma 3   sandwich norms, normed q and k, five of six layers have a window and a rotary base of their own
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.core.models.config import ConfigReader
from octavo.core.models.decoder.config import DecoderConfig, WeightNames
from octavo.core.models.families.reading import FULL, GATES, SLIDING, read_layer_types, read_sizes, read_windows
from octavo.core.models.rope import derived_max_position, read_layer_ropes, read_rope

SANDWICH = WeightNames(feed_forward_norm="pre_feedforward_layernorm")


def read_gemma(values: Mapping[str, Any]) -> DecoderConfig:
    """GemmaForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    sizes = read_sizes(reader)
    # The first files say "gelu" and mean the approximation; later ones add the other field, which says so.
    gates = {**GATES, "gelu": "gelu_tanh"}
    config = DecoderConfig(**sizes | _one_rope(reader, sizes), **_common(reader, "hidden_act", gates))
    reader.finish(neutral={"hidden_activation": "gelu_pytorch_tanh"})
    return config


def read_gemma2(values: Mapping[str, Any]) -> DecoderConfig:
    """Gemma2ForCausalLM. Raises CheckpointError."""
    reader = ConfigReader(values)
    sizes = read_sizes(reader)
    default = tuple(SLIDING if layer % 2 == 0 else FULL for layer in range(sizes["num_layers"]))
    types = read_layer_types(reader, sizes["num_layers"], default)
    config = DecoderConfig(
        **sizes | _one_rope(reader, sizes),
        **_common(reader),
        order="sandwich",
        windows=read_windows(reader, types, default=4096),
        **_capped(reader, 50.0, 30.0),
        names=SANDWICH,
    )
    reader.finish(neutral={"hidden_act": "gelu_pytorch_tanh"})  # hidden_activation is the one that counts
    return config


def read_gemma3(values: Mapping[str, Any]) -> DecoderConfig:
    """Gemma3ForCausalLM. Raises CheckpointError.

    Hugging Face's class reads attn_logit_softcapping and does not apply it; no published checkpoint sets it.
    """
    reader = ConfigReader(values)
    sizes = read_sizes(reader)
    types = _gemma3_types(reader, sizes["num_layers"])
    ropes = read_layer_ropes(
        reader,
        sizes["head_dim"],
        {FULL: 1_000_000.0, SLIDING: 10_000.0},
        own_base={SLIDING: "rope_local_base_freq"},
    )
    config = DecoderConfig(
        **sizes | {"max_position": derived_max_position(sizes["max_position"], ropes.values(), is_scaled=True)},
        **_common(reader),
        order="sandwich",
        qk_norm="head",
        ropes=tuple(ropes[kind] for kind in types),
        windows=read_windows(reader, types, default=4096),
        **_capped(reader, None, None),
        names=SANDWICH,
    )
    reader.finish(neutral={"hidden_act": "gelu_pytorch_tanh"})  # hidden_activation is the one that counts
    return config


def _one_rope(reader: ConfigReader, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Rotary parameters of all layers, and the length they give."""
    rope = read_rope(reader, sizes["head_dim"], default_theta=10_000.0)
    return {
        "ropes": (rope,) * sizes["num_layers"],
        "max_position": derived_max_position(sizes["max_position"], [rope]),
    }


def _common(
    reader: ConfigReader, activation: str = "hidden_activation", gates: Mapping[str, str] = GATES
) -> dict[str, Any]:
    """What all of them have, as arguments of `DecoderConfig`."""
    attention_bias = reader.boolean("attention_bias", False)
    return {
        "norm": "rms_plus_one",
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
        "gate": reader.choice(activation, gates, "gelu_pytorch_tanh"),
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "tied": reader.boolean("tie_word_embeddings", True),
        "embedding_scale": math.sqrt(reader.integer("hidden_size")),
    }


def _capped(reader: ConfigReader, score: float | None, logit: float | None) -> dict[str, Any]:
    """Scores' scale and softcap, and logits' softcap, from the second Gemma on; defaults are the class's."""
    return {
        "score_scale": 1.0 / math.sqrt(reader.number("query_pre_attn_scalar", 256)),
        "score_softcap": reader.optional_number("attn_logit_softcapping", score),
        "logit_softcap": reader.optional_number("final_logit_softcapping", logit),
    }


def _gemma3_types(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Each layer's kind, from `layer_types` or from the older "every n-th layer is full"."""
    period = reader.integer("sliding_window_pattern", reader.integer("_sliding_window_pattern", 6))
    default = tuple(FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers))
    return read_layer_types(reader, num_layers, default)
