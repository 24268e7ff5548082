"""Backends that models are tested on, and models loaded once per test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.backends.cpu.device import CpuBackend
from octavo.core.backend import BackendConfig
from octavo.core.load.checkpoint import ModelSource, open_checkpoint
from tests.fakes import tiny_models
from tests.models.step_runner import ReferenceBackend, StepRunner, load_model


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more; on a busy machine torch's spinning barrier costs fifty times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = ReferenceBackend() if request.param == "reference" else CpuBackend(BackendConfig(num_threads=2))
    yield made
    made.close()


@pytest.fixture
def runner_of(backend: Any, tmp_path: Path) -> Callable[..., StepRunner]:
    """Saves a Hugging Face model, loads it as a checkpoint, and gives a runner of it."""

    def make(model: torch.nn.Module, **options: Any) -> StepRunner:
        directory = tiny_models.save(model, tmp_path / "model")
        checkpoint = open_checkpoint(ModelSource("tiny", directory, "safetensors"))
        loaded, opset = load_model(checkpoint, backend, **options)
        checkpoint.close()
        return StepRunner(loaded, backend, opset)

    return make
