"""config.json's fields from a GGUF file's keys and tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_file import GGUFFile
from octavo.core.load.gguf_names.architecture import Architecture, Facts, Key
from octavo.core.load.gguf_names.rope import rope_fields
from octavo.core.load.gguf_names.tokens import token_ids, vocab_size

POOLING = {1: "mean", 2: "cls", 3: "last"}
"""Pooling kinds by their numbers in GGUF; 0 says nothing, 4 is a classifier's."""


def hf_config(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """All fields.

    Raises:
        CheckpointError: a key that the architecture needs is missing, or one is not understood.
    """
    own = _own_keys(file, architecture)
    config: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    config |= architecture.defaults
    config |= {field: value for key, value in own.items() if (field := architecture.keys[key].field) is not None}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    _fill_head_dim(file, architecture, config, own)
    config["vocab_size"] = vocab_size(file)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    for field, part in architecture.bias_fields.items():
        config[field] = any(name.endswith(f".{part}.bias") for name in file.tensors)
    config["torch_dtype"] = _torch_dtype(file)
    config |= rope_fields(file, architecture, own, config) | token_ids(file) | _pooling(file, own)
    if architecture.derive is not None:
        config |= architecture.derive(Facts(file.path, own, file.tensors, config))
    return {field: value for field, value in config.items() if value is not None or field in _MAY_BE_NULL}


_MAY_BE_NULL = ("rope_scaling", "attn_logit_softcapping", "final_logit_softcapping")


def _own_keys(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """The keys under the architecture's prefix, without it, each checked and understood."""
    prefix = f"{file.metadata['general.architecture']}."
    own: dict[str, Any] = {}
    for name in file.metadata:
        if not name.startswith(prefix):
            continue
        key = architecture.keys.get(name.removeprefix(prefix))
        if key is None:
            raise CheckpointError(
                f"{file.path}: the key {name} is not supported and may change the model's results; "
                "take the model's safetensors files",
                field=name,
            )
        own[name.removeprefix(prefix)] = _value(file, name, key)
    missing = [short for short, key in architecture.keys.items() if key.required and short not in own]
    if missing:
        name = prefix + missing[0]
        raise CheckpointError(f"{file.path} has no key {name}; the file is damaged or incomplete", field=name)
    if own["block_count"] > len(file.tensors):
        raise CheckpointError(
            f"{file.path} claims {own['block_count']} layers but holds {len(file.tensors)} tensors; it is damaged",
            field="block_count",
        )
    _refuse_extras(file, architecture, own, prefix)
    return own


def _value(file: GGUFFile, name: str, key: Key) -> Any:
    """A key's value, checked; one that is the same in all layers counts as one."""
    value = file.metadata[name]
    if isinstance(value, list) and key.kind != "flags":
        if not value or any(each != value[0] for each in value):
            raise CheckpointError(f"{file.path}: {name} differs by layer, which is not supported", field=name)
        value = value[0]
    if not _is_sensible(value, key):
        raise CheckpointError(f"{file.path}: {name} is {value!r}, not a sensible value; it is damaged", field=name)
    return _shortest(value) if isinstance(value, float) else value


def _is_sensible(value: Any, key: Key) -> bool:
    """Whether a value is of the key's kind, and of a size that a model may have."""
    if key.kind == "text":
        return isinstance(value, str)
    if key.kind == "flag":
        return isinstance(value, bool)
    if isinstance(value, list):
        return key.kind == "flags" and all(isinstance(each, bool) for each in value)
    is_number = isinstance(value, int | float if key.kind in ("number", "amount") else int)
    if isinstance(value, bool) or not is_number:
        return False
    return 0 <= value < 1 << 31 and (value > 0 or key.kind in ("count", "amount"))


def _refuse_extras(file: GGUFFile, architecture: Architecture, own: Mapping[str, Any], prefix: str) -> None:
    """Refuse experts where the architecture has none, and layers for drafts."""
    if own.get("expert_count", 0) and not any("exps" in str(part) for part in architecture.layer):
        raise CheckpointError(
            f"{file.path} is a mixture of {own['expert_count']} experts, which {architecture.name} has none of; "
            "take the model's safetensors files",
            field=f"{prefix}expert_count",
        )
    if own.get("nextn_predict_layers", 0):
        raise CheckpointError(
            f"{file.path} holds {own['nextn_predict_layers']} layers that draft tokens, which can't be told apart; "
            "take the model's safetensors files",
            field=f"{prefix}nextn_predict_layers",
        )
    is_causal = architecture.rotary != "none"  # of encoders alone nothing is rotated
    if own.get("attention.causal", is_causal) != is_causal:
        raise CheckpointError(
            f"{file.path}: {prefix}attention.causal is {own['attention.causal']}, which {architecture.name} is not",
            field=f"{prefix}attention.causal",
        )


def _fill_head_dim(file: GGUFFile, architecture: Architecture, config: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Set head_dim, and refuse values of another width than keys where heads have no parts."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if "head_dim" not in config:
        if width % heads and architecture.rotary != "latent":
            raise CheckpointError(
                f"{file.path}: a width of {width} can't be shared by {heads} heads; the file is damaged",
                field="attention.head_count",
            )
        config["head_dim"] = width // heads
    values = own.get("attention.value_length", config["head_dim"])
    if architecture.rotary != "latent" and values != config["head_dim"]:
        raise CheckpointError(
            f"{file.path}: attention.value_length is {values} where a head has {config['head_dim']}, "
            "which is not supported",
            field="attention.value_length",
        )


def _pooling(file: GGUFFile, own: Mapping[str, Any]) -> dict[str, Any]:
    """How rows become a vector, where the file says so."""
    kind = own.get("pooling_type", 0)
    if kind == 0:
        return {}
    if kind not in POOLING:
        what = "a classifier, whose layers can't be read from GGUF" if kind == 4 else "an unknown kind of pooling"
        raise CheckpointError(
            f"{file.path}: pooling_type is {kind}, {what}; take the model's safetensors files", field="pooling_type"
        )
    return {"embedding_pooling": POOLING[kind]}


def _torch_dtype(file: GGUFFile) -> str:
    """The dtype most bytes are stored in; quantised types count as float32, to which they are widened."""
    named = {"F16": "float16", "BF16": "bfloat16"}
    weights: dict[str, int] = {}
    for tensor in file.tensors.values():
        dtype = named.get(tensor.type.name, "float32")
        weights[dtype] = weights.get(dtype, 0) + tensor.num_bytes
    return max(weights, key=lambda dtype: weights[dtype])


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-5 for 9.999999747378752e-06."""
    packed = struct.pack("<f", value) if abs(value) < 3.4e38 else b""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if packed and struct.pack("<f", short) == packed:
            return short
    return value
