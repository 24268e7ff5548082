"""Typed backend options: `--backend-option key=value` against the dataclass that a backend names."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.core.base.errors import ConfigError
from octavo.core.base.names import nearest

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def split_options(pairs: Iterable[str]) -> dict[str, str]:
    """["key=value", …] as a mapping. Raises ConfigError for a pair without "=" or a key given twice."""
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--backend-option {pair!r} must have the form key=value", field="backend_option")
        if key in options:
            raise ConfigError(f"--backend-option {key} is given twice; give it once", field="backend_option")
        options[key] = value
    return options


def parse_options(backend: str, options_type: type[Any] | None, options: Mapping[str, str]) -> Any:
    """An instance of the backend's options dataclass; None for a backend without options.

    Raises ConfigError for an unknown key, a value that its field's type does not take, a required key left out, or
    a ValueError of the dataclass's own __post_init__.
    """
    if options_type is None:
        if options:
            raise ConfigError(
                f"backend {backend} takes no options; remove {', '.join(options)}", field="backend_option"
            )
        return None
    hints = typing.get_type_hints(options_type)
    names = [f.name for f in dataclasses.fields(options_type) if f.init]
    values = {}
    for key, text in options.items():
        if key not in names:
            raise ConfigError(_unknown(backend, key, names), field="backend_option")
        values[key] = _parse(backend, key, text, hints[key])
    try:
        return options_type(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"options of backend {backend}: {error}", field="backend_option") from error


def _unknown(backend: str, key: str, names: list[str]) -> str:
    near = nearest(key, names)
    hint = f"did you mean {near}? " if near else ""
    return f"backend {backend} has no option {key}: {hint}it takes {', '.join(names)}"


def _parse(backend: str, key: str, text: str, hint: Any) -> Any:
    """The text as the field's type: bool, int, float, str, a Literal of strings, or one of these or None."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and text.lower() in ("", "none"):
            return None
        hint = next(a for a in arguments if a is not type(None))
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if text in arguments:
            return text
        raise _bad(backend, key, text, f"one of {', '.join(map(str, arguments))}")
    if hint is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise _bad(backend, key, text, "true or false")
        return text.lower() in _TRUE
    if hint is str:
        return text
    try:
        return hint(text)
    except ValueError:
        raise _bad(
            backend, key, text, {"int": "an integer", "float": "a number"}.get(hint.__name__, str(hint))
        ) from None


def _bad(backend: str, key: str, text: str, wanted: str) -> ConfigError:
    return ConfigError(f"option {key} of backend {backend} is {text!r}; it must be {wanted}", field="backend_option")
