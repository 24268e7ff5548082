"""A tokenizer from the files of a Hugging Face model directory, and the one door to both kinds of checkpoint.

    tokenizer.json           everything about text <-> ids; read by the `tokenizers` library
    tokenizer_config.json    which tokens play the roles of bos, eos, …; the chat template of older models
    special_tokens_map.json  the roles, in directories without tokenizer_config.json
    chat_template.jinja      the chat template; goes before the one in tokenizer_config.json
    additional_chat_templates/tool_use.jinja    the one for conversations with tools, of models that have two

Directories without tokenizer.json (tokenizer.model, vocab.json with merges.txt, tekken.json, …) are converted by
transformers, imported for them alone; no code from a model directory is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from octavo.core.base.errors import CheckpointError
from octavo.core.text.tokenizer import Tokenizer

_OTHER_FORMATS = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_tokenizer(files: Mapping[str, Path], metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None when it has none (then it serves token ids only).

    Args:
        files: tokenizer files of a model directory by file name; empty for GGUF.
        metadata: GGUF keys; empty for a directory.

    Raises:
        CheckpointError: there is a tokenizer, but it is damaged or of an unknown kind.
    """
    if "tokenizer.ggml.model" in metadata:
        from octavo.core.text.gguf_vocab import tokenizer_from_gguf

        return tokenizer_from_gguf(metadata)
    if any(name in files for name in ("tokenizer.json", *_OTHER_FORMATS)):
        return tokenizer_from_files(files)
    return None


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """The tokenizer of a model directory.

    Raises:
        CheckpointError: the directory holds no tokenizer, or a damaged one.
    """
    tokenizer = load_tokenizer({file.name: file for file in path.iterdir() if file.is_file()}, {})
    if tokenizer is None:
        raise CheckpointError(f"{path} holds no tokenizer; copy the model's tokenizer.json there", field=str(path))
    return tokenizer


def tokenizer_from_files(files: Mapping[str, Path]) -> Tokenizer:
    """Build a tokenizer from a directory's files, by file name.

    Raises:
        CheckpointError: a file is damaged, or its format needs transformers and that is not installed.
    """
    config = _read_object(files.get("tokenizer_config.json"))
    roles = _read_object(files.get("special_tokens_map.json")) | config
    backend = _read_backend(files["tokenizer.json"]) if "tokenizer.json" in files else _convert(files)
    special = {
        role: token
        for role in _ROLES
        if (token := _token_text(roles.get(role))) is not None and backend.token_to_id(token) is not None
    }
    # The library keeps the flags of tokens that tokenizer.json already lists, so only missing ones are marked here.
    listed = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([token for token in dict.fromkeys(special.values()) if token not in listed])
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return Tokenizer(
        backend,
        special_tokens=special,
        eos_token_ids=() if eos is None else (eos,),
        chat_template=_chat_template(files, config),
        tool_chat_template=_tool_chat_template(files, config),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path} is not a tokenizer this version reads ({error}); download it again", field="tokenizer.json"
        ) from error


def _convert(files: Mapping[str, Path]) -> tokenizers.Tokenizer:
    """Let transformers convert an older format."""
    directory = next(iter(files.values())).parent
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(
            f"{directory} has no tokenizer.json, and converting its tokenizer needs transformers; "
            "pip install 'octavo[hf]'",
            field="tokenizer.json",
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
        backend: tokenizers.Tokenizer = loaded.backend_tokenizer
    except Exception as error:  # any of its converters may fail in its own way
        cause = str(error).strip().splitlines()
        raise CheckpointError(
            f"the tokenizer in {directory} can't be converted ({cause[0] if cause else type(error).__name__}); "
            "add a tokenizer.json",
            field="tokenizer.json",
        ) from error
    return backend


def _chat_template(files: Mapping[str, Path], config: Mapping[str, Any]) -> str | None:
    """The default chat template; files go before tokenizer_config.json."""
    if (path := files.get("chat_template.jinja")) is not None:
        return _read_text(path)
    return _named_template(files, config, "default")


def _tool_chat_template(files: Mapping[str, Path], config: Mapping[str, Any]) -> str | None:
    """The chat template for conversations with tools, of the models that have two."""
    if (path := files.get(TOOL_TEMPLATE_FILE)) is not None:
        return _read_text(path)
    return None if "chat_template.jinja" in files else _named_template(files, config, "tool_use")


def _named_template(files: Mapping[str, Path], config: Mapping[str, Any], name: str) -> str | None:
    """A template of those in JSON; where there is only one, it is the default."""
    given = _read_object(files.get("chat_template.json")).get("chat_template", config.get("chat_template"))
    several = given if isinstance(given, list) else [{"name": "default", "template": given}]
    named = {entry.get("name"): entry.get("template") for entry in several if isinstance(entry, dict)}
    template = named.get(name)
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> str | None:
    """A role's token: a string, or an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_object(path: Path | None) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if path is None:
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again", field=path.name) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object", field=path.name)
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", field=path.name) from error
