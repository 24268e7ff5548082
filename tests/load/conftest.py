"""Small checkpoints that the tests of core/load write themselves, and the two real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.core.base.errors import ModelNotFound
from octavo.core.load.checkpoint import Checkpoint, open_checkpoint
from octavo.core.load.resolve import resolve_model

# A llama of one layer: hidden 64, 4 heads of 16, 2 KV heads, MLP 96, vocabulary 40.
LLAMA_KEYS: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 50000.0,
}
LLAMA_SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (40, 64),
    "output_norm.weight": (64,),
    "blk.0.attn_norm.weight": (64,),
    "blk.0.attn_q.weight": (64, 64),
    "blk.0.attn_k.weight": (32, 64),
    "blk.0.attn_v.weight": (32, 64),
    "blk.0.attn_output.weight": (64, 64),
    "blk.0.ffn_norm.weight": (64,),
    "blk.0.ffn_gate.weight": (96, 64),
    "blk.0.ffn_up.weight": (96, 64),
    "blk.0.ffn_down.weight": (64, 96),
}
GEMMA_KEYS: dict[str, Any] = {
    "gemma3.block_count": 2,
    "gemma3.context_length": 128,
    "gemma3.embedding_length": 32,
    "gemma3.feed_forward_length": 64,
    "gemma3.attention.head_count": 2,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.key_length": 24,
    "gemma3.attention.value_length": 24,
    "gemma3.attention.sliding_window": 8,
    "gemma3.rope.freq_base": 1e6,
}


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in LLAMA_SHAPES.items()}


def write_gguf(
    path: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
    architecture: str = "llama",
) -> Path:
    """Write a GGUF file; a tensor is an array, or (packed bytes, type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        adders: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        adders[type(value)](key, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf_writer() -> Callable[..., Path]:
    return write_gguf


@pytest.fixture
def llama_keys() -> dict[str, Any]:
    return dict(LLAMA_KEYS)


@pytest.fixture
def gemma_keys() -> dict[str, Any]:
    return dict(GEMMA_KEYS)


@pytest.fixture
def llama_weights() -> dict[str, np.ndarray]:
    return llama_tensors()


@pytest.fixture
def llama_gguf(tmp_path: Path) -> Path:
    """A small, valid llama file in F32."""
    tokenizer = {
        "tokenizer.ggml.tokens": [f"token{i}é" for i in range(40)],
        "tokenizer.ggml.scores": [float(-i) for i in range(40)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return write_gguf(tmp_path / "llama.gguf", LLAMA_KEYS | tokenizer, llama_tensors())


@pytest.fixture
def write_directory(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model directory: {file name: {tensor name: tensor}}, with an index when there is more than one file."""

    def write(files: Mapping[str, Mapping[str, torch.Tensor]], *, index: bool | None = None) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}))
        for name, tensors in files.items():
            save_file(dict(tensors), folder / name)
        if len(files) > 1 if index is None else index:
            weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write


def _open_demo(name: str) -> Checkpoint:
    try:
        return open_checkpoint(resolve_model(name))
    except ModelNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Checkpoint]:
    checkpoint = _open_demo("smollm2")
    yield checkpoint
    checkpoint.close()


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        checkpoint = _open_demo("gemma3-270m")
    yield checkpoint
    checkpoint.close()
