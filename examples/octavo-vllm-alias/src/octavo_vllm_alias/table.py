"""flags.toml and clients.toml as objects: what becomes of each flag of vLLM's commands."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

TAKEN, IDLE, REFUSED = "taken", "idle", "refused"
KINDS = ("value", "switch", "list")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        names: the long form first.
        fate: TAKEN, IDLE or REFUSED.
        kind: what follows it: a value, nothing (a switch), or a list of words.
        to: of a taken one: Octavo's flag, or a variable's name (in capitals).
        convert, values: how what is given is translated.
        text: why, or what is different.
        allowed: of an idle or refused one: the values that are accepted; None: all, or none.
        older: vLLM itself has it no more.
    """

    names: tuple[str, ...]
    fate: str
    kind: str
    to: str
    convert: str | None
    values: Mapping[str, str]
    text: str
    allowed: tuple[str, ...] | None
    older: bool

    @property
    def name(self) -> str:
        """The long form."""
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Table:
    """All flags, and vLLM's version that they are of."""

    version: str
    flags: tuple[Flag, ...]

    def by_name(self) -> dict[str, Flag]:
        """Every name, long and short."""
        return {name: flag for flag in self.flags for name in flag.names}


@cache
def load_table(command: str = "serve") -> Table:
    """The flags of `serve`, or of a section of clients.toml: "chat", "bench", "batch"."""
    data = _read("flags.toml")
    groups = data if command == "serve" else _read("clients.toml")[command]
    flags = [flag for fate in (TAKEN, IDLE, REFUSED) for group in groups.get(fate, ()) for flag in _flags(fate, group)]
    return Table(data["version"], tuple(flags))


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _flags(fate: str, group: Mapping[str, Any]) -> Iterator[Flag]:
    for kind in KINDS:
        for names in group.get(kind, ()):
            allowed = group.get("only", group.get("unless"))
            yield Flag(
                names=tuple(names.split()),
                fate=fate,
                kind=kind,
                to=group.get("to", names.split()[0]),
                convert=group.get("convert"),
                values=group.get("values", {}),
                text=group.get("why", group.get("note", "")),
                allowed=None if allowed is None else tuple(allowed),
                older=group.get("older", False),
            )
