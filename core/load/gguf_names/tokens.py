"""What a GGUF file says of its vocabulary, as config.json and generation_config.json say it."""

from __future__ import annotations

from typing import Any

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_file import GGUFFile


def vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding. Raises CheckpointError where there is none."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{file.path} has no tensor token_embd.weight; the file is incomplete", field="token_embd.weight"
        )
    return embedding.shape[0]


def token_ids(file: GGUFFile) -> dict[str, Any]:
    """bos, eos and pad ids; eos_token_id is a list when the file names an end of turn besides the end of text."""
    ids: dict[str, Any] = {}
    for key, name in (("bos_token_id", "bos_token_id"), ("padding_token_id", "pad_token_id")):
        if (token_id := _token_id(file, key)) is not None:
            ids[name] = token_id
    ends = [_token_id(file, key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    distinct = list(dict.fromkeys(end for end in ends if end is not None))
    if distinct:
        ids["eos_token_id"] = distinct if len(distinct) > 1 else distinct[0]
    return ids


def _token_id(file: GGUFFile, key: str) -> int | None:
    name = f"tokenizer.ggml.{key}"
    token_id = file.metadata.get(name)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < vocab_size(file):
        raise CheckpointError(
            f"{file.path}: {name} is {token_id!r}, outside the vocabulary of {vocab_size(file)}", field=name
        )
    return token_id
