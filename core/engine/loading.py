"""From a model's name to what an engine and its front need: the opened checkpoint, its tokenizer, its end ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.core.base.config import EngineConfig
from octavo.core.engine.prompts import eos_token_ids
from octavo.core.load.checkpoint import Checkpoint, open_checkpoint
from octavo.core.load.resolve import resolve_model
from octavo.core.text.loader import load_tokenizer
from octavo.core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint with the text side of its model.

    Attributes:
        tokenizer: None for a checkpoint without one, which serves token ids only.
        eos_token_ids: ids that end a reply.
    """

    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]


@contextmanager
def open_model(config: EngineConfig) -> Iterator[OpenedModel]:
    """Find a model, open its files and read its tokenizer; the files are closed at the end of the `with` block.

    Raises:
        ModelNotFound: there is no such model here.
        CheckpointError: its files are damaged or of an unsupported kind.
    """
    checkpoint = open_checkpoint(resolve_model(config.model, config.revision), num_threads=config.num_threads)
    try:
        tokenizer = _tokenizer(config, checkpoint)
        ends = eos_token_ids(checkpoint.config, checkpoint.generation_config, tokenizer)
        yield OpenedModel(checkpoint, tokenizer, ends)
    finally:
        checkpoint.close()


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The model's own tokenizer, or another model's when the config names one."""
    if config.tokenizer is None:
        return load_tokenizer(checkpoint.tokenizer_files(), checkpoint.metadata)
    other = open_checkpoint(resolve_model(config.tokenizer, config.revision))
    try:
        return load_tokenizer(other.tokenizer_files(), other.metadata)
    finally:
        other.close()
