"""What the families' readers share: sizes, activations, and the fields that most of them spell as llama does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from octavo.core.backend.specs import Gate
from octavo.core.models.config import ConfigReader
from octavo.core.models.rope import derived_max_position, read_rope

GATES: Mapping[str, Gate] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""Activation, as a config names it, to the gate of a product. Never written to."""

ROUTER_TRAINING = ("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")
"""Fields of mixtures that only training reads."""

DROPOUTS = ("resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout")
"""Fields that only training reads."""

SLIDING, FULL = "sliding_attention", "full_attention"


def read_sizes(reader: ConfigReader, *, intermediate: str = "intermediate_size") -> dict[str, Any]:
    """The sizes of a decoder, checked against each other, under the names of `DecoderConfig`.

    Args:
        intermediate: the field that holds the feed-forward's width.

    Raises:
        CheckpointError: a size is missing or wrong, or heads don't divide.
    """
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.refuse("num_key_value_heads", f"it must divide num_attention_heads, {num_heads}")
    if not reader.has("head_dim") and hidden_size % num_heads:
        raise reader.refuse("num_attention_heads", f"without head_dim it must divide hidden_size, {hidden_size}")
    head_dim = reader.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise reader.refuse("head_dim", "rotary positions need an even number")
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer(intermediate),
        "num_layers": reader.layers("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position": reader.integer("max_position_embeddings"),
    }


def read_base(
    reader: ConfigReader,
    *,
    default_theta: float = 10_000.0,
    default_fraction: float | None = None,
    schemes: Collection[str] | None = None,
    eps: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    activation: str = "silu",
    tied: bool = False,
) -> dict[str, Any]:
    """What a family that spells its config as llama does has in common with it, as arguments of `DecoderConfig`.

    Args:
        default_theta, default_fraction, schemes: as `read_rope` takes them.
        eps, default_eps: the field of the norms' epsilon, and the family's default.
        activation, tied: the family's defaults, for configs that leave hidden_act or tie_word_embeddings out.

    Raises:
        CheckpointError: a field is missing or wrong.
    """
    sizes = read_sizes(reader)
    rope = read_rope(
        reader,
        sizes["head_dim"],
        default_theta=default_theta,
        default_fraction=default_fraction,
        schemes=schemes,
    )
    return sizes | {
        "max_position": derived_max_position(sizes["max_position"], [rope]),
        "norm_eps": reader.number(eps, default_eps),
        "gate": reader.choice("hidden_act", GATES, activation),
        "ropes": (rope,) * sizes["num_layers"],
        "tied": reader.boolean("tie_word_embeddings", tied),
    }


def read_layer_types(reader: ConfigReader, num_layers: int, default: tuple[str, ...]) -> tuple[str, ...]:
    """Each layer's kind of attention: the field `layer_types`, or else the family's default for old configs."""
    return reader.choices("layer_types", (SLIDING, FULL), num_layers) or default


def read_windows(reader: ConfigReader, types: tuple[str, ...], *, default: int | None = None) -> tuple[int | None, ...]:
    """Each layer's window in tokens, from `sliding_window`; None sees all."""
    if SLIDING not in types:
        reader.skip("sliding_window")
        return (None,) * len(types)
    window = reader.integer("sliding_window", default)
    return tuple(window if kind == SLIDING else None for kind in types)


def read_no_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Windows of a config that switches them off: `sliding_window` says nothing, `layer_types` must agree."""
    reader.skip("sliding_window")
    if SLIDING in read_layer_types(reader, num_layers, ()):
        raise reader.refuse("layer_types", "use_sliding_window is false; give one of the two another value")
    return ()


def read_one_window(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The window of all layers, from `sliding_window`; none where that is null or absent."""
    window = reader.optional_integer("sliding_window")
    return () if window is None else (window,) * num_layers


def read_rotated(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers have positions: `no_rope_layers` holds 1 for those that do; by default all but every n-th."""
    period = reader.integer("no_rope_layer_interval", 4)
    default = tuple(int((layer + 1) % period != 0) for layer in range(num_layers))
    flags = reader.integers("no_rope_layers", default)
    if len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise reader.refuse("no_rope_layers", f"it must hold {num_layers} numbers 0 or 1, one per layer")
    return tuple(bool(flag) for flag in flags)
