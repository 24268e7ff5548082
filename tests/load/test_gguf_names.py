"""What files of the architectures may say besides what their converters write today: older spellings, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf import GGUFCheckpoint
from octavo.core.load.gguf_names.table import ARCHITECTURES
from octavo.core.pool.read import read_pooler

Writer = Callable[..., Path]
EMBEDDING = np.zeros((40, 64), np.float32)
BASE: dict[str, Any] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
RMS = BASE | {"attention.layer_norm_rms_epsilon": 1e-5}
LAYER = BASE | {"attention.layer_norm_epsilon": 1e-5}
GEMMA = RMS | {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 8}
DEEPSEEK = RMS | {
    "attention.kv_lora_rank": 32,
    "attention.key_length": 24,
    "attention.value_length": 12,
    "attention.head_count_kv": 4,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 0,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 32,
}
INERT = {"attn_rot_embd", "rope_freqs", "rope_factors_long", "rope_factors_short"}
REFUSED: dict[str, set[str]] = {
    "phi2": {"ffn_norm"},  # the branches are parallel and share a norm
    "phi3": {"attn_q", "attn_k", "attn_v"},  # always fused in files
    "deepseek2": {"attn_k", "attn_v"},  # of models without latents
    "bert": {"attn_qkv", "cls", "cls.output", "output_norm"},  # of other encoders, and classifiers
    "glm4": {f"nextn.{part}" for part in ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head",
                                          "shared_head_norm")},
}  # fmt: skip
"""Tensors that the format lists for an architecture, and that no model of its class has here."""


@pytest.fixture
def opened(tmp_path: Path, gguf_writer: Writer) -> Callable[..., GGUFCheckpoint]:
    """Writes a file of an architecture from its own keys and some tensors, and opens it."""

    def make(architecture: str, keys: dict[str, Any], tensors: dict[str, Any] | None = None) -> GGUFCheckpoint:
        own = {f"{architecture}.{key}": value for key, value in keys.items()}
        path = gguf_writer(tmp_path / "m.gguf", own, {"token_embd.weight": EMBEDDING} | (tensors or {}), architecture)
        return GGUFCheckpoint(path)

    return make


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_that_the_format_lists_is_known_or_refused(name: str) -> None:
    architecture = ARCHITECTURES[name]
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    listed = {gguf.TENSOR_NAMES[tensor].replace("blk.{bid}.", "") for tensor in gguf.MODEL_TENSORS[arch]}
    known = {each.split(".")[0] for part in (*architecture.layer, *architecture.top) for each in part.split()}
    assert listed - known - INERT == REFUSED.get(name, set())


def test_experts_that_are_stored_one_by_one(opened: Callable[..., GGUFCheckpoint]) -> None:
    weights = {f"blk.0.ffn_{part}.{expert}.weight": normal(96, 64) for part in ("gate", "up") for expert in (0, 1)}
    checkpoint = opened("llama", RMS | {"expert_count": 2, "expert_used_count": 1}, weights)
    assert checkpoint.config["architectures"] == ["MixtralForCausalLM"]
    assert (checkpoint.config["num_local_experts"], checkpoint.config["num_experts_per_tok"]) == (2, 1)
    expected = {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{w}.weight" for w in ("w1", "w3") for expert in (0, 1)
    }
    assert expected < set(checkpoint.names())


@pytest.mark.parametrize("architecture", ["phi2", "chatglm", "glm4"])
def test_a_fused_product_is_taken_apart(architecture: str, opened: Callable[..., GGUFCheckpoint]) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    weight, bias = normal(128, 64), normal(128)
    packed = gguf.quantize(weight, kind)
    keys = LAYER if architecture == "phi2" else RMS
    checkpoint = opened(architecture, keys, {"blk.0.attn_qkv.weight": (packed, kind), "blk.0.attn_qkv.bias": bias})
    stored = torch.from_numpy(gguf.dequantize(packed, kind))
    for part, rows in (("q", slice(0, 64)), ("k", slice(64, 96)), ("v", slice(96, 128))):
        name = f"model.layers.0.self_attn.{part}_proj"
        assert torch.equal(checkpoint.read(f"{name}.weight"), stored[rows])
        assert torch.equal(checkpoint.read(f"{name}.bias"), torch.from_numpy(bias[rows]))
        assert checkpoint.stored_dtype(f"{name}.weight") == "Q8_0"
    if architecture != "phi2":
        assert checkpoint.config["attention_bias"] is True
    with pytest.raises(CheckpointError, match="has 130 rows where q, k and v have 128"):
        opened(architecture, keys, {"blk.0.attn_qkv.weight": normal(130, 64)})


def test_gate_and_up_of_two_types(opened: Callable[..., GGUFCheckpoint]) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    gate, up = normal(2, 32, 64), normal(2, 32, 64, seed=1)
    packed = gguf.quantize(up, kind)
    keys = RMS | {"attention.sliding_window": 8, "expert_count": 2, "expert_used_count": 1}
    pair = {"blk.0.ffn_gate_exps.weight": gate, "blk.0.ffn_up_exps.weight": (packed, kind)}
    checkpoint = opened("gpt-oss", keys, pair)
    name = "model.layers.0.mlp.experts.1.gate_up_proj.weight"
    read = checkpoint.read(name)
    assert checkpoint.stored_dtype(name) == "F32"
    assert torch.equal(read[0::2], torch.from_numpy(gate[1]))
    assert torch.equal(read[1::2], torch.from_numpy(gguf.dequantize(packed, kind)[1]))
    assert torch.equal(checkpoint.read(name, out=torch.empty(64, 64, dtype=torch.bfloat16)), read.bfloat16())
    with pytest.raises(CheckpointError, match=r"has blk\.0\.ffn_up_exps\.weight but no blk\.0\.ffn_gate_exps\.weight"):
        opened("gpt-oss", keys, {"blk.0.ffn_up_exps.weight": up})
    with pytest.raises(CheckpointError, match=r"\[2, 16, 64\] beside blk\.0\.ffn_gate_exps\.weight"):
        opened("gpt-oss", keys, {"blk.0.ffn_gate_exps.weight": gate, "blk.0.ffn_up_exps.weight": up[:, :16]})


def test_older_deepseek_files(opened: Callable[..., GGUFCheckpoint]) -> None:
    weight = normal(4 * (16 + 12), 32)
    checkpoint = opened("deepseek2", DEEPSEEK, {"blk.0.attn_kv_b.weight": weight})
    assert torch.equal(checkpoint.read("model.layers.0.self_attn.kv_b_proj.weight"), torch.from_numpy(weight))
    config = checkpoint.config
    assert (config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]) == (16, 8, 12)
    assert (config["num_key_value_heads"], config["topk_method"], config["norm_topk_prob"]) == (4, "greedy", False)
    groups = [
        opened("deepseek2", DEEPSEEK | {"expert_count": count, "expert_gating_func": gating}).config
        for count, gating in ((160, 1), (256, 2), (256, 1))
    ]
    assert [(each["n_group"], each["topk_group"]) for each in groups] == [(8, 3), (8, 4), (1, 1)]
    assert groups[0]["topk_method"] == "group_limited_greedy"
    assert groups[1]["architectures"] == ["DeepseekV3ForCausalLM"]
    with pytest.raises(CheckpointError, match="expert_gating_func is 3"):
        opened("deepseek2", DEEPSEEK | {"expert_gating_func": 3})
    apart = {"blk.0.attn_k_b.weight": normal(4, 32, 16), "blk.0.attn_v_b.weight": normal(4, 12, 32)}
    with pytest.raises(CheckpointError, match="under two names"):
        opened("deepseek2", DEEPSEEK, apart | {"blk.0.attn_kv_b.weight": weight})


def test_yarn(opened: Callable[..., GGUFCheckpoint]) -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 16.0,
        "rope.scaling.yarn_beta_slow": 2.0,
    }
    expected = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    }
    assert opened("qwen2", RMS | yarn).config["rope_scaling"] == expected
    found = opened("qwen2", RMS | yarn | {"rope.scaling.attn_factor": 0.5}).config["rope_scaling"]
    assert found == expected | {"attention_factor": pytest.approx(0.5 * (1 + 0.1 * math.log(4.0)))}
    found = opened("deepseek2", DEEPSEEK | yarn | {"rope.scaling.yarn_log_multiplier": 0.0707}).config["rope_scaling"]
    assert found == expected | {"mscale": 0.707, "mscale_all_dim": 0.707}
    assert opened("gpt-oss", RMS | yarn | {"attention.sliding_window": 8, "expert_used_count": 1}).config[
        "rope_scaling"
    ] == expected | {"truncate": False}


def test_divisors_of_frequencies(opened: Callable[..., GGUFCheckpoint]) -> None:
    divisors = np.array([1, 1, 1.5, 2, 3, 8, 8, 8], np.float32)
    found = opened("llama", RMS, {"rope_freqs.weight": divisors}).config["rope_scaling"]
    assert found["rope_type"] == "longrope"
    assert found["short_factor"] == found["long_factor"] == divisors.tolist()
    assert (found["original_max_position_embeddings"], found["attention_factor"]) == (128, 1.0)


def test_patterns_of_windows(opened: Callable[..., GGUFCheckpoint]) -> None:
    three = GEMMA | {"block_count": 3}
    norms = {f"blk.{layer}.attn_norm.weight": np.ones(64, np.float32) for layer in range(3)}

    def slides(keys: dict[str, Any]) -> list[bool]:
        config = opened("gemma2", three | keys, norms).config
        return [kind == "sliding_attention" for kind in config["layer_types"]]

    assert slides({}) == [True, False, True]
    assert slides({"attention.sliding_window_pattern": 3}) == [True, True, False]
    assert slides({"attention.sliding_window_pattern": [False, True, True]}) == [False, True, True]
    assert slides({"attention.sliding_window": 0}) == [False] * 3
    with pytest.raises(CheckpointError, match="it must have 3 entries, one per layer"):
        slides({"attention.sliding_window_pattern": [False]})
    with pytest.raises(CheckpointError, match="not a sensible value"):
        slides({"attention.sliding_window_pattern": 0})


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_gemmas_scale_by_the_width_per_head(
    architecture: str, layers: int, opened: Callable[..., GGUFCheckpoint]
) -> None:
    keys = GEMMA | {"attention.key_length": 8, "attention.value_length": 8}
    norms = {f"blk.{layer}.attn_norm.weight": np.ones(64, np.float32) for layer in range(layers)}
    assert opened(architecture, keys, {}).config["query_pre_attn_scalar"] == 8
    assert opened(architecture, keys | {"block_count": layers}, norms).config["query_pre_attn_scalar"] == 16


def test_a_parallel_stablelm_is_known_by_its_norms(opened: Callable[..., GGUFCheckpoint]) -> None:
    keys = LAYER | {"use_parallel_residual": True}
    norm = {"blk.0.ffn_norm.weight": np.ones(64, np.float32)}
    assert opened("stablelm", keys, norm).config["use_parallel_residual"] is False
    assert opened("stablelm", keys, {}).config["use_parallel_residual"] is True


def test_parts_of_a_head_are_rotated(opened: Callable[..., GGUFCheckpoint]) -> None:
    for rotated in (2, 6, 10, 16):
        config = opened("phi3", RMS | {"rope.dimension_count": rotated}).config
        assert int(16 * config["partial_rotary_factor"]) == rotated
    with pytest.raises(CheckpointError, match=r"rope\.dimension_count is 18 where a head has 16"):
        opened("phi3", RMS | {"rope.dimension_count": 18})


def test_what_a_class_does_not_have_is_refused(opened: Callable[..., GGUFCheckpoint]) -> None:
    experts = RMS | {"expert_count": 4, "expert_used_count": 2}
    for architecture, keys, message in (
        ("qwen2", experts, "mixture of 4 experts, which Qwen2ForCausalLM has none of"),
        ("qwen3moe", experts | {"expert_gating_func": 2}, "expert_gating_func is 2"),
        ("qwen3moe", experts | {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
        ("qwen3moe", RMS, "no key qwen3moe.expert_used_count"),
        ("gpt-oss", experts | {"attention.sliding_window": 8, "expert_gating_func": 2}, "expert_gating_func is 2"),
        ("olmo2", RMS | {"attention.sliding_window": 8}, "olmo2.attention.sliding_window is not supported"),
        ("command-r", LAYER, "no key command-r.logit_scale"),
        ("bert", LAYER | {"attention.causal": True}, "bert.attention.causal is True"),
        ("bert", LAYER, "position_embd.weight is None; the tensor is missing"),
    ):
        with pytest.raises(CheckpointError) as caught:
            opened(architecture, keys)
        assert message in str(caught.value), architecture


def test_granite_without_a_scale_scales_as_llama(opened: Callable[..., GGUFCheckpoint]) -> None:
    assert opened("granite", RMS).config["attention_multiplier"] == 0.25
    assert opened("granite", RMS | {"attention.scale": 0.5}).config["attention_multiplier"] == 0.5


def test_experts_sizes_may_be_left_to_the_tensors(opened: Callable[..., GGUFCheckpoint]) -> None:
    weights = {"blk.0.ffn_gate_exps.weight": normal(4, 24, 64), "blk.0.ffn_gate_shexp.weight": normal(80, 64)}
    config = opened("qwen2moe", RMS | {"expert_count": 4, "expert_used_count": 2}, weights).config
    assert (config["num_experts"], config["moe_intermediate_size"]) == (4, 24)
    assert (config["shared_expert_intermediate_size"], config["norm_topk_prob"]) == (80, False)


@pytest.mark.parametrize(("number", "kind"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_a_pooled_model_says_how(number: int, kind: str, opened: Callable[..., GGUFCheckpoint]) -> None:
    checkpoint = opened("qwen3", RMS | {"pooling_type": number})
    pooler = read_pooler(checkpoint.config, checkpoint.path)
    assert pooler is not None
    assert (pooler.task, pooler.kind, pooler.width, pooler.normalize) == ("embed", kind, 64, True)
    assert read_pooler(checkpoint.config, checkpoint.path, kind) == pooler
    with pytest.raises(CheckpointError, match=f"pools by {kind}, not by"):
        read_pooler(checkpoint.config, checkpoint.path, "cls" if kind != "cls" else "mean")
    generates = opened("qwen3", RMS | {"pooling_type": 0})
    assert read_pooler(generates.config, generates.path) is None


def test_a_key_that_is_the_same_in_all_layers(opened: Callable[..., GGUFCheckpoint]) -> None:
    assert opened("llama", RMS | {"attention.head_count_kv": [2, 2]}).config["num_key_value_heads"] == 2
