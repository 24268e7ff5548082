"""Every tensor of a file under Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_file import GGUFFile, TensorInfo
from octavo.core.load.gguf_names.architecture import Architecture
from octavo.core.load.gguf_names.rope import TABLES
from octavo.core.load.gguf_names.rules import Rule
from octavo.core.load.gguf_names.views import View

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)(?:\.(?P<number>\d+))?\.(?P<ending>weight|bias)")
_INERT = ("attn_rot_embd",)
"""Frequencies that follow from the config, in very old files."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rule stands, and which tensors it takes."""

    rule: Rule
    tensors: tuple[TensorInfo, ...]
    ending: str
    number: str


def hf_views(file: GGUFFile, architecture: Architecture, config: Mapping[str, Any]) -> dict[str, View]:
    """Hugging Face's name -> what it is made of, in file order.

    Raises:
        CheckpointError: a tensor is not known, its shape contradicts the config, or two have one name.
    """
    views: dict[str, View] = {}
    taken: set[str] = set()
    for name, tensor in file.tensors.items():
        if name in taken or name in TABLES:
            continue
        match = _NAME.fullmatch(name)
        if match is not None and match["part"] in _INERT:
            continue
        place = _place(file, architecture, match, tensor) if match is not None else None
        if match is None or place is None or _is_beyond(match, config):
            raise CheckpointError(
                f"{file.path}: the tensor {name} is not known for {architecture.name} and may change the model's "
                "results; take the model's safetensors files",
                field=name,
            )
        taken.update(each.name for each in place.tensors)
        prefix = architecture.layer_prefix.format(match["layer"]) if match["layer"] else ""
        for hf_name, view in _views(file, place, config):
            if views.setdefault(prefix + hf_name, view) is not view:
                raise CheckpointError(f"{file.path} holds {prefix + hf_name} under two names; the file is damaged")
    return views


def _place(file: GGUFFile, architecture: Architecture, match: re.Match[str], tensor: TensorInfo) -> _Place | None:
    """The rule of a tensor, with the tensors that belong to it; None where there is none."""
    table = architecture.layer if match["layer"] else architecture.top
    part, ending, number = match["part"], match["ending"], match["number"]
    if number is not None:
        rule = table.get(f"{part}.#")
        return None if rule is None else _Place(rule, (tensor,), f".{ending}", number)
    for key, suffix in ((f"{part}.{ending}", ""), (part, f".{ending}")):
        if key in table:
            return _Place(table[key], (tensor,), suffix, "")
        for group in table:
            if " " in group and key in group.split():
                return _Place(table[group], tuple(_members(file, tensor, key, group)), suffix, "")
    return None


def _members(file: GGUFFile, tensor: TensorInfo, key: str, group: str) -> Iterator[TensorInfo]:
    """The tensors that belong to one of them."""
    for other in group.split():
        name = tensor.name.replace(key, other)
        if name not in file.tensors:
            raise CheckpointError(f"{file.path} has {tensor.name} but no {name}; the file is incomplete", field=name)
        yield file.tensors[name]


def _views(file: GGUFFile, place: _Place, config: Mapping[str, Any]) -> Iterator[tuple[str, View]]:
    try:
        for name, view in place.rule.views(place.tensors, config):
            yield (name.format(place.number) if place.number else name) + place.ending, view
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}", field=error.field) from error


def _is_beyond(match: re.Match[str], config: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to a layer that the model doesn't have."""
    return match["layer"] is not None and int(match["layer"]) >= config["num_hidden_layers"]
