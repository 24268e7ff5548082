"""Launch parameters, read from a backend's tuning/*.toml; kernels and ops hold none of their own.

    [[entry]]                            entries of a file stand in order; the first that fits is taken
    kernel = "gemm"                      who asks
    when = { dtype = "bfloat16", m = [1, 16] }        every key must fit: equal, or inside [low, high]; none: always
    tile = { BLOCK_M = 16, BLOCK_N = 64, BLOCK_K = 128 }        constexprs of the kernel
    options = { num_warps = 4, num_stages = 4 }       of the compiler; a backend writes only what its compiler knows
    why = "…"                            one line: the model's reason, or what was measured on which device

The last entry of each kernel must fit everything, so that `pick` always answers; a table without one is refused when
it is read. Answers are kept per question: a step asks the same ones again and again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any

from octavo.core.base.errors import ConfigError

Key = str | int


@dataclass(frozen=True, slots=True)
class Entry:
    """One set of launch parameters.

    Attributes:
        when: question's key -> the value it must have, or the inclusive range it must lie in.
        tile: the kernel's constexprs.
        options: the compiler's.
        file: that it was read from.
    """

    kernel: str
    when: Mapping[str, Key | tuple[int, int]]
    tile: Mapping[str, int]
    options: Mapping[str, int]
    why: str = ""
    file: str = ""

    @property
    def constants(self) -> dict[str, Any]:
        """tile and options together, as a launch takes them."""
        return {**self.tile, **self.options}

    def fits(self, question: Mapping[str, Key]) -> bool:
        return all(key in question and _fits(question[key], wanted) for key, wanted in self.when.items())


def _fits(value: Key, wanted: Key | tuple[int, int]) -> bool:
    if isinstance(wanted, tuple):
        return isinstance(value, int) and wanted[0] <= value <= wanted[1]
    return value == wanted


class TuningTable:
    """All entries of one backend."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries: dict[str, list[Entry]] = {}
        self._answers: dict[tuple[str, tuple[tuple[str, Key], ...]], Entry] = {}
        for entry in entries:
            self._entries.setdefault(entry.kernel, []).append(entry)
        for kernel, of_kernel in self._entries.items():
            if of_kernel[-1].when:
                raise ConfigError(f"tuning of {kernel}: its last entry has a `when`; the last one must fit everything")

    @classmethod
    def load(cls, folder: Traversable) -> TuningTable:
        """Every *.toml of a folder. Raises ConfigError naming the file and the entry that is wrong."""
        found = folder.iterdir() if folder.is_dir() else ()  # a backend without kernels has none
        files = sorted((f for f in found if f.name.endswith(".toml")), key=lambda f: f.name)
        return cls([entry for file in files for entry in read_entries(file.name, file.read_text())])

    @property
    def by_kernel(self) -> Mapping[str, list[Entry]]:
        """Entries in their order."""
        return self._entries

    def pick(self, kernel: str, **question: Key) -> Entry:
        """The first entry of `kernel` that fits. Raises KeyError for a kernel without entries."""
        key = (kernel, tuple(question.items()))
        if key not in self._answers:
            self._answers[key] = next(entry for entry in self._entries[kernel] if entry.fits(question))
        return self._answers[key]


class PinnedTable(TuningTable):
    """A table in which one entry is taken wherever it fits, whatever stands before it.

    Attributes:
        asked: kernels that somebody asked for.
        given: entries that somebody got.
    """

    def __init__(self, table: TuningTable, entry: Entry | None = None, *, instead_of: Entry | None = None) -> None:
        """instead_of: an entry of the table, in whose place alone the pinned one is taken."""
        super().__init__([e for entries in table.by_kernel.values() for e in entries])
        self._pinned = entry
        self._instead_of = instead_of
        self.asked: set[str] = set()
        self.given: list[Entry] = []

    @property
    def was_taken(self) -> bool:
        """Whether somebody got the pinned entry."""
        return any(entry is self._pinned for entry in self.given)

    def pick(self, kernel: str, **question: Key) -> Entry:
        self.asked.add(kernel)
        answer = self._answer(kernel, question)
        if not any(entry is answer for entry in self.given):
            self.given.append(answer)
        return answer

    def _answer(self, kernel: str, question: dict[str, Key]) -> Entry:
        usual, pinned = super().pick(kernel, **question), self._pinned
        if pinned is None or pinned.kernel != kernel:
            return usual
        takes = usual is self._instead_of if self._instead_of is not None else pinned.fits(question)
        return pinned if takes else usual


def read_entries(name: str, text: str) -> list[Entry]:
    """The entries of one file. Raises ConfigError."""
    try:
        return [_entry(raw, name) for raw in tomllib.loads(text)["entry"]]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"tuning file {name}: {type(error).__name__}: {error}") from error


def _entry(raw: dict[str, Any], file: str) -> Entry:
    unknown = raw.keys() - {"kernel", "when", "tile", "options", "why"}
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    when = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.get("when", {}).items()}
    return Entry(raw["kernel"], when, dict(raw["tile"]), dict(raw.get("options", {})), raw.get("why", ""), file)
