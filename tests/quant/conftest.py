"""Quantised checkpoints that the tests write themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.core.load.checkpoint import Checkpoint, ModelSource, open_checkpoint
from octavo.core.quant.formats import WeightFormats
from octavo.core.quant.open import open_quantized

OpenWith = Callable[..., tuple[Checkpoint, WeightFormats]]


@pytest.fixture
def open_with(tmp_path: Path) -> OpenWith:
    """Writes a model directory of these tensors and this quantization_config, and opens it."""

    def make(
        tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None, quantization: str | None = None
    ) -> tuple[Checkpoint, WeightFormats]:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        whole = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}
        (folder / "config.json").write_text(json.dumps(whole | ({"quantization_config": config} if config else {})))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return open_quantized(open_checkpoint(ModelSource("tiny", folder, "safetensors")), quantization)

    return make
