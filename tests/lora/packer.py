"""Writes PEFT directories and merges them, from what LoRA and PEFT's file format say, without Octavo's reader.

    W' = W + scale * B @ A        scale = alpha / rank, or alpha / sqrt(rank) with use_rslora

Matrices are large enough that a missing, misplaced or wrongly scaled one is seen far above any tolerance.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass
class Lora:
    """One adapter: config fields, and (A [r, K], B [N, r], scale) by layer."""

    config: dict[str, Any]
    layers: dict[str, tuple[torch.Tensor, torch.Tensor, float]]
    embeddings: frozenset[str] = frozenset()
    extra: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = dict(self.extra)
        for name, (a, b, _) in self.layers.items():
            if name in self.embeddings:
                tensors[f"base_model.model.{name}.lora_embedding_A"] = a
                tensors[f"base_model.model.{name}.lora_embedding_B"] = b
            else:
                tensors[f"base_model.model.{name}.lora_A.weight"] = a
                tensors[f"base_model.model.{name}.lora_B.weight"] = b
        return tensors

    def save(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors().items()}, path / "adapter_model.safetensors"
        )
        return path

    def merged(self, model: torch.nn.Module) -> torch.nn.Module:
        """A copy of the model with the adapter in its weights."""
        merged = copy.deepcopy(model)
        with torch.no_grad():
            for name, (a, b, scale) in self.layers.items():
                delta = scale * b.double() @ a.double()
                weight = merged.get_submodule(name).weight
                weight += (delta.T if name in self.embeddings else delta).to(weight.dtype)
        return merged


def make_lora(
    model: torch.nn.Module,
    targets: Sequence[str],
    *,
    r: int = 4,
    alpha: float = 8,
    rslora: bool = False,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    seed: int = 0,
    **config: Any,
) -> Lora:
    """Random matrices for every module of the model whose name ends with one of `targets`.

    Args:
        ranks, alphas: of layers that end with the key; they become rank_pattern and alpha_pattern.
        config: further fields of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    layers: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
    embeddings = set()
    for name, module in model.named_modules():
        if not any(name == target or name.endswith("." + target) for target in targets):
            continue
        rows, columns = module.weight.shape
        if isinstance(module, torch.nn.Embedding):
            embeddings.add(name)
            rows, columns = columns, rows
        rank = next((rank for end, rank in (ranks or {}).items() if name.endswith(end)), r)
        top = next((top for end, top in (alphas or {}).items() if name.endswith(end)), alpha)
        a = torch.randn(rank, columns, generator=generator) * 0.3
        b = torch.randn(rows, rank, generator=generator) * 0.1
        layers[name] = (a, b, top / math.sqrt(rank) if rslora else top / rank)
    assert layers
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "use_rslora": rslora,
        "rank_pattern": dict(ranks or {}),
        "alpha_pattern": dict(alphas or {}),
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }
    return Lora(fields | config, layers, frozenset(embeddings))
