"""GGUF files of Hugging Face models, written as llama.cpp's converters write them.

    save_pretrained ── the names of a published checkpoint ── per architecture: stack, permute, split, add 1
                   ── gguf's own TensorNameMap ── GGUFWriter

Nothing here is taken from what reads the files: names come from the package `gguf`, conventions from its format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file

Tensors = dict[str, np.ndarray]
Q8_0 = gguf.GGMLQuantizationType.Q8_0
PERMUTED = ("llama", "granite", "smollm3")
STAYS_PLAIN = ("norm", "ffn_gate_inp", "position_embd", "token_types", "rope_f", "bias", "attn_sinks")


def write_gguf_file(
    model: torch.nn.Module,
    architecture: str,
    path: Path,
    *,
    quantised: bool = False,
    keys: Mapping[str, str | int | list[Any]] | None = None,
) -> Path:
    """Write a model.

    Args:
        quantised: all matrices that Q8_0 can hold are in it, and the model is rounded likewise.
        keys: more of them, such as a tokenizer's.
    """
    if quantised:
        round_to_q8_0(model)
    config = model.config.to_dict()  # type: ignore[operator, union-attr]
    model.save_pretrained(path.parent / "hugging-face")  # type: ignore[operator]
    tensors = load_file(path.parent / "hugging-face" / "model.safetensors")
    names = gguf.get_tensor_name_map(_arch(architecture), config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, architecture)
    _write_keys(writer, architecture, config)
    for key, value in (keys or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(key, value)  # type: ignore[operator]
    extra = dict(rope_tensors(config))
    for name, data in {**dict(_converted(architecture, config, tensors)), **extra}.items():
        gguf_name = name if name in extra else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if gguf_name.endswith("attn_sinks"):
            gguf_name += ".weight"
        data = np.ascontiguousarray(data.squeeze() if data.ndim == 2 and data.shape[0] == 1 else data)
        if quantised and _takes_q8_0(gguf_name, data):
            writer.add_tensor(gguf_name, gguf.quantize(data, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(gguf_name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_to_q8_0(model: torch.nn.Module) -> None:
    """Round every matrix along the axis that becomes a row of the file; rounding it again changes nothing."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.ndim < 2 or "norm" in name:
                continue
            is_transposed = "GptOss" in type(model).__name__ and tensor.ndim == 3
            rows = tensor.transpose(1, 2) if is_transposed else tensor
            if rows.shape[-1] % 32:
                continue
            rounded = gguf.dequantize(gguf.quantize(np.ascontiguousarray(rows.numpy()), Q8_0), Q8_0)
            rows.copy_(torch.from_numpy(rounded))


def rope_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Divisors of frequencies, for the two schemes that a file holds so."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_divisors(rope, _head_dim(config))


def _llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        divisors.append(1.0 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def _takes_q8_0(name: str, data: np.ndarray) -> bool:
    return data.ndim > 1 and data.shape[-1] % 32 == 0 and not any(part in name for part in STAYS_PLAIN)


def _arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


# -- tensors ----------------------------------------------------------------------------------------------------


def _converted(architecture: str, config: Mapping[str, Any], tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """A published checkpoint's tensors as a converter passes them on to the name map."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, data in tensors.items():
        numbered = re.fullmatch(r"(.*\.(?:experts|norms))\.(\d+)(.*)", name)
        if numbered is not None:
            stacks.setdefault(_stack_name(numbered[1], numbered[3]), {})[int(numbered[2])] = data
        elif name.endswith(("position_ids", "pooler.dense.weight", "pooler.dense.bias")):
            continue
        else:
            yield from _one(architecture, config, name, data)
    for name, parts in stacks.items():
        yield name, np.stack([parts[index] for index in range(len(parts))])


def _stack_name(prefix: str, ending: str) -> str:
    if prefix.endswith(".norms"):
        return prefix.removesuffix(".norms") + ending
    if "block_sparse_moe" in prefix:
        return prefix.replace("model.", "", 1).replace("block_sparse_moe", "feed_forward") + ending
    return prefix + ending


def _one(architecture: str, config: Mapping[str, Any], name: str, data: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
    if architecture in PERMUTED and ".q_proj." in name:
        data = _paired(data, config["num_attention_heads"])
    elif architecture in PERMUTED and ".k_proj." in name:
        data = _paired(data, config["num_key_value_heads"])
    elif architecture.startswith("gemma") and name.endswith("norm.weight"):
        data = data + 1
    elif name.endswith("e_score_correction_bias"):
        name = name.replace("_bias", ".bias")
    elif name.endswith("kv_b_proj.weight"):
        keys, values = np.split(
            data.reshape(config["num_attention_heads"], -1, data.shape[1]), [config["qk_nope_head_dim"]], axis=1
        )
        return [(name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)), (name.replace("kv_b", "v_b"), values)]
    elif architecture == "gpt-oss" and ".experts." in name:
        return _gpt_oss_expert(name, data)
    return [(name, data)]


def _gpt_oss_expert(name: str, data: np.ndarray) -> list[tuple[str, np.ndarray]]:
    ending = ".bias" if name.endswith("_bias") else ".weight"
    name = name.removesuffix("_bias")
    rows = data if ending == ".bias" else data.swapaxes(1, 2)
    if "gate_up" not in name:
        return [(name + ending, rows)]
    return [(name.replace("gate_up", part) + ending, rows[:, at::2]) for at, part in enumerate(("gate", "up"))]


def _paired(data: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs (i, i + D/2) of a head become neighbours."""
    return data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


# -- keys -------------------------------------------------------------------------------------------------------


def _write_keys(writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if architecture == "deepseek2":
        writer.add_head_count_kv(1)
    elif architecture != "bert":
        writer.add_head_count_kv(config["num_key_value_heads"])
    for field, add in (("rms_norm_eps", writer.add_layer_norm_rms_eps), ("layer_norm_eps", writer.add_layer_norm_eps),
                       ("norm_epsilon", writer.add_layer_norm_eps)):  # fmt: skip
        if config.get(field) is not None:
            add(config[field])
    if architecture not in ("deepseek2", "bert") and config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    if architecture != "bert":
        _write_rope(writer, architecture, config)
    if architecture in MORE:
        MORE[architecture](writer, config)


def _write_rope(writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, Any]) -> None:
    rope = config["rope_parameters"]
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    rotated = config["qk_rope_head_dim"] if architecture == "deepseek2" else _head_dim(config)
    writer.add_rope_dimension_count(int(rotated * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for field, add in (("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
                           ("beta_slow", writer.add_rope_scaling_yarn_beta_slow)):  # fmt: skip
            if rope.get(field) is not None:
                add(rope[field])


def _phi3(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope, longest = config["rope_parameters"], config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        stretch = longest / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))


def _moe(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_expert_used_count(config["num_experts_per_tok"])
    for field in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(field):
            writer.add_expert_count(config[field])
            break
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _deepseek2(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    _moe(writer, config)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    is_v3 = config["model_type"] == "deepseek_v3"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_expert_weights_norm(is_v3 and config["norm_topk_prob"])
    if is_v3 or config["topk_method"] != "greedy":
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config["rope_parameters"].get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_parameters"]["mscale_all_dim"])


def _granite(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _gemma(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _cohere2(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _gpt_oss(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    _moe(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _bert(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    del config
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)


MORE: Mapping[str, Callable[[gguf.GGUFWriter, Mapping[str, Any]], None]] = {
    "llama": lambda writer, config: _moe(writer, config) if config.get("num_local_experts") else None,
    "qwen2moe": _moe,
    "qwen3moe": _moe,
    "granite": _granite,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
    "stablelm": lambda writer, config: writer.add_parallel_residual(True),
    "command-r": lambda writer, config: writer.add_logit_scale(config["logit_scale"]),
    "cohere2": _cohere2,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    "bert": _bert,
}
"""What a converter writes besides the common keys. Never written to."""
