"""Searches launch parameters: every entry of the tuning table, against the workloads that it serves.

    entry ──► its workloads ──► one parameter at a time, half and double (stages: one less, one more), as long as that
              is faster ──► the entry with what was found, and why ──► its file, written anew at once

    retuned ──► tune ──► Measures ──┬── Sandbox (tune_process.py): in a process that may end
                                    └── Bench (tune_bench.py): in this one

Entries keep their order and their `when`: what is searched is what an entry says, not which questions there are. A
parameter set that doesn't compile, doesn't fit the chip or gives other numbers than the one before is passed over. One
that breaks the device (an illegal access leaves a process without it) ends a process of its own; the search goes on in
the next, and doesn't try that value again for the entry. What was found till then is in the files already.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from octavo.backends.common.tune_bench import Bench, Subject, trials_on
from octavo.backends.common.tune_process import Lost, Sandbox
from octavo.backends.common.tuning import Entry, Key
from octavo.core.backend import DeviceBackend
from octavo.core.base.errors import ConfigError

log = logging.getLogger(__name__)

WORTH = 0.98
"""A change must take less than this share of the time before it: smaller gains are noise."""

SWITCHES = ("LIBRARY", "SWAP", "TURN")
"""Parameters that are 0 or 1."""

NOT_FOR_SPEED = ("PROMOTE",)
"""Parameters that trade numbers for time: theirs is the bound's choice."""


class Measures(Protocol):
    """Whoever measures. Entries and workloads go by their place in `subject`.

    Attributes:
        subject: what there is to be searched.
    """

    subject: Subject

    def served(self, workload: int) -> Sequence[int]:
        """The entries that a workload asks for. Raises Lost."""

    def seconds(self, entry: int, candidate: Entry, workloads: Sequence[int]) -> float:
        """The geometric mean over workloads with the candidate in the entry's place; infinite if unfit. Raises Lost."""


@dataclass(frozen=True, slots=True)
class Found:
    """What became of an entry.

    Attributes:
        before, entry: as it was, and as it is now: the same where nothing better was found.
        gain: time before over time after.
        workloads: that it serves; none leaves it as it was.
    """

    before: Entry
    entry: Entry
    gain: float
    workloads: tuple[str, ...]


def retuned(
    open_device: Callable[[], DeviceBackend],
    *,
    only: str | None,
    on_found: Callable[[Found], None],
    write: Callable[[str, str], None],
) -> None:
    """Search the backend's tuning table on its device.

    Args:
        open_device: makes the device, in other processes: it must be what pickle can send.
        only, on_found, write: see `search`.

    Raises ConfigError for an emulated device, whose times mean nothing, and for a kernel that the table doesn't have.
    """
    search(functools.partial(device_bench, open_device), only=only, on_found=on_found, write=write)


def search(
    make_bench: Callable[[], Bench],
    *,
    only: str | None,
    on_found: Callable[[Found], None],
    write: Callable[[str, str], None],
) -> None:
    """Search a table in processes that may end.

    Args:
        make_bench: called in each of them.
        only: kernels whose name begins so; None: all.
        on_found: told of each entry that is done.
        write: (name of a tuning file, its text): called whenever one of the file's entries got better.

    Raises ConfigError for a kernel that the table doesn't have.
    """
    with Sandbox(make_bench) as sandbox:
        subject = sandbox.subject
        if only is not None and not any(entry.kernel.startswith(only) for entry in subject.entries):
            raise ConfigError(f"no kernel of backend {subject.backend} begins with {only!r}", field="only")
        now = list(subject.entries)
        for index, found in tune(sandbox, only=only):
            on_found(found)
            if found.entry is not found.before:
                now[index] = found.entry
                heading = f"As measured on {subject.device_name} by `octavo tune`."
                write(found.before.file, as_toml([e for e in now if e.file == found.before.file], heading))


def device_bench(open_device: Callable[[], DeviceBackend]) -> Bench:
    """What measures, on a device of its own."""
    backend: Any = open_device()
    subject = Subject(backend.name, backend.capabilities.device_name, (), ())
    if backend.capabilities.is_emulated:
        raise ConfigError(
            f"backend {backend.name} runs on {subject.device_name}: there is no device to measure", field="backend"
        )

    def check() -> None:
        backend.to_host(backend.empty(1, dtype=backend.capabilities.default_dtype).fill_(0))

    return Bench(subject, backend.gpu.tuning, trials_on(backend), check)


def tune(measures: Measures, *, only: str | None = None) -> Iterator[tuple[int, Found]]:
    """Every entry of the kernels whose name begins with `only`, in the table's order, as they are done."""
    subject = measures.subject
    served: dict[int, list[int]] = {}
    for workload, name in enumerate(subject.workloads):
        try:
            for index in measures.served(workload):
                served.setdefault(index, []).append(workload)
        except Lost as lost:
            log.warning("workload %s is left out: as the table has it, %s", name, lost)
    for index, entry in enumerate(subject.entries):
        if only is None or entry.kernel.startswith(only):
            yield index, _search(measures, index, served.get(index, []))


def _search(measures: Measures, index: int, workloads: list[int]) -> Found:
    """Coordinate descent from the entry's own values."""
    entry = measures.subject.entries[index]
    names = tuple(measures.subject.workloads[workload] for workload in workloads)
    unmoved = Found(entry, entry, 1.0, names)
    if not workloads:
        return unmoved
    deadly: set[tuple[str, Any]] = set()

    def seconds(candidate: Entry, changed: set[tuple[str, Any]]) -> float:
        if changed & deadly:
            return math.inf
        try:
            return measures.seconds(index, candidate, workloads)
        except Lost as lost:
            deadly.update(changed)
            log.warning("%s with %s is passed over: %s", entry.kernel, _shown(candidate.constants), lost)
            return math.inf

    first = fastest = seconds(entry, set())
    if math.isinf(first):
        return unmoved
    best, moved = entry, True
    while moved:
        moved = False
        for candidate in neighbours(best):
            taken = seconds(candidate, candidate.constants.items() - best.constants.items())
            if taken < WORTH * fastest:
                best, fastest, moved = candidate, taken, True
                break
    if best is entry:
        return unmoved
    gain = first / fastest
    where = measures.subject.device_name
    why = f"measured on {where}: {gain:.2f}x of {_shown(entry.constants)}, over {', '.join(names)}"
    return Found(entry, replace(best, why=why), gain, names)


def neighbours(entry: Entry) -> Iterator[Entry]:
    """The entry with one parameter changed by one step."""
    for name, value in entry.tile.items():
        for other in _steps(name, value):
            yield replace(entry, tile={**entry.tile, name: other})
    for name, value in entry.options.items():
        for other in _steps(name, value):
            yield replace(entry, options={**entry.options, name: other})


def _steps(name: str, value: int) -> tuple[int, ...]:
    if name in SWITCHES:
        return (1 - value,)
    if name in NOT_FOR_SPEED:
        return ()
    if name == "num_stages":
        return tuple(v for v in (value - 1, value + 1) if v > 0)
    return tuple(v for v in (value // 2, value * 2) if v > 0)


def as_toml(entries: Sequence[Entry], heading: str) -> str:
    """A tuning file. heading: its comment."""
    return "\n".join([f"# {line}" for line in heading.splitlines()] + [_entry_toml(entry) for entry in entries]) + "\n"


def _entry_toml(entry: Entry) -> str:
    lines = ["", "[[entry]]", f"kernel = {json.dumps(entry.kernel)}"]
    tables: dict[str, Mapping[str, Any]] = {"when": entry.when, "tile": entry.tile, "options": entry.options}
    for name, values in tables.items():
        if values or name == "tile":
            lines.append(f"{name} = {{ {', '.join(f'{key} = {_value(value)}' for key, value in values.items())} }}")
    return "\n".join([*lines, f"why = {json.dumps(entry.why, ensure_ascii=False)}"])


def _value(value: Key | tuple[int, int]) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _shown(constants: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in constants.items())
