"""Searches launch parameters on a device: every entry of the tuning table, against the workloads that it serves.

    entry ──► its workloads ──► one parameter at a time, half and double (stages: one less, one more), as long as that
              is faster ──► the entry with what was found, and why

Entries keep their order and their `when`: what is searched is what an entry says, not which questions there are. A
parameter set that doesn't compile, doesn't fit the chip or gives other numbers than the one before is passed over.
`octavo tune` calls `retuned` and writes what it gives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from octavo.backends.common.tuning import Entry, Key, PinnedTable, TuningTable
from octavo.core.backend import KVCache, KVCacheSpec
from octavo.core.backend.workloads import Prepared, Tensors, Workload, list_workloads
from octavo.core.backend.workloads.timing import seconds_of
from octavo.core.base.errors import ConfigError

if TYPE_CHECKING:
    from octavo.backends.common.device import GpuBackend

WORTH = 0.98
"""A change must take less than this share of the time before it: smaller gains are noise."""

AGREEMENT = 0.02
"""Largest difference of two honest orders of summation, over the output's largest value."""


SWITCHES = ("LIBRARY", "SWAP", "TURN")
"""Parameters that are 0 or 1."""

NOT_FOR_SPEED = ("PROMOTE",)
"""Parameters that trade numbers for time: theirs is the bound's choice."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A workload ready to run under any table.

    Attributes:
        call: under a table, returns its output.
        seconds: measures the same.
    """

    name: str
    call: Callable[[TuningTable], torch.Tensor]
    seconds: Callable[[TuningTable], float]


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


def tune(table: TuningTable, trials: list[Trial], device_name: str, *, only: str | None = None) -> Iterator[Found]:
    """Every entry of the kernels whose name begins with `only`, in the table's order, as they are done."""
    served = {id(entry): [] for entries in table.by_kernel.values() for entry in entries}  # type: dict[int, list[Trial]]
    for trial in trials:
        watched = PinnedTable(table)
        trial.call(watched)
        for entry in watched.given:
            served[id(entry)].append(trial)
    for kernel, entries in table.by_kernel.items():
        for entry in entries if only is None or kernel.startswith(only) else ():
            yield _search(table, entry, served[id(entry)], device_name)


def _search(table: TuningTable, entry: Entry, trials: list[Trial], device_name: str) -> Found:
    """Coordinate descent from the entry's own values."""
    names = tuple(trial.name for trial in trials)
    if not trials:
        return Found(entry, entry, 1.0, names)
    wanted = [trial.call(PinnedTable(table, entry)) for trial in trials]
    best, first = entry, _seconds(table, entry, entry, trials)
    fastest = first
    moved = True
    while moved:
        moved = False
        for candidate in neighbours(best):
            taken = _seconds(table, entry, candidate, trials, wanted)
            if taken < WORTH * fastest:
                best, fastest, moved = candidate, taken, True
                break
    gain = first / fastest
    if best is entry:
        return Found(entry, entry, 1.0, names)
    why = f"measured on {device_name}: {gain:.2f}x of {_shown(entry.constants)}, over {', '.join(names)}"
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


def _seconds(
    table: TuningTable, entry: Entry, candidate: Entry, trials: list[Trial], wanted: list[torch.Tensor] | None = None
) -> float:
    """The geometric mean over the workloads with the candidate in the entry's place; infinite when it is unfit."""
    pinned = PinnedTable(table, candidate, instead_of=entry)
    try:
        if wanted is not None and not all(_agree(t.call(pinned), w) for t, w in zip(trials, wanted, strict=True)):
            return math.inf
        return math.exp(sum(math.log(trial.seconds(pinned)) for trial in trials) / len(trials))
    except Exception:  # Triton and the driver refuse parameters by errors of many kinds
        return math.inf


def _agree(x: torch.Tensor, want: torch.Tensor) -> bool:
    x, want = x.to(torch.float32), want.to(torch.float32)
    return bool((x - want).abs().max() <= AGREEMENT * want.abs().max())


def as_toml(entries: list[Entry], heading: str) -> str:
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


def retuned(backend: GpuBackend, *, only: str | None, on_found: Callable[[Found], None]) -> dict[str, str]:
    """The backend's tuning files as they were read, with what was found on its device: name -> text, changed ones only.

    Raises ConfigError for an emulated device, whose times mean nothing, and for a kernel that the table doesn't have.
    """
    name, table = backend.capabilities.device_name, backend.gpu.tuning
    if backend.capabilities.is_emulated:
        raise ConfigError(f"backend {backend.name} runs on {name}: there is no device to measure", field="backend")
    if only is not None and not any(kernel.startswith(only) for kernel in table.by_kernel):
        raise ConfigError(f"no kernel of backend {backend.name} begins with {only!r}", field="only")
    better: dict[int, Entry] = {}
    for found in tune(table, trials_on(backend), name, only=only):
        on_found(found)
        if found.entry is not found.before:
            better[id(found.before)] = found.entry
    files: dict[str, list[Entry]] = {}
    for entry in (entry for entries in table.by_kernel.values() for entry in entries):
        files.setdefault(entry.file, []).append(entry)
    return {
        file: as_toml([better.get(id(entry), entry) for entry in entries], f"As measured on {name} by `octavo tune`.")
        for file, entries in files.items()
        if any(id(entry) in better for entry in entries)
    }


def trials_on(backend: GpuBackend) -> list[Trial]:
    """The contract's workloads on this device; those that its kernels refuse are left out."""
    dtype = backend.capabilities.activation_dtype[backend.capabilities.default_dtype]
    fp8 = next((d for d in backend.capabilities.kv_dtypes if d.itemsize == 1), None)

    def kv_cache(spec: KVCacheSpec, num_blocks: int) -> KVCache:
        return backend.kv_view(backend.allocate_kv_pool(num_blocks, spec.block_bytes), spec)

    tensors = Tensors(backend.device, dtype, kv_cache)
    return [
        _trial(backend, workload, tensors)
        for workload in list_workloads(dtype, fp8)
        if hasattr(backend.ops, workload.op) and backend.ops.supports(workload.op, workload.spec) is None
    ]


def _trial(backend: GpuBackend, workload: Workload, tensors: Tensors) -> Trial:
    def prepared(table: TuningTable) -> Prepared:
        return workload.prepare(backend.make_ops(replace(backend.gpu, tuning=table)), tensors)

    def call(table: TuningTable) -> torch.Tensor:
        torch.manual_seed(0)  # the same numbers under every table
        run = prepared(table)
        out = cast(torch.Tensor, run.keywords.get("out", run.keywords.get("out_q", run.keywords.get("out_ids"))))
        if workload.op != "lora_gemm":  # adds to what is there
            out.view(torch.uint8).fill_(0xFF)  # NaN, or -1: what a launch leaves out must not look right
        run()
        backend.synchronize()
        return out

    return Trial(workload.name, call, lambda table: seconds_of(backend, prepared(table)))
