"""What engine tests run on: the Null backend, or tiny random models on the CPU backend."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.core.backend.registry import BackendRegistry
from octavo.core.base.config import EngineConfig
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.engine import Engine
from octavo.core.engine.llm import LLM
from octavo.core.engine.loading import open_model
from octavo.core.engine.wire import EngineOutput, EngineRequest
from octavo.core.models.registry import FAMILIES, Family
from tests.fakes import null_backend, tiny_models
from tests.fakes.null_model import NULL_ARCHITECTURE, NullConfig, NullModel


class NullWorld:
    """Registers the Null backend and the Null model for one test.

    Attributes:
        backends: every Null backend that was made, oldest first.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.backends: list[null_backend.NullBackend] = []
        self._folder = folder
        discover = BackendRegistry.discover
        made = self.backends

        class RecordedBackend(null_backend.NullBackend):
            def __init__(self, config: Any = None) -> None:
                super().__init__(config)
                made.append(self)

        def discover_with_null() -> BackendRegistry:
            registry = discover()
            registry.register(null_backend, "octavo-null")
            return registry

        monkeypatch.setattr(BackendRegistry, "discover", staticmethod(discover_with_null))
        monkeypatch.setattr(null_backend, "NullBackend", RecordedBackend)
        monkeypatch.setitem(FAMILIES, NULL_ARCHITECTURE, Family("null", NullConfig.read, NullModel))

    def model(self, facts: Mapping[str, Any] | None = None, generation: Mapping[str, Any] | None = None) -> str:
        """A directory with a Null model; `facts` go into config.json, `generation` into generation_config.json."""
        directory = self._folder / f"model-{len(list(self._folder.iterdir()))}"
        directory.mkdir()
        config = {"architectures": [NULL_ARCHITECTURE], "model_type": "null"} | dict(facts or {})
        (directory / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        save_file({}, directory / "model.safetensors")
        return str(directory)

    def config(self, facts: Mapping[str, Any] | None = None, **options: Any) -> EngineConfig:
        """An EngineConfig for a new Null model."""
        model = self.model(facts, options.pop("generation", None))
        return EngineConfig(model=model, **({"backend": "null", "progress": False} | options))

    def engine(self, facts: Mapping[str, Any] | None = None, **options: Any) -> Engine:
        """An Engine over a new Null model."""
        return engine_of(self.config(facts, **options))

    def llm(self, facts: Mapping[str, Any] | None = None, **options: Any) -> LLM:
        """An LLM over a new Null model."""
        model = self.model(facts, options.pop("generation", None))
        return LLM(model, **({"backend": "null", "progress": False} | options))

    def check_nothing_is_left(self) -> None:
        """Every backend was closed and nothing of it is alive."""
        gc.collect()
        assert [backend.closed for backend in self.backends] == [True] * len(self.backends)
        assert [backend.live_bytes for backend in self.backends] == [0] * len(self.backends)


class TinyModels:
    """Tiny random models, saved once per session."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._models: dict[str, torch.nn.Module] = {}
        self._directories: dict[str, Path] = {}

    def reference(self, family: str) -> torch.nn.Module:
        """Hugging Face's model of "llama" or "gemma3"."""
        if family not in self._models:
            make = {"llama": tiny_models.make_llama, "gemma3": tiny_models.make_gemma3}[family]
            self._models[family] = make()
        return self._models[family]

    def directory(self, family: str) -> Path:
        """Where it is saved."""
        if family not in self._directories:
            folder = self._factory.mktemp(family)
            self._directories[family] = tiny_models.save(self.reference(family), folder)
        return self._directories[family]

    def llm(self, family: str, **options: Any) -> LLM:
        """An LLM on the CPU backend."""
        defaults: dict[str, Any] = {"backend": "cpu", "num_threads": 2, "progress": False, "num_kv_blocks": 2000}
        return LLM(str(self.directory(family)), **(defaults | {"block_size": 4} | options))


def engine_of(config: EngineConfig) -> Engine:
    """Load a model and make its engine, as the engine process does."""
    with open_model(config) as checkpoint:
        return Engine.from_checkpoint(config, checkpoint)


@dataclass
class Reply:
    """All that an engine said of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0

    def take(self, output: EngineOutput) -> None:
        assert self.finish_reason is None, "an output after the last one"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs came twice"
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.error, self.num_cached_tokens = output.error, output.num_cached_tokens


class Replies(dict[tuple[str, int], Reply]):
    """(request id, choice) -> Reply."""

    def take(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            self.setdefault((output.request_id, output.index), Reply()).take(output)


def drive(
    engine: Engine, requests: Sequence[EngineRequest] = (), *, between: Callable[[Replies], None] | None = None
) -> Replies:
    """Run until nothing is left to do, checking the block manager after each step.

    Args:
        requests: added at once.
        between: called after each step, with what came so far; may add and abort requests.
    """
    replies = Replies()
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        replies.take(engine.step())
        engine.check_integrity()
        if between is not None:
            between(replies)
    return replies


def check_all_is_free(engine: Engine) -> None:
    """Nothing waits, runs or holds a block."""
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_gated, stats.kv_blocks_used) == (0, 0, 0, 0)
    engine.check_integrity()


def script(token_ids: Sequence[int], then: int = 0) -> SamplingParams:
    """Greedy parameters that force these tokens, and `then` for ever after them."""

    def force(_prompt: Sequence[int], output: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
        wanted = token_ids[len(output)] if len(output) < len(token_ids) else then
        logits_V.fill_(-torch.inf)[wanted] = 0.0
        return logits_V

    return SamplingParams(temperature=0.0, max_tokens=len(token_ids), logits_processors=(force,))
