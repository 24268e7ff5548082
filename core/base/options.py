"""Options: what a config field carries so that its flag, file key and variable can be generated from it.

    max_num_seqs: int = option(256, "...", kind=INT, low=1)
        │
        ├── flag       --max-num-seqs 64        ┐
        ├── file key   max_num_seqs: 64         ├── Option.convert() ── one value of the field's type
        └── variable   OCTAVO_MAX_NUM_SEQS=64   ┘

Only `config.py` declares options; the command line and the servers read them through `options_of()`.
Dataclass fields hold the single description, so a flag cannot drift from the key of the same name.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from octavo.core.base.errors import ConfigError
from octavo.core.base.names import did_you_mean, nearest
from octavo.core.base.units import parse_bytes

ENV_PREFIX = "OCTAVO_"


class Kind(enum.StrEnum):
    """How an option's text is read."""

    TEXT = "text"
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    BYTES = "bytes"  # an int; text may carry a unit
    MAP = "map"  # KEY=VALUE pairs
    LIST = "list"  # texts, in order


_NOUNS = {
    Kind.TEXT: "a text",
    Kind.INT: "a whole number",
    Kind.FLOAT: "a number",
    Kind.BOOL: "true or false",
    Kind.BYTES: "a number of bytes or a size such as '2GiB'",
    Kind.MAP: "KEY=VALUE pairs",
    Kind.LIST: "one or several texts, with commas between them",
}
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One configurable field.

    Attributes:
        name: the field's name and the key in a config file.
        kind: how text is read.
        default: the value where nothing is given.
        help: one sentence for `--help` and `explain-config`.
        choices: the only texts allowed; empty for any.
        low, high: the inclusive range of a number.
        optional: None is allowed and means that the value is found out later.
        flag: the command-line flag.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    choices: tuple[str, ...]
    low: float
    high: float
    optional: bool
    flag: str

    @property
    def env(self) -> str:
        """The environment variable that sets this option."""
        return ENV_PREFIX + self.name.upper()

    def convert(self, value: object, label: str | None = None) -> Any:
        """The field's value for what a user gave: text from a flag or variable, or a native value.

        Args:
            value: the text or value.
            label: how the user wrote the option's name, for the error message.

        Raises:
            ConfigError: the value has another type or lies outside the choices or the range.
        """
        label = label or self.name
        if value is None or (self.optional and isinstance(value, str) and value.lower() == "none"):
            if self.optional:
                return None
            raise ConfigError(f"{label} has no value; give {self._wanted()}", field=self.name)
        try:
            result = _READERS[self.kind](value)
        except (TypeError, ValueError):
            raise ConfigError(f"{label} is {value!r}; give {self._wanted()}", field=self.name) from None
        self._check(result, label)
        return result

    def _check(self, value: Any, label: str) -> None:
        if self.choices and value not in self.choices:
            hint = did_you_mean(str(value), self.choices)
            raise ConfigError(f"{label} is {value!r}{hint}", field=self.name)
        if self.kind in (Kind.INT, Kind.FLOAT, Kind.BYTES) and not self.low <= value <= self.high:
            raise ConfigError(f"{label} is {value}; give {self._wanted()}", field=self.name)

    def _wanted(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = _NOUNS[self.kind]
        if self.kind not in (Kind.INT, Kind.FLOAT):
            return noun
        if self.high == math.inf:
            return noun if self.low == -math.inf else f"{noun} of at least {self.low:g}"
        return f"{noun} between {self.low:g} and {self.high:g}"


def option(
    default: Any,
    help: str,  # noqa: A002 - the word argparse uses
    *,
    kind: Kind = Kind.TEXT,
    choices: Iterable[str] = (),
    low: float = -math.inf,
    high: float = math.inf,
    flag: str | None = None,
) -> Any:
    """A dataclass field that carries an Option; see Option for the arguments."""
    parts = {"kind": kind, "help": help, "choices": tuple(choices), "low": low, "high": high, "flag": flag}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=parts)
    return field(default=default, metadata=parts)


def options_of(config_class: type) -> dict[str, Option]:
    """The options of a config class by field name, in the order of declaration."""
    found = {}
    for item in dataclasses.fields(config_class):
        parts = dict(item.metadata)
        default = item.default if item.default is not dataclasses.MISSING else {}
        flag = parts.pop("flag") or "--" + item.name.replace("_", "-")
        found[item.name] = Option(name=item.name, default=default, optional=default is None, flag=flag, **parts)
    return found


def read_keys(values: Mapping[str, object], known: Mapping[str, Option], source: str) -> dict[str, Any]:
    """Convert a mapping of keys (a config file's, keyword arguments) to field values.

    Args:
        values: the keys as written; `-` and `_` are alike.
        known: every option that may be named.
        source: where the keys stand, for the error message.

    Raises:
        ConfigError: a key is unknown (the nearest one is offered) or a value is wrong.
    """
    result = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{source}: unknown key {key!r}{did_you_mean(name, known)}", field=str(key))
        result[name] = known[name].convert(value, f"{source}: {key}")
    return result


def read_environment(environ: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, Any]:
    """The field values that OCTAVO_* variables set; an empty variable counts as absent.

    A variable that nearly names an option is a mistake, and refused; any other may be a backend's and is left alone.

    Args:
        environ: all environment variables.
        known: every option that a variable may set.

    Raises:
        ConfigError: a misspelt variable, or a wrong value.
    """
    by_variable = {item.env: item for item in known.values()}
    result = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or not text:
            continue
        item = by_variable.get(variable)
        if item is not None:
            result[item.name] = item.convert(text, variable)
        elif near := nearest(variable.removeprefix(ENV_PREFIX).lower(), known, cutoff=0.75):
            raise ConfigError(f"unknown variable {variable!r}; did you mean {known[near].env!r}?", field=variable)
    return result


def _text(value: object) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise TypeError
    return value


def _int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError
    return int(value)


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = _text(value).lower()
    if text not in _TRUE | _FALSE:
        raise ValueError
    return text in _TRUE


def _bytes(value: object) -> int:
    return parse_bytes(value) if isinstance(value, str) else _int(value)


def _map(value: object) -> dict[str, str]:
    """A mapping, a list of KEY=VALUE texts, or one text with commas between the pairs."""
    if isinstance(value, Mapping):
        return {str(key): str(item) for key, item in value.items()}
    pairs = value.split(",") if isinstance(value, str) else cast("Iterable[str]", value)
    result = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ValueError
        result[key.strip()] = text.strip()
    return result


def _list(value: object) -> tuple[str, ...]:
    """A sequence of texts, or one text with commas between them; each piece of a sequence may hold commas again."""
    pieces = [value] if isinstance(value, str) else [_text(each) for each in cast("Iterable[object]", value)]
    return tuple(part for piece in pieces for each in piece.split(",") if (part := each.strip()))


_READERS = {
    Kind.TEXT: _text,
    Kind.INT: _int,
    Kind.FLOAT: _float,
    Kind.BOOL: _bool,
    Kind.BYTES: _bytes,
    Kind.MAP: _map,
    Kind.LIST: _list,
}
