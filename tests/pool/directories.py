"""Sentence-transformers directories as tests write them: JSON files and, for dense modules, weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FLAGS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "lasttoken": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
}


def flags(mode: str, width: int) -> dict[str, Any]:
    """A pooling config in the older form: one boolean for each mode."""
    return {"word_embedding_dimension": width} | {flag: name == mode for name, flag in FLAGS.items()}


def compact(mode: str, width: int) -> dict[str, Any]:
    """The same in the compact form."""
    return {"embedding_dimension": width, "pooling_mode": mode, "include_prompt": True}


def write_modules(
    path: Path,
    pooling: Mapping[str, Any],
    *,
    normalize: bool = True,
    dense: tuple[Mapping[str, Any], ...] = (),
    whole: Mapping[str, Any] | None = None,
    sentence: Mapping[str, Any] | None = None,
) -> Path:
    """Put modules.json and what it names into a directory."""
    path.mkdir(parents=True, exist_ok=True)
    chain = [("", "Transformer"), ("1_Pooling", "Pooling")]
    chain += [(f"{2 + place}_Dense", "Dense") for place in range(len(dense))]
    chain += [(f"{2 + len(dense)}_Normalize", "Normalize")] * normalize
    modules = [
        {"idx": idx, "name": str(idx), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for idx, (folder, kind) in enumerate(chain)
    ]
    _write(path / "modules.json", modules)
    _write(path / "1_Pooling" / "config.json", pooling)
    for place, config in enumerate(dense):
        _write(path / f"{2 + place}_Dense" / "config.json", config)
    if whole is not None:
        _write(path / "config_sentence_transformers.json", whole)
    if sentence is not None:
        _write(path / "sentence_bert_config.json", sentence)
    return path


def dense_config(in_features: int, out_features: int, activation: str = "activation.Tanh") -> dict[str, Any]:
    """A dense module's config."""
    return {
        "in_features": in_features,
        "out_features": out_features,
        "bias": True,
        "activation_function": f"torch.nn.modules.{activation}",
    }


def save_dense(folder: Path, layer: torch.nn.Linear) -> None:
    """A dense module's weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"linear.{name}": value.data for name, value in layer.named_parameters()}, folder / "model.safetensors")


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
