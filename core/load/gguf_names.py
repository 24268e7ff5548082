"""From GGUF's words to Hugging Face's: tensor names, config fields, and the permutation of q and k.

    blk.7.attn_q.weight           ->  model.layers.7.self_attn.q_proj.weight
    llama.embedding_length        ->  hidden_size
    rows of q and k (llama only): (head, pair, half) -> (head, half, pair)

GGUF's llama writers reorder the rows of q and k so that rotary pairs lie side by side; Hugging Face keeps the two
halves of a head apart, and so do Octavo's models. Gemma files are not reordered, but hold their norm weights with
the 1 already added.

Every key under the architecture's own prefix is either translated, checked, or an error: it may change the
mathematics. Only `gguf.py` talks to this.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_file import GGUFFile

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Tables of rotary frequencies that scaled-RoPE models carry; ignoring them would change the mathematics.
_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_COMMON_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_REQUIRED_FIELDS = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_FLOAT_FIELDS = {
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.freq_base_swa",
    "attn_logit_softcapping",
    "final_logit_softcapping",
}
# Understood here or without effect on the mathematics, but no config field of their own.
_OTHER_FIELDS = {
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_count",
    "expert_used_count",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture reads in Hugging Face's words.

    Attributes:
        layer_names: name parts of a layer's tensors.
        fields: key under the architecture's prefix -> config field.
        required: keys that the file must hold.
        defaults: config fields that the file need not hold.
        derive: fills the config fields that follow from others.
        permutes_qk: whether the rows of q and k are reordered.
    """

    layer_names: Mapping[str, str]
    fields: Mapping[str, str]
    defaults: Mapping[str, Any]
    required: tuple[str, ...] = _REQUIRED_FIELDS
    derive: Callable[[dict[str, Any]], None] | None = None
    permutes_qk: bool = False


def _derive_gemma3(config: dict[str, Any]) -> None:
    pattern, layers = config["sliding_window_pattern"], config["num_hidden_layers"]
    config["layer_types"] = [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)
    ]
    # The 27B model alone (62 layers) scales by the width per head and not by head_dim; the file doesn't say so.
    is_27b = layers == 62
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        layer_names=_LAYER_NAMES | {"ffn_norm": "post_attention_layernorm"},
        fields=_COMMON_FIELDS,
        defaults={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
        },
        permutes_qk=True,
    ),
    "gemma3": Architecture(
        layer_names=_LAYER_NAMES
        | {
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        fields=_COMMON_FIELDS
        | {
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults={
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        required=(*_REQUIRED_FIELDS, "attention.sliding_window", "attention.key_length"),
        derive=_derive_gemma3,
    ),
}


def architecture_of(file: GGUFFile) -> Architecture:
    """The file's architecture.

    Raises:
        CheckpointError: it is not one of `ARCHITECTURES`, or it is one part of a split file.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{file.path}: general.architecture is {name!r}; GGUF files of {known} can be loaded",
            field="general.architecture",
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{file.path} is one of {file.metadata['split.count']} parts; join them with `llama-gguf-split --merge`",
            field="split.count",
        )
    for table in _ROPE_TABLES:
        if table in file.tensors:
            raise CheckpointError(
                f"{file.path}: scaled rotary frequencies ({table}) can't be read from GGUF; "
                "take the model's safetensors files",
                field=table,
            )
    return ARCHITECTURES[name]


def hf_names(file: GGUFFile, architecture: Architecture) -> dict[str, str]:
    """Hugging Face name -> GGUF name, in file order; a tensor without a counterpart keeps its own name.

    Raises:
        CheckpointError: two tensors have one Hugging Face name.
    """
    names = {_hf_name(name, architecture): name for name in file.tensors}
    if len(names) < len(file.tensors):
        raise CheckpointError(f"{file.path} holds one tensor under two names; the file is damaged")
    return names


def _hf_name(name: str, architecture: Architecture) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in architecture.layer_names:
        return name
    return f"model.layers.{match[1]}.{architecture.layer_names[match[2]]}.{match[3]}"


def hf_config(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """config.json's fields from the file's keys and tensors.

    Raises:
        CheckpointError: a key that the architecture needs is missing, or one is not understood.
    """
    own = _own_keys(file, architecture)
    missing = [key for key in architecture.required if key not in own]
    if missing:
        name = f"{file.metadata['general.architecture']}.{missing[0]}"
        raise CheckpointError(f"{file.path} has no key {name}; the file is damaged or incomplete", field=name)
    if own["block_count"] > len(file.tensors):
        raise CheckpointError(
            f"{file.path} claims {own['block_count']} layers but holds {len(file.tensors)} tensors; it is damaged",
            field="block_count",
        )
    config = dict(architecture.defaults)
    config.update({architecture.fields[key]: value for key, value in own.items() if key in architecture.fields})
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    _fill_head_dim(file, config, own)
    config["vocab_size"] = _vocab_size(file)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = any(name.endswith("attn_q.bias") for name in file.tensors)
    config["mlp_bias"] = any(name.endswith("ffn_up.bias") for name in file.tensors)
    config["torch_dtype"] = _torch_dtype(file)
    config.update(rope_scaling=_rope_scaling(file, own), **token_ids(file))
    if architecture.derive is not None:
        architecture.derive(config)
    return config


def _own_keys(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """The keys under the architecture's prefix, without it, each checked to be one number and understood."""
    prefix = file.metadata["general.architecture"] + "."
    own: dict[str, Any] = {}
    for key in file.metadata:
        if not key.startswith(prefix):
            continue
        short, value = key.removeprefix(prefix), file.metadata[key]
        if short not in architecture.fields and short not in _OTHER_FIELDS:
            raise CheckpointError(
                f"{file.path}: the key {key} is not supported and may change the model's results; "
                "take the model's safetensors files",
                field=key,
            )
        if isinstance(value, list):
            raise CheckpointError(f"{file.path}: {key} differs by layer, which is not supported", field=key)
        if short in architecture.fields and not _is_sensible(value, allow_float=short in _FLOAT_FIELDS):
            raise CheckpointError(f"{file.path}: {key} is {value!r}, not a sensible number; it is damaged", field=key)
        own[short] = _shortest(value) if isinstance(value, float) else value
    if own.get("expert_count", 0):
        raise CheckpointError(
            f"{file.path} is a mixture of {own['expert_count']} experts, which can't be loaded from GGUF; "
            "take the model's safetensors files",
            field=prefix + "expert_count",
        )
    return own


def _is_sensible(value: Any, *, allow_float: bool) -> bool:
    """Whether a config value is a positive number of a size that a model may have."""
    is_number = isinstance(value, int | float if allow_float else int) and not isinstance(value, bool)
    return is_number and 0 < value < 1 << 31


def _fill_head_dim(file: GGUFFile, config: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Set head_dim, and refuse heads whose parts differ: values of another width, partial rotary."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if "head_dim" not in config:
        if width % heads:
            raise CheckpointError(
                f"{file.path}: a width of {width} can't be shared by {heads} heads; the file is damaged",
                field="attention.head_count",
            )
        config["head_dim"] = width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, config["head_dim"]) != config["head_dim"]:
            raise CheckpointError(
                f"{file.path}: {key} is {own[key]} where a head has {config['head_dim']}, which is not supported",
                field=key,
            )


def _rope_scaling(file: GGUFFile, own: Mapping[str, Any]) -> dict[str, Any] | None:
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", 1.0)
    if kind == "none":
        return None
    if kind != "linear" or not _is_sensible(factor, allow_float=True):
        raise CheckpointError(
            f"{file.path}: rotary scaling {kind!r} by {factor!r} can't be read from GGUF; "
            "take the model's safetensors files",
            field="rope.scaling.type",
        )
    return {"rope_type": "linear", "factor": factor}


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{file.path} has no tensor token_embd.weight; the file is incomplete", field="token_embd.weight"
        )
    return embedding.shape[0]


def _torch_dtype(file: GGUFFile) -> str:
    """The dtype most bytes are stored in; quantised types count as float32, to which they are widened."""
    named = {"F16": "float16", "BF16": "bfloat16"}
    weights: dict[str, int] = {}
    for tensor in file.tensors.values():
        dtype = named.get(tensor.type.name, "float32")
        weights[dtype] = weights.get(dtype, 0) + tensor.num_bytes
    return max(weights, key=lambda dtype: weights[dtype])


def token_ids(file: GGUFFile) -> dict[str, Any]:
    """bos, eos and pad ids; eos_token_id is a list when the file names an end of turn besides the end of text."""
    ids: dict[str, Any] = {}
    for key, name in (("bos_token_id", "bos_token_id"), ("padding_token_id", "pad_token_id")):
        if (token_id := _token_id(file, key)) is not None:
            ids[name] = token_id
    ends = [_token_id(file, key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    distinct = list(dict.fromkeys(end for end in ends if end is not None))
    if distinct:
        ids["eos_token_id"] = distinct if len(distinct) > 1 else distinct[0]
    return ids


def _token_id(file: GGUFFile, key: str) -> int | None:
    name = f"tokenizer.ggml.{key}"
    token_id = file.metadata.get(name)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < _vocab_size(file):
        raise CheckpointError(
            f"{file.path}: {name} is {token_id!r}, outside the vocabulary of {_vocab_size(file)}", field=name
        )
    return token_id


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-5 for 9.999999747378752e-06."""
    packed = struct.pack("<f", value) if abs(value) < 3.4e38 else b""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if packed and struct.pack("<f", short) == packed:
            return short
    return value
