"""An encoder driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.core.backend.device import StepBuffers
from octavo.core.backend.kv import AttentionMetadata
from octavo.core.load.checkpoint import CheckpointFormat, ModelSource, open_checkpoint
from tests.models.step_runner import load_model


class TextRunner:
    """Computes whole texts, ragged, with or without second texts.

    Args:
        directory: of the checkpoint, or its GGUF file.
        backend: where it runs.
        max_model_len: tokens of the longest text.
    """

    def __init__(self, directory: Path, backend: Any, max_model_len: int = 64) -> None:
        kind: CheckpointFormat = "gguf" if directory.suffix == ".gguf" else "safetensors"
        checkpoint = open_checkpoint(ModelSource("tiny", directory, kind))
        self._model, self._opset = load_model(checkpoint, backend, max_model_len=max_model_len, has_head=False)
        self._backend = backend
        self._max_model_len = max_model_len
        self.max_position = self._model.max_position
        checkpoint.close()

    def rows(self, texts: Sequence[Sequence[int]], seconds: Sequence[int | None] | None = None) -> list[torch.Tensor]:
        """Hidden rows of each text; seconds: where the second text of each begins."""
        lengths = [len(text) for text in texts]
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        offset = self.max_position
        positions = [
            position + (offset if second is not None and position >= second else 0)
            for length, second in zip(lengths, seconds or [None] * len(texts), strict=True)
            for position in range(length)
        ]
        buffers = StepBuffers(
            token_ids_T=self._tensor([token for text in texts for token in text], torch.int64),
            positions_T=self._tensor(positions, torch.int64),
            plans=(self._opset.plan(self._metadata(lengths, starts)),),
            logit_rows_R=self._tensor(range(starts[-1]), torch.int64),
            logits_RV=self._backend.empty(starts[-1], self._model.vocab_size, dtype=torch.float32),
        )
        self._model.forward(buffers)
        return list(self._backend.to_host(buffers.logits_RV).split(lengths))

    def _metadata(self, lengths: list[int], starts: list[int]) -> AttentionMetadata:
        return AttentionMetadata(
            num_requests=len(lengths),
            num_tokens=starts[-1],
            max_query_len=max(lengths),
            max_seq_len=max(lengths),
            query_start_loc=self._tensor(starts, torch.int32),
            seq_lens=self._tensor(lengths, torch.int32),
            block_table=self._tensor([[b] for b in range(len(lengths))], torch.int32),
            slot_mapping=self._tensor([-1] * starts[-1], torch.int64),
            block_size=self._max_model_len,
        )

    def _tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self._backend.from_host(torch.tensor(list(values), dtype=dtype))
        return tensor
