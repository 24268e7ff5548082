"""Words of a vLLM command as flags, and flags as Octavo's. Which command it is, calls.py knows.

words ──read──► Given(flag, values), …  ──take──► Call(words for octavo, variables, notes)
                      │                               wrong: BadCall, one line
                table.py says what becomes of each
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from octavo_vllm_alias.convert import CONVERTERS
from octavo_vllm_alias.table import IDLE, REFUSED, Flag

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class BadCall(Exception):
    """A call that can't be translated; the text says why, in one line."""


@dataclass(slots=True)
class Call:
    """What becomes of a call.

    Attributes:
        words: after Octavo's command.
        variables: to set in the environment.
        notes: what is accepted and does nothing, a line each.
    """

    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Given(NamedTuple):
    """A flag as it was given: `written` is how, `on` is False for --no-x."""

    flag: Flag
    written: str
    values: Sequence[str]
    on: bool


def read(words: Sequence[str], known: Mapping[str, Flag]) -> tuple[list[str], dict[str, Given]]:
    """The words that are no flags, and the flags by their long names; the last of a name wins.

    Args:
        known: all flags, by every name.

    Raises:
        BadCall: an unknown flag, or a wrong value.
    """
    plain: list[str] = []
    given: dict[str, Given] = {}
    for item in _read(words, known):
        if isinstance(item, str):
            plain.append(item)
        elif item.flag.name == "--config":
            given = {each.flag.name: each for each in _read_file(item.values[0], known)} | given
        else:
            given[item.flag.name] = item
    return plain, given


def take(given: Iterable[Given], call: Call) -> None:
    """Add what flags mean to a call.

    Raises:
        BadCall: one of them is refused.
    """
    for each in given:
        _take(each, call)


def _take(given: Given, call: Call) -> None:
    flag = given.flag
    if flag.fate == REFUSED:
        asks_nothing = not given.on or (flag.allowed is not None and given.values[0] in flag.allowed)
        if not asks_nothing:
            raise BadCall(f"{given.written} is refused: {flag.text}")
    elif flag.fate == IDLE:
        if flag.allowed is not None and given.values[0].lower() not in flag.allowed:
            raise BadCall(f"{given.written} {given.values[0]} is refused; it may be {', '.join(flag.allowed)}")
        call.notes.append(f"{given.written} does nothing here: {flag.text}")
    elif flag.kind != "switch":
        for value in given.values:
            _take_value(flag, value, call)
    elif not flag.to.startswith("--"):
        call.variables[flag.to] = str(given.on).lower()
    else:
        call.words.append(flag.to if given.on else _negated(flag.to))


def _negated(flag: str) -> str:
    name = flag.removeprefix("--")
    return f"--{name.removeprefix('no-')}" if name.startswith("no-") else f"--no-{name}"


def _take_value(flag: Flag, value: str, call: Call) -> None:
    converted = CONVERTERS[flag.convert](value) if flag.convert else value
    for word in converted if isinstance(converted, list) else [converted]:
        if word is None:
            continue
        each = flag.values.get(word, word)
        if flag.to.startswith("--"):
            call.words.append(each if each.startswith("--") else f"{flag.to}={each}")
        else:
            call.variables[flag.to] = each


# -- reading ------------------------------------------------------------------------------------------------


def _read(words: Sequence[str], known: Mapping[str, Flag]) -> Iterator[Given | str]:
    """The flags and the words between them."""
    left = list(words)
    while left:
        word = left.pop(0)
        if word.startswith("-O") and "--compilation-config" in known:  # -O3, -O.mode=3, -O 3
            if word == "-O" and left:
                left.pop(0)
            yield Given(known["--compilation-config"], word, ("",), on=True)
        elif word.startswith("-") and len(word) > 1:
            yield _read_flag(word, left, known)
        else:
            yield word


def _read_flag(word: str, left: list[str], known: Mapping[str, Flag]) -> Given:
    """One flag; takes its values from the words that are left."""
    head, has_value, value = word.partition("=")
    name = head.split(".")[0].replace("_", "-") if head.startswith("--") else head  # --compilation-config.mode
    flag, on = known.get(name), True
    if flag is None and name.startswith("--no-"):
        flag, on = known.get(f"--{name.removeprefix('--no-')}"), False
        flag = flag if flag is not None and flag.kind == "switch" else None
    if flag is None:
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else "; see docs/vllm-flags.md of Octavo"
        raise BadCall(f"unknown flag {head!r}{hint}")
    if flag.kind == "switch":
        if not has_value and left and left[0].lower() in ("true", "false"):  # as older versions took it
            has_value, value = "=", left.pop(0)
        if has_value and value.lower() not in TRUE + FALSE:
            raise BadCall(f"{head} is {value!r}; give true or false")
        return Given(flag, head, (), on=on != (bool(has_value) and value.lower() in FALSE))
    values = [value] if has_value else [left.pop(0)] if left else []
    while flag.kind == "list" and not has_value and left and not left[0].startswith("-"):
        values.append(left.pop(0))
    if not values:
        raise BadCall(f"{head} has no value")
    return Given(flag, head, values, on=True)


def _read_file(path: str, known: Mapping[str, Flag]) -> Iterator[Given]:
    """The flags of a YAML file."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCall(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadCall(f"--config {path}: not a YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise BadCall(f"--config {path}: give 'flag: value' lines")
    for name, value in content.items():
        yield from (each for each in _read(_words(str(name), value), known) if isinstance(each, Given))


def _words(name: str, value: object) -> list[str]:
    """A line of the file as words of a command line."""
    if isinstance(value, bool):
        return [f"--{name}={str(value).lower()}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
