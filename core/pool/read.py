"""The door to poolers: does a checkpoint generate text, or does it give vectors, and how?

…ForSequenceClassification        a classifier                         classifier.py
a directory with modules.json     an embedding model, its own rules    sentence.py
a config with embedding_pooling   an embedding model, as its GGUF file says
any model, and --pooling KIND     an embedding model, by the user's word
…Model, without any of these      an error: nothing says which rows count
anything else                     generates text
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.core.base.errors import CheckpointError
from octavo.core.pool.classifier import SUFFIX, read_classifier
from octavo.core.pool.pooler import KINDS, Pooler
from octavo.core.pool.sentence import MODULES_FILE, read_sentence_modules

ENCODERS = ("bert", "roberta", "xlm-roberta")
"""model_type of models whose tokens see those to their right, and which generate nothing."""


def read_pooler(config: Mapping[str, Any], path: Path, asked: str | None = None) -> Pooler | None:
    """How a checkpoint's rows become vectors; None when it generates text.

    Args:
        config: the content of config.json.
        path: the checkpoint's directory, or its file.
        asked: one of KINDS, where the user says which rows count.

    Raises:
        CheckpointError: naming the file and the field that is damaged, missing or not implemented.
    """
    architecture = _architecture(config)
    if architecture.endswith(SUFFIX):
        if asked is not None:
            raise CheckpointError(f"{path} is a classifier, whose pooling is fixed; leave pooling out", field="pooling")
        pooler = read_classifier(architecture, config, _width(config))
    elif (path / MODULES_FILE).is_file():
        pooler = read_sentence_modules(path, _width(config))
        if asked not in (None, pooler.kind):
            raise CheckpointError(f"{path} pools by {pooler.kind}, not by {asked}; leave pooling out", field="pooling")
    elif (stored := config.get("embedding_pooling")) is not None:
        if asked not in (None, stored):
            raise CheckpointError(f"{path} pools by {stored}, not by {asked}; leave pooling out", field="pooling")
        pooler = Pooler(task="embed", kind=_kind(stored), width=_width(config), normalize=True)
    elif asked is not None:
        pooler = Pooler(task="embed", kind=_kind(asked), width=_width(config), normalize=True)
    elif _gives_rows(architecture, config):
        raise CheckpointError(
            f"{path} gives hidden rows and has no {MODULES_FILE} that says how they become one vector; say it with "
            f"pooling ({', '.join(KINDS)})",
            field="pooling",
        )
    else:
        return None
    _refuse_bidirectional(config)
    return replace(pooler, dimensions=_trained_dimensions(config), token_types=_token_types(config))


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether all tokens of a text see each other, so that nothing is kept between steps."""
    return config.get("model_type") in ENCODERS


def _gives_rows(architecture: str, config: Mapping[str, Any]) -> bool:
    """Whether the model has no head: an encoder, or the bare stack of a decoder."""
    is_bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return is_bare or config.get("model_type") in ENCODERS


def _kind(asked: str) -> Any:
    if asked not in KINDS:
        raise CheckpointError(f"pooling is {asked!r}; give one of {', '.join(KINDS)}", field="pooling")
    return asked


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _width(config: Mapping[str, Any]) -> int:
    width = config.get("hidden_size")
    if type(width) is not int or width < 1:
        raise CheckpointError(f"config.json: hidden_size is {width!r}; it must be at least 1", field="hidden_size")
    return width


def _refuse_bidirectional(config: Mapping[str, Any]) -> None:
    """A decoder turned into an encoder has the decoder's architecture and one more field."""
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        name = "is_causal" if config.get("is_causal") is False else "use_bidirectional_attention"
        raise CheckpointError(
            f"config.json: {name} is {config[name]!r}; a decoder whose tokens see those to their right is not "
            "implemented",
            field=name,
        )


def _token_types(config: Mapping[str, Any]) -> int:
    count = config.get("type_vocab_size", 2) if is_encoder(config) else 1
    return count if type(count) is int else 1  # another type is refused where the model's config is read


def _trained_dimensions(config: Mapping[str, Any]) -> tuple[int, ...]:
    listed = config.get("matryoshka_dimensions")
    if listed is None:
        return ()
    if not isinstance(listed, list) or any(type(each) is not int or each < 1 for each in listed):
        raise CheckpointError(
            f"config.json: matryoshka_dimensions is {listed!r}; it must be a list of sizes",
            field="matryoshka_dimensions",
        )
    return tuple(sorted(listed))
