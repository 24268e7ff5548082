"""A tiny model with adapters, driven step by step; Hugging Face with merged weights is what it must equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.core.load.checkpoint import Checkpoint, ModelSource, open_checkpoint
from octavo.core.lora.slots import AdapterSlots
from octavo.core.quant.formats import PLAIN, WeightFormats
from tests.fakes import tiny_models
from tests.lora.packer import Lora
from tests.models.step_runner import StepRunner, load_model, relative_error

MAX_TOKENS = 256


class AdapterWorld:
    """A model on a backend, and the adapters loaded for it."""

    def __init__(
        self,
        model: torch.nn.Module,
        backend: Any,
        folder: Path,
        *,
        opened: tuple[Checkpoint, WeightFormats] | None = None,
        max_loras: int = 4,
        max_lora_rank: int = 16,
    ) -> None:
        """opened: a checkpoint of the model, where it is not to be saved as it is."""
        self.base = model
        self._folder = folder
        if opened is None:
            path = tiny_models.save(model, folder / "model")
            opened = (open_checkpoint(ModelSource("tiny", path, "safetensors")), PLAIN)
        checkpoint, formats = opened
        self.slots: AdapterSlots

        def make_slots(opset: Any) -> AdapterSlots:
            self.slots = AdapterSlots(
                backend, opset, dtype=torch.float32, max_tokens=MAX_TOKENS, max_loras=max_loras,
                max_lora_rank=max_lora_rank, max_cpu_loras=8,
            )  # fmt: skip
            return self.slots

        loaded, opset = load_model(
            checkpoint, backend, max_num_batched_tokens=MAX_TOKENS, adapters=make_slots, formats=formats
        )
        checkpoint.close()
        self.runner = StepRunner(loaded, backend, opset)
        self.runner.slot_of = {}
        self._merged: dict[str, torch.nn.Module] = {}

    def sequence(self, name: str, lora: Lora | None) -> None:
        """Open a sequence that runs with an adapter, or with the base model."""
        if lora is None:
            self._merged[name] = self.base
        else:
            self.open(name, lora, lora.merged(self.base))

    def open(self, name: str, lora: Lora, merged: torch.nn.Module) -> None:
        """Open a sequence that runs with an adapter; `merged` is what it must equal."""
        facts = self.slots.load(str(lora.save(self._folder / name)))
        assert self.runner.slot_of is not None
        self.runner.slot_of[name] = self.slots.acquire(facts.adapter_id)
        self._merged[name] = merged

    def error(self, name: str, logits_TV: torch.Tensor, token_ids: Sequence[int]) -> float:
        """How far logits at the last positions of a prompt are from Hugging Face's."""
        expected = tiny_models.logits_of(self._merged[name], token_ids)
        return relative_error(logits_TV, expected[-len(logits_TV) :])

    def greedy(self, name: str, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Hugging Face's greedy continuation."""
        return tiny_models.greedy(self._merged[name], token_ids, num_tokens)
