"""Tiny Hugging Face models whose layers are replaced by quantised ones, and the float models that these mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from octavo.core.load.checkpoint import Checkpoint, ModelSource, open_checkpoint
from octavo.core.quant.formats import WeightFormats
from octavo.core.quant.open import open_quantized
from tests.fakes import tiny_models
from tests.quant.packers import Packed

LLAMA: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

Pack = Callable[[str, tuple[int, int], int], Packed | None]
"""A layer's name, its shape and a seed -> how it is stored; None: plain."""


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a linear layer's weight, other than of the head and of routers."""
    return tensor.dim() == 2 and name.endswith("proj.weight")


def write(model: torch.nn.Module, folder: Path, pack: Pack, quantization_config: Mapping[str, Any]) -> Path:
    """Write folder/quantised, and folder/plain with the weights that it means."""
    plain = tiny_models.save(model, folder / "plain")
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        layer = name.removesuffix(".weight")
        packed = pack(layer, (tensor.shape[0], tensor.shape[1]), 7 * seed) if is_linear(name, tensor) else None
        if packed is None:
            stored[name] = tensor
        else:
            stored |= packed.named(layer)
            tensors[name] = packed.weight
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    return write_beside(plain, folder / "quantised", stored, quantization_config)


def write_beside(plain: Path, quantised: Path, stored: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    """A directory with the config of `plain` and other tensors."""
    shutil.copytree(plain, quantised, ignore=shutil.ignore_patterns("*.safetensors"))
    whole = json.loads((plain / "config.json").read_text()) | {"quantization_config": dict(config)}
    (quantised / "config.json").write_text(json.dumps(whole))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, quantised / "model.safetensors")
    return quantised


def float_model(folder: Path) -> torch.nn.Module:
    """Hugging Face's model of folder/plain."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32, attn_implementation="eager")


def open_directory(path: Path, quantization: str | None = None) -> tuple[Checkpoint, WeightFormats]:
    return open_quantized(open_checkpoint(ModelSource("tiny", path, "safetensors")), quantization)
