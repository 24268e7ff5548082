"""What a model wrote as a call, read and checked: a name, and arguments as the text of a JSON object.

Arguments are always written anew, so that a client gets valid JSON: without NaN, half surrogates or raw line feeds,
however the model wrote them. None stands for what can't be read.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from octavo.core.serve.tools.cursor import MAX_NAME_CHARS

Tools = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> the JSON schema of its parameters."""

Call = tuple[str, str]
"""Name and arguments."""


def read_json(text: str) -> Any:
    """The value in a text; line feeds in strings are let through. Raises ValueError."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def write_arguments(value: Any) -> str | None:
    """A mapping, a JSON object in a string, or None for no arguments, as the text of a JSON object."""
    try:
        if isinstance(value, str):
            value = read_json(value) if value.strip() else {}
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            return None
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if _is_unicode(text) else json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None


def call_of(name: Any, arguments: Any, among: Container[str] | None = None) -> Call | None:
    """A call; with `among`, only of one of those tools."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        return None
    if among is not None and name not in among:
        return None
    written = write_arguments(arguments)
    return None if written is None else (name, written)


def call_of_json(value: Any, among: Container[str] | None = None) -> Call | None:
    """A call in the form {"name": …, "arguments" or "parameters": …}; with `among`, the arguments must be there."""
    if not isinstance(value, Mapping):
        return None
    key = "arguments" if "arguments" in value else "parameters"
    if among is not None and key not in value:
        return None
    return call_of(value.get("name"), value.get(key), among)


def call_of_text(text: str | None, among: Container[str] | None = None) -> Call | None:
    """The same, from its text."""
    try:
        return None if text is None else call_of_json(read_json(text), among)
    except ValueError:
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
