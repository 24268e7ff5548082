"""The Null backend as a plug-in, Null models on disk, and SmolLM2's tokenizer over a model that follows a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.core.engine.llm import LLM
from tests.engine.worlds import NullWorld, TinyModels


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The Null backend's tensors are tiny: torch's threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def null(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NullWorld:
    """Engines over the Null backend and the Null model."""
    return NullWorld(monkeypatch, tmp_path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Directories of tiny random models, each made once."""
    return TinyModels(tmp_path_factory)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The Null model with SmolLM2's vocabulary and tokenizer; requests force their tokens by `script`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = NullWorld(monkeypatch, tmp_path_factory.mktemp("scripted"))
        llm = world.llm({"vocab_size": 49152}, tokenizer="smollm2", num_kv_blocks=2000)
    with llm:
        yield llm


@pytest.fixture(scope="session")
def scripted_gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The same with Gemma's."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = NullWorld(monkeypatch, tmp_path_factory.mktemp("scripted-gemma"))
        llm = world.llm({"vocab_size": 262144}, tokenizer="gemma3-270m", num_kv_blocks=50)
    with llm:
        yield llm
