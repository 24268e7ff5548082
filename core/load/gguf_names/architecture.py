"""What one GGUF architecture is, in Hugging Face's words: the shape of a table's entry.

A file's keys under the architecture's own prefix are either named in `keys`, or an error: they may change the
mathematics. Its tensors are either named in `layer` or `top`, known to be without effect, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_file import TensorInfo
from octavo.core.load.gguf_names.rules import Rule, Same

KeyKind = Literal["integer", "count", "number", "amount", "flag", "text", "flags"]
"""integer: at least 1. count: at least 0. number: above 0. amount: at least 0. flags: a bool of each layer, or one
integer, the period of a pattern."""

Rotary = Literal["whole", "partial", "latent", "none"]
"""What is rotated of a head: all of it; the part that the file says; the part beside latent attention's; nothing."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        kind: what values it may have.
        field: the config field that it becomes; None: it is read, or compared, where the config is made.
        required: whether the file must hold it.
    """

    kind: KeyKind = "integer"
    field: str | None = None
    required: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """What `derive` sees of a file.

    Attributes:
        path: of the file, for messages.
        own: the keys under the architecture's prefix, without it.
        tensors: by name.
        config: config.json's fields so far.
    """

    path: Path
    own: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]

    def layers_with(self, part: str) -> list[int]:
        """The layers that hold a tensor, by the part of its name between the layer and `.weight`."""
        return [layer for layer in range(self.config["num_hidden_layers"]) if self._name(layer, part) in self.tensors]

    def rows(self, part: str) -> int | None:
        """Rows of a layer's matrices of that name: the last but one of the dimensions; None where no layer has it."""
        layers = self.layers_with(part)
        return self.tensors[self._name(layers[0], part)].shape[-2] if layers else None

    def refuse(self, key: str, reason: str) -> CheckpointError:
        """An error about a key."""
        return CheckpointError(f"{self.path}: {key} is {self.own.get(key)!r}; {reason}", field=key)

    @staticmethod
    def _name(layer: int, part: str) -> str:
        return f"blk.{layer}.{part}.weight"


def _rules(names: Mapping[str, str]) -> dict[str, Rule]:
    return {part: Same(name) for part, name in names.items()}


TOP: Mapping[str, Rule] = _rules({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
NORMS: Mapping[str, Rule] = _rules({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
ATTENTION: Mapping[str, Rule] = _rules(
    {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
    }
)
GATED: Mapping[str, Rule] = _rules({"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"})
QK_NORMS: Mapping[str, Rule] = _rules({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
"""Parts of tables, shared by many. Never written to."""

BASE_KEYS: Mapping[str, Key] = {
    "block_count": Key("integer", "num_hidden_layers", required=True),
    "context_length": Key("integer", "max_position_embeddings", required=True),
    "embedding_length": Key("integer", "hidden_size", required=True),
    "feed_forward_length": Key("integer", "intermediate_size", required=True),
    "attention.head_count": Key("integer", "num_attention_heads", required=True),
    "attention.head_count_kv": Key("integer", "num_key_value_heads"),
    "attention.key_length": Key("integer", "head_dim"),
    "attention.value_length": Key(),
    "attention.causal": Key("flag"),
    "vocab_size": Key(),
    "pooling_type": Key("count"),
    "expert_count": Key("count"),
    "expert_used_count": Key("count"),
    "nextn_predict_layers": Key("count"),
}
"""The keys of nearly all architectures. Never written to."""

ROPE_KEYS: Mapping[str, Key] = {
    "rope.dimension_count": Key(),
    "rope.freq_base": Key("number", "rope_theta"),
    "rope.scaling.type": Key("text"),
    "rope.scaling.factor": Key("amount"),
    "rope.scaling.original_context_length": Key("integer"),
    "rope.scaling.finetuned": Key("flag"),
    "rope.scaling.attn_factor": Key("number"),
    "rope.scaling.yarn_ext_factor": Key("amount"),
    "rope.scaling.yarn_attn_factor": Key("number"),
    "rope.scaling.yarn_beta_fast": Key("number"),
    "rope.scaling.yarn_beta_slow": Key("number"),
}
RMS_KEYS: Mapping[str, Key] = {
    **BASE_KEYS,
    **ROPE_KEYS,
    "attention.layer_norm_rms_epsilon": Key("number", "rms_norm_eps", required=True),
}
MOE_KEYS: Mapping[str, Key] = {
    "expert_count": Key("count"),
    "expert_used_count": Key("count", "num_experts_per_tok", required=True),
    "expert_feed_forward_length": Key("integer", "moe_intermediate_size"),
    "expert_gating_func": Key("count"),
    "expert_weights_norm": Key("flag", "norm_topk_prob"),
    "expert_weights_scale": Key("amount"),
}
WINDOW_KEYS: Mapping[str, Key] = {
    "attention.sliding_window": Key("count"),
    "attention.sliding_window_pattern": Key("flags"),
}

_BIAS_FIELDS = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}


def layer_norm_keys(field_name: str) -> dict[str, Key]:
    """The keys of a model with layer norms, whose epsilon is the named config field."""
    epsilon = Key("number", field_name, required=True)
    return {**BASE_KEYS, **ROPE_KEYS, "attention.layer_norm_epsilon": epsilon}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one GGUF architecture reads in Hugging Face's words.

    Attributes:
        name: Hugging Face's class.
        model_type: Hugging Face's name of its config.
        keys: under the architecture's prefix.
        layer: of a layer's tensors, by the part of the name between the layer and the ending (`attn_q`: the rule's
            name lacks the ending), by part and ending (`attn_sinks.weight`: it is the whole name), by part and # for
            tensors with a number, or by two of these, with a space between, for tensors that belong together.
        top: of all others, likewise.
        layer_prefix: of a layer's names at Hugging Face; {} is its index.
        defaults: config fields that the file need not hold.
        bias_fields: config field -> the part whose bias says that it is true.
        rotary: what is rotated of a head.
        yarn: fields of every yarn scaling.
        derive: the config fields that follow from others. They outrank those before them; None leaves a field out.
    """

    name: str
    model_type: str
    keys: Mapping[str, Key]
    layer: Mapping[str, Rule]
    top: Mapping[str, Rule] = field(default_factory=lambda: TOP)
    layer_prefix: str = "model.layers.{}."
    defaults: Mapping[str, Any] = field(default_factory=dict)
    bias_fields: Mapping[str, str] = field(default_factory=lambda: _BIAS_FIELDS)
    rotary: Rotary = "whole"
    yarn: Mapping[str, Any] = field(default_factory=dict)
    derive: Callable[[Facts], Mapping[str, Any]] | None = None
