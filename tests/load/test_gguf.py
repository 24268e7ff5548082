"""GGUF files in Hugging Face's words: names, config fields, the order of q and k, dtypes; and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf import GGUFCheckpoint

Keys = dict[str, Any]
Weights = dict[str, np.ndarray]
Writer = Callable[..., Path]
EMBEDDING = {"token_embd.weight": np.zeros((40, 64), np.float32)}


def reordered(weight: np.ndarray, heads: int) -> np.ndarray:
    """What a GGUF llama writer does to q and k: rotary pairs (i, i + D/2) of a head become neighbours."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def test_llama_names_shapes_and_values(
    tmp_path: Path, gguf_writer: Writer, llama_keys: Keys, llama_weights: Weights
) -> None:
    in_file = dict(llama_weights)
    in_file["blk.0.attn_q.weight"] = reordered(llama_weights["blk.0.attn_q.weight"], heads=4)
    in_file["blk.0.attn_k.weight"] = reordered(llama_weights["blk.0.attn_k.weight"], heads=2)
    checkpoint = GGUFCheckpoint(gguf_writer(tmp_path / "m.gguf", llama_keys, in_file))
    expected = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    assert checkpoint.names() == tuple(expected)
    for name, tensor in checkpoint.tensors():
        assert torch.equal(tensor, torch.from_numpy(llama_weights[expected[name]])), name
        assert checkpoint.shape(name) == tuple(tensor.shape)
    assert checkpoint.norm_weights_include_one
    assert not checkpoint.tokenizer_files()
    checkpoint.close()


def test_biases_are_named_and_put_in_order(
    tmp_path: Path, gguf_writer: Writer, llama_keys: Keys, llama_weights: Weights
) -> None:
    bias = np.arange(64, dtype=np.float32)
    weights = llama_weights | {
        "blk.0.attn_q.bias": reordered(bias, heads=4),
        "blk.0.ffn_up.bias": np.ones(96, np.float32),
    }
    checkpoint = GGUFCheckpoint(gguf_writer(tmp_path / "m.gguf", llama_keys, weights))
    assert torch.equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias"), torch.from_numpy(bias))
    assert checkpoint.shape("model.layers.0.mlp.up_proj.bias") == (96,)
    assert (checkpoint.config["attention_bias"], checkpoint.config["mlp_bias"]) == (True, True)


def test_quantised_q_is_put_in_order(
    tmp_path: Path, gguf_writer: Writer, llama_keys: Keys, llama_weights: Weights
) -> None:
    kind = gguf.GGMLQuantizationType.Q5_1
    weight = llama_weights["blk.0.attn_q.weight"]
    packed = gguf.quantize(reordered(weight, heads=4), kind)
    weights: dict[str, Any] = llama_weights | {"blk.0.attn_q.weight": (packed, kind)}
    checkpoint = GGUFCheckpoint(gguf_writer(tmp_path / "m.gguf", llama_keys, weights), num_threads=2)
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, kind), kind))
    assert torch.equal(checkpoint.read("model.layers.0.self_attn.q_proj.weight"), expected)
    assert checkpoint.stored_dtype("model.layers.0.self_attn.q_proj.weight") == "Q5_1"
    assert checkpoint.stored_bytes("model.layers.0.self_attn.q_proj.weight") == 64 * 2 * 24


def test_llama_config(llama_gguf: Path) -> None:
    checkpoint = GGUFCheckpoint(llama_gguf)
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 40,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    assert checkpoint.metadata["tokenizer.ggml.tokens"][3] == "token3é"
    assert checkpoint.metadata["tokenizer.chat_template"] == "{{ messages }}"


def test_an_output_head_and_an_end_of_turn(
    tmp_path: Path, gguf_writer: Writer, llama_keys: Keys, llama_weights: Weights
) -> None:
    keys = llama_keys | {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 8.0,
    }
    weights = llama_weights | {"output.weight": np.ones((40, 64), np.float32)}
    checkpoint = GGUFCheckpoint(gguf_writer(tmp_path / "m.gguf", keys, weights))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(checkpoint.read("lm_head.weight"), torch.ones(40, 64))
    assert checkpoint.config["eos_token_id"] == [2, 7]
    assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_gemma3_fills_in_what_its_files_lack(tmp_path: Path, gguf_writer: Writer, gemma_keys: Keys) -> None:
    keys = gemma_keys | {"gemma3.block_count": 7}
    weights = {"token_embd.weight": np.zeros((20, 32), np.float32)}
    weights |= {
        f"blk.{i}.{part}.weight": np.full(24, i, np.float32)
        for i in range(7)
        for part in ("attn_q_norm", "post_ffw_norm")
    }
    weights |= {
        "blk.0.post_attention_norm.weight": np.ones(32, np.float32),
        "blk.0.ffn_norm.weight": np.ones(32, np.float32),
    }
    weights |= {"blk.0.attn_q.weight": np.arange(48 * 32, dtype=np.float32).reshape(48, 32)}
    checkpoint = GGUFCheckpoint(gguf_writer(tmp_path / "g.gguf", keys, weights, "gemma3"))
    config = checkpoint.config
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert (config["rope_theta"], config["rope_local_base_freq"], config["sliding_window"]) == (1e6, 1e4, 8)
    assert (config["head_dim"], config["query_pre_attn_scalar"], config["rms_norm_eps"]) == (24, 24, 1e-6)
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    names = checkpoint.names()
    parts = ("self_attn.q_norm", "post_feedforward_layernorm")
    assert {f"model.layers.{layer}.{part}.weight" for layer in range(7) for part in parts} <= set(names)
    assert "model.layers.0.post_attention_layernorm.weight" in names
    assert "model.layers.0.pre_feedforward_layernorm.weight" in names
    # Gemma's q and k are stored in order.
    expected = torch.from_numpy(weights["blk.0.attn_q.weight"])
    assert torch.equal(checkpoint.read("model.layers.0.self_attn.q_proj.weight"), expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "config_dtype"),
    [("F16", torch.float16, "float16"), ("BF16", torch.bfloat16, "bfloat16"), ("F32", torch.float32, "float32")],
)
def test_plain_types_keep_their_dtype_and_may_be_read_into_another(
    tmp_path: Path, gguf_writer: Writer, llama_keys: Keys, kind: str, dtype: torch.dtype, config_dtype: str
) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    raw = weight.view(torch.uint8).numpy()
    weights = {
        "token_embd.weight": (raw, gguf.GGMLQuantizationType[kind]),
        "output_norm.weight": np.ones(64, np.float32),
    }
    checkpoint = GGUFCheckpoint(gguf_writer(tmp_path / "m.gguf", llama_keys, weights))
    name = "model.embed_tokens.weight"
    read = checkpoint.read(name)
    assert read.dtype == dtype
    assert torch.equal(read, weight)
    assert checkpoint.config["torch_dtype"] == config_dtype
    for other in (torch.float32, torch.bfloat16):
        out = torch.empty(40, 64, dtype=other)
        assert checkpoint.read(name, out=out) is out
        assert torch.equal(out, weight.to(other))


def test_a_wrong_buffer_is_the_callers_mistake(llama_gguf: Path) -> None:
    checkpoint = GGUFCheckpoint(llama_gguf)
    for out in (torch.empty(64, 40), torch.empty(64, 40).T):
        with pytest.raises(ValueError, match="contiguous"):
            checkpoint.read("model.embed_tokens.weight", out=out)
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.read("nothing")


def test_a_returned_tensor_outlives_the_checkpoint(llama_gguf: Path, llama_weights: Weights) -> None:
    checkpoint = GGUFCheckpoint(llama_gguf)
    embedding = checkpoint.read("model.embed_tokens.weight")
    checkpoint.close()
    del checkpoint
    embedding += 1
    assert torch.equal(embedding, torch.from_numpy(llama_weights["token_embd.weight"]) + 1)


@pytest.mark.parametrize(
    ("changes", "part_of_message"),
    [
        ({"llama.expert_count": 8}, "expert_used_count is None; a mixture of experts must say"),
        ({"llama.expert_count": 8.5}, "llama.expert_count is 8.5"),
        ({"llama.nextn_predict_layers": 1}, "1 layers that draft tokens"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False"),
        ({"llama.pooling_type": 4}, "pooling_type is 4, a classifier"),
        ({"llama.pooling_type": 9}, "pooling_type is 9, an unknown kind"),
        ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8 where a head has 16"),
        ({"llama.attention.value_length": 32}, "attention.value_length is 32"),
        ({"llama.rope.scaling.type": "ntk", "llama.rope.scaling.factor": 4.0}, "rope.scaling.type is 'ntk', by 4.0"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "is 'linear', by 0.0"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_ext_factor": 0.5,
            },
            "yarn_ext_factor is 0.5",
        ),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.original_context_length is missing"),
        ({"llama.attention.head_count": [4, 2]}, "differs by layer"),
        ({"llama.attention.head_count": 5}, "can't be shared by 5 heads"),
        ({"llama.block_count": 1 << 30}, "claims 1073741824 layers"),
        ({"llama.block_count": 0}, "llama.block_count is 0"),
        ({"llama.block_count": "one"}, "llama.block_count is 'one'"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base is nan"),
        ({"llama.embedding_length": None}, "no key llama.embedding_length"),
        ({"tokenizer.ggml.eos_token_id": 40}, "outside the vocabulary of 40"),
        ({"tokenizer.ggml.bos_token_id": "1"}, "outside the vocabulary of 40"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_would_change_the_results_is_refused_by_name(
    tmp_path: Path, gguf_writer: Writer, llama_keys: Keys, llama_weights: Weights, changes: Keys, part_of_message: str
) -> None:
    keys = {key: value for key, value in (llama_keys | changes).items() if value is not None}
    path = gguf_writer(tmp_path / "m.gguf", keys, llama_weights)
    with pytest.raises(CheckpointError) as caught:
        GGUFCheckpoint(path)
    assert part_of_message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "architecture", "part_of_message"),
    [
        ({"token_embd.weight": np.zeros((40, 64), np.float32)}, "mamba", "'mamba'; GGUF files of bert, chatglm, "),
        ({"output_norm.weight": np.zeros(64, np.float32)}, "llama", "no tensor token_embd.weight"),
        (EMBEDDING | {"model.norm.weight": np.zeros(64, np.float32)}, "llama", "the tensor model.norm.weight is not"),
        (EMBEDDING | {"blk.0.ffn_sub_norm.weight": np.zeros(64, np.float32)}, "llama", "blk.0.ffn_sub_norm.weight is"),
        (EMBEDDING | {"blk.0.attn_q.scale": np.zeros(1, np.float32)}, "llama", "the tensor blk.0.attn_q.scale is not"),
        (EMBEDDING | {"blk.1.attn_q.weight": np.zeros((64, 64), np.float32)}, "llama", "blk.1.attn_q.weight is not"),
        (EMBEDDING | {"rope_freqs.weight": np.ones(7, np.float32)}, "llama", "rope_freqs.weight is F32 of shape [7]"),
        (EMBEDDING | {"rope_freqs.weight": np.zeros(8, np.float32)}, "llama", "rope_freqs.weight holds what is no div"),
        (EMBEDDING | {"rope_factors_long.weight": np.ones(8, np.float32)}, "llama", "original_context_length is missi"),
        (EMBEDDING | {"blk.0.attn_q.weight": np.zeros((62, 64), np.float32)}, "llama", "has 62 rows, which 4 heads"),
        (EMBEDDING | {"blk.0.ffn_up_exps.weight": np.zeros((96, 64), np.float32)}, "llama", "not 3 dimensions"),
    ],
)
def test_foreign_tensors_and_architectures(
    tmp_path: Path, gguf_writer: Writer, llama_keys: Keys, weights: Weights, architecture: str, part_of_message: str
) -> None:
    path = gguf_writer(tmp_path / "m.gguf", llama_keys, weights, architecture)
    with pytest.raises(CheckpointError) as caught:
        GGUFCheckpoint(path)
    assert part_of_message in str(caught.value)


def test_fingerprints_follow_the_content(
    tmp_path: Path, gguf_writer: Writer, llama_keys: Keys, llama_weights: Weights
) -> None:
    first = gguf_writer(tmp_path / "a.gguf", llama_keys, llama_weights)
    copy = gguf_writer(tmp_path / "b.gguf", llama_keys, llama_weights)
    llama_weights["blk.0.ffn_up.weight"][50, 3] += 1
    other = gguf_writer(tmp_path / "c.gguf", llama_keys, llama_weights)
    prints = [GGUFCheckpoint(path).fingerprint for path in (first, copy, other)]
    assert prints[0] == prints[1] != prints[2]


def test_opening_imports_no_torch(llama_gguf: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from octavo.core.load.resolve import resolve_model\n"
        "from octavo.core.load.checkpoint import open_checkpoint\n"
        f"checkpoint = open_checkpoint(resolve_model({str(llama_gguf)!r}))\n"
        "assert checkpoint.config['hidden_size'] == 64\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub', 'gguf') if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()
    )
    assert result.stdout.strip() == "[]"


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
