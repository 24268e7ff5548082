"""Quantised checkpoints on the GPU backends, interpreted: their own products multiply the codes, act-order included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.backend import OpSet, QuantScheme
from octavo.core.base.config import EngineConfig
from octavo.core.engine.weight_sizes import has_product_for
from octavo.core.engine.worker import make_backend
from octavo.core.load.checkpoint import Checkpoint, ModelSource, open_checkpoint
from octavo.core.quant.formats import WeightFormats
from octavo.core.quant.open import open_quantized
from tests.fakes import tiny_models
from tests.models.step_runner import ReferenceBackend, StepRunner, load_model, relative_error
from tests.quant import tiny_checkpoints
from tests.quant.test_gguf import write_quantised
from tests.quant.test_models import CASES

TOLERANCE = 1e-4
FLOAT_ACTIVATIONS = [
    "awq", "gptq-act-order", "gptq-8-bit", "gptq-3-bit", "compressed-int4", "compressed-int8-zeros", "compressed-fp8",
    "llm-int8",
]  # fmt: skip
LOOSE = {"compressed-w8a8": 0.15, "fp8-blocks": 0.6, "fp8-tensor": 0.6}
"""Of 8-bit activations, whose rounding is seen; twice what was found."""


@pytest.fixture(params=["cuda", "rocm"])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = make_backend(EngineConfig(model="tiny", backend=request.param))
    yield made
    made.close()


def logits(backend: Any, opened: tuple[Checkpoint, WeightFormats], prompt: list[int], **sizes: Any) -> torch.Tensor:
    checkpoint, formats = opened
    model, opset = load_model(
        checkpoint, backend, formats=formats, block_size=16, max_num_batched_tokens=32, max_model_len=64, **sizes
    )
    checkpoint.close()
    if backend.name != "reference":
        assert {choice.implementation for choice in opset.report()} == {"own"}
        formats_used = {choice.spec.weight.scheme for choice in opset.report() if choice.op == "gemm"}
        assert any(scheme is not None for scheme in formats_used)
    return StepRunner(model, backend, opset, num_blocks=16).prompt("a", prompt).float()


@pytest.mark.parametrize("case", [*FLOAT_ACTIVATIONS, *LOOSE])
def test_llama(case: str, backend: Any, tmp_path: Path) -> None:
    pack, config = CASES[case]
    model = tiny_models.make_llama(**tiny_checkpoints.LLAMA | {"num_hidden_layers": 1})
    path = tiny_checkpoints.write(model, tmp_path, pack, config)
    prompt = tiny_models.random_prompt(97, 9)
    found = logits(backend, tiny_checkpoints.open_directory(path), prompt)
    expected = tiny_models.logits_of(tiny_checkpoints.float_model(tmp_path), prompt)
    assert relative_error(found, expected) < LOOSE.get(case, TOLERANCE)


def test_gguf_blocks(backend: Any, tmp_path: Path) -> None:
    path = write_quantised(tmp_path / "llama.gguf")
    prompt = tiny_models.random_prompt(40, 9)

    def opened(multiplies: Callable[[QuantScheme], bool] | None) -> tuple[Checkpoint, WeightFormats]:
        return open_quantized(open_checkpoint(ModelSource("tiny", path, "gguf")), multiplies=multiplies)

    expected = logits(ReferenceBackend(), opened(None), prompt)
    found = logits(backend, opened(has_product_for(OpSet(backend), backend.capabilities)), prompt)
    assert relative_error(found, expected) < TOLERANCE
