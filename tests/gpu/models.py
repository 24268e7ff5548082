"""Random models of any size, as checkpoints on disk, without a network and without another library's model code.

config ──► the family's own list of tensors (names and shapes) ──► drawn from a seed ──► config.json, model.safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.conformance.harness.host import HostBackend
from octavo.core.backend import OpSet
from octavo.core.models.registry import build_model

STD = 0.2
"""At the usual 0.02, faults of window, rotary base or norm hide under any tolerance."""


def llama(**sizes: Any) -> dict[str, Any]:
    """A config.json of the family."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **sizes,
    }


def gemma3(**sizes: Any) -> dict[str, Any]:
    """A config.json of the family: norms around every block, sliding windows, two rotary bases."""
    layers: int = sizes["num_hidden_layers"]
    kinds = ["full_attention" if index % 3 == 2 else "sliding_attention" for index in range(layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-3,
        "rope_theta": 100_000.0,
        "rope_local_base_freq": 1_000.0,
        "max_position_embeddings": 2048,
        "query_pre_attn_scalar": 20,
        "layer_types": kinds,
        "tie_word_embeddings": False,
        **sizes,
    }


def make(folder: Path, config: Mapping[str, Any], dtype: torch.dtype, *, seed: int = 0, std: float = STD) -> Path:
    """Write the checkpoint; what is there already stays. Norm weights are random too, as ones hide as much."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _shapes(config).items():
        is_one = config["model_type"] == "llama" and name.endswith("norm.weight")
        tensors[name] = (torch.randn(shape, generator=generator) * std + float(is_one)).to(dtype)
    save_file(tensors, folder / "model.safetensors")
    text = json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")})
    (folder / "config.json").write_text(text)
    return folder


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    backend = HostBackend()
    model = build_model(
        config,
        backend=backend,
        opset=OpSet(backend),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        block_size=16,
        max_num_batched_tokens=1,
        max_model_len=16,
    )
    return {name: target.shape for name, target in model.weight_targets().items() if target.required}


def prompts(vocab_size: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Token ids drawn evenly from the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
