"""The two real GGUF files: every name translated, the config right, values as the format's own package reads them."""

from __future__ import annotations

import re
import time

import gguf
import numpy as np
import pytest
import torch

from octavo.core.load.checkpoint import Checkpoint
from octavo.core.load.gguf import GGUFCheckpoint
from octavo.core.load.gguf_file import GGUFFile

LLAMA_LAYER = {
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
}
GEMMA_LAYER = LLAMA_LAYER | {
    "self_attn.q_norm",
    "self_attn.k_norm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
}


def expected_names(layers: int, parts: set[str]) -> set[str]:
    in_layers = {f"model.layers.{layer}.{part}.weight" for layer in range(layers) for part in parts}
    return in_layers | {"model.embed_tokens.weight", "model.norm.weight"}


def oracle(file: GGUFFile, name: str) -> np.ndarray:
    """A tensor as the gguf package dequantises its bytes."""
    info = file.tensors[name]
    packed = np.frombuffer(file.data, np.uint8, info.num_bytes, info.start)
    rows = packed.reshape(*info.shape[:-1], -1)
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[info.type.name])


def test_smollm2_config(smollm2: Checkpoint) -> None:
    config = smollm2.config
    assert set(smollm2.names()) == expected_names(30, LLAMA_LAYER)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (576, 1536, 30)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100000.0, 1e-5, True)
    assert smollm2.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tokens = smollm2.metadata["tokenizer.ggml.tokens"]
    assert (len(tokens), tokens[2], tokens[35542]) == (49152, "<|im_end|>", "ABC")
    assert "SmolLM" in smollm2.metadata["tokenizer.chat_template"]


def test_smollm2_values(smollm2: Checkpoint) -> None:
    file = GGUFFile(smollm2.path)
    for hf_name, name in (
        ("model.layers.3.input_layernorm.weight", "blk.3.attn_norm.weight"),  # F32
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),  # Q4_1
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
    ):
        assert torch.equal(smollm2.read(hf_name), torch.from_numpy(oracle(file, name).copy()))
    # q, 9 heads: row (head, half, pair) of the model is row (head, pair, half) of the file.
    stored = oracle(file, "blk.7.attn_q.weight").reshape(9, 32, 2, 576)
    read = smollm2.read("model.layers.7.self_attn.q_proj.weight").numpy().reshape(9, 2, 32, 576)
    assert np.array_equal(read, stored.transpose(0, 2, 1, 3))
    assert smollm2.stored_dtype("model.embed_tokens.weight") == "Q8_0"


def test_gemma3_config(gemma3: Checkpoint) -> None:
    config = gemma3.config
    assert set(gemma3.names()) == expected_names(18, GEMMA_LAYER)
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (640, 2048, 18)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 1, 256)
    assert (config["rope_theta"], config["rope_local_base_freq"], config["sliding_window"]) == (1e6, 1e4, 512)
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert (config["vocab_size"], config["rms_norm_eps"], config["query_pre_attn_scalar"]) == (262144, 1e-6, 256)
    assert config["tie_word_embeddings"]
    assert gemma3.generation_config == {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    assert "tokenizer.chat_template" not in gemma3.metadata
    assert gemma3.norm_weights_include_one


@pytest.mark.parametrize("kind", ["F32", "Q5_0", "Q4_K", "Q6_K", "Q8_0"])
def test_gemma3_values(gemma3: Checkpoint, kind: str) -> None:
    file = GGUFFile(gemma3.path)
    by_type = [name for name in gemma3.names() if gemma3.stored_dtype(name) == kind and "layers" in name]
    own_names = {name: info.shape for name, info in file.tensors.items() if info.type.name == kind and "blk" in name}
    assert len(by_type) == len(own_names)
    for hf_name, name in list(zip(by_type, own_names, strict=True))[::7]:
        assert re.findall(r"layers\.(\d+)", hf_name) == re.findall(r"blk\.(\d+)", name)
        assert torch.equal(gemma3.read(hf_name), torch.from_numpy(oracle(file, name).copy()))


def test_opening_takes_a_small_part_of_a_second(smollm2: Checkpoint) -> None:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        GGUFCheckpoint(smollm2.path).close()
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.15
