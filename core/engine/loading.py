"""From a model's name to what an engine and its front need: the opened checkpoint, its tokenizer, its end ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.load.checkpoint import Checkpoint, open_checkpoint
from octavo.core.load.resolve import resolve_model
from octavo.core.pool.pooler import Pooler
from octavo.core.pool.read import read_pooler

if TYPE_CHECKING:
    from octavo.core.text.tokenizer import Tokenizer

MAX_TOKEN_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns a model's tokens into text and back.

    Attributes:
        tokenizer: None for a checkpoint without one, which serves token ids only.
        eos_token_ids: ids that end a reply.
        pooler: of a model that gives vectors and generates nothing.
    """

    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    pooler: Pooler | None = None


@contextmanager
def open_model(config: EngineConfig) -> Iterator[Checkpoint]:
    """Find a model and open its files; they are closed at the end of the `with` block.

    Raises:
        ModelNotFound: there is no such model here.
        CheckpointError: its files are damaged or of an unsupported kind.
    """
    checkpoint = open_checkpoint(resolve_model(config.model, config.revision), num_threads=config.num_threads)
    try:
        yield checkpoint
    finally:
        checkpoint.close()


def read_text_side(config: EngineConfig, checkpoint: Checkpoint) -> TextSide:
    """Read a model's tokenizer and what ends its replies. Needs no torch, and may run beside the loading of weights.

    Raises:
        CheckpointError: the tokenizer is damaged or of an unsupported kind, or the chat template is not valid.
        ConfigError: the chat template that the config names can't be read.
    """
    tokenizer = _tokenizer(config, checkpoint)
    if config.chat_template is not None and tokenizer is not None:
        tokenizer.chat_template = _read_template(config.chat_template, tokenizer)
        tokenizer.tool_chat_template = None
    return TextSide(
        tokenizer,
        _eos_token_ids(checkpoint.config, checkpoint.generation_config, tokenizer),
        read_pooler(checkpoint.config, checkpoint.path, config.pooling),
    )


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The model's own tokenizer, or another model's when the config names one."""
    from octavo.core.text.loader import load_tokenizer

    if config.tokenizer is None:
        return load_tokenizer(checkpoint.tokenizer_files(), checkpoint.metadata)
    other = open_checkpoint(resolve_model(config.tokenizer, config.revision))
    try:
        return load_tokenizer(other.tokenizer_files(), other.metadata)
    finally:
        other.close()


def _read_template(path: str, tokenizer: Tokenizer) -> str:
    """The chat template in a file, which compiles."""
    from octavo.core.text.chat import chat_template_of

    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template {path} can't be read ({error}); name a jinja file", field="chat_template"
        ) from error
    chat_template_of(tokenizer, source)
    return source


def _eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Every id that ends a reply: those of the tokenizer, the config and the generation config together."""
    ids: set[int] = set(tokenizer.eos_token_ids if tokenizer is not None else ())
    for file, source in (("config.json", config), ("generation_config.json", generation_config)):
        named = source.get("eos_token_id")
        listed = named if isinstance(named, list) else [] if named is None else [named]
        if any(type(token) is not int or abs(token) > MAX_TOKEN_ID for token in listed):
            raise CheckpointError(
                f"{file}: eos_token_id is {str(named)[:60]!r}; it must be a token id or a list of them, each at most "
                f"{MAX_TOKEN_ID}",
                field="eos_token_id",
            )
        ids.update(listed)
    return tuple(sorted(ids))
