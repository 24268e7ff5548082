"""What measures launch parameters: the workloads of one device, under its tuning table with one entry exchanged.

    Bench ──► Trial, one a workload ──► its op under a table: the output, to compare, and the seconds

An exception is no fault of the search: Triton and the driver refuse parameters by errors of many kinds. Whether the
device survived one is asked of it; if it did not, nothing that this process measures means anything any more, and the
error goes on to whoever runs the bench (tune_process.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import torch

from octavo.backends.common.tuning import Entry, PinnedTable, TuningTable
from octavo.core.backend import KVCache, KVCacheSpec, StepPlan
from octavo.core.backend.workloads import Prepared, Tensors, Workload, list_workloads
from octavo.core.backend.workloads.timing import seconds_of

if TYPE_CHECKING:
    from octavo.backends.common.device import GpuBackend

AGREEMENT = 0.02
"""Largest difference of two honest orders of summation, over the output's largest value."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is searched.

    Attributes:
        backend, device_name: whose table, and where.
        entries: of the table, in its order.
        workloads: their names.
    """

    backend: str
    device_name: str
    entries: tuple[Entry, ...]
    workloads: tuple[str, ...]


class Trial(Protocol):
    """A workload ready to run under any table."""

    name: str

    def call(self, table: TuningTable) -> torch.Tensor:
        """Its output, which later calls leave alone."""

    def seconds(self, table: TuningTable) -> float:
        """Of one call."""

    def release(self) -> None:
        """Give back the memory of its tensors."""


class Bench:
    """Measures in this process.

    Attributes:
        subject: with the table's entries and the trials' names.
    """

    def __init__(
        self, subject: Subject, table: TuningTable, trials: Sequence[Trial], check: Callable[[], None]
    ) -> None:
        """check: raises if the device is of no more use."""
        entries = tuple(entry for of_kernel in table.by_kernel.values() for entry in of_kernel)
        self.subject = replace(subject, entries=entries, workloads=tuple(trial.name for trial in trials))
        self._table = table
        self._trials = trials
        self._check = check
        self._entry: int | None = None
        self._wanted: list[torch.Tensor] = []

    def served(self, workload: int) -> Sequence[int]:
        """The entries that a workload asks for; none where its op fails as the table has it."""
        watched = PinnedTable(self._table)
        try:
            self._trials[workload].call(watched)
        except Exception:
            self._check()
            return ()
        finally:
            self._trials[workload].release()
        return [i for i, entry in enumerate(self.subject.entries) if any(entry is given for given in watched.given)]

    def seconds(self, entry: int, candidate: Entry, workloads: Sequence[int]) -> float:
        """The geometric mean over the workloads with the candidate in the entry's place; infinite when it is unfit."""
        trials = [self._trials[workload] for workload in workloads]
        pinned = PinnedTable(self._table, candidate, instead_of=self.subject.entries[entry])
        try:
            self._turn_to(entry, trials)
            if not all(_agree(t.call(pinned), w) for t, w in zip(trials, self._wanted, strict=True)):
                return math.inf
            return math.exp(sum(math.log(trial.seconds(pinned)) for trial in trials) / len(trials))
        except Exception:
            self._check()
            return math.inf

    def _turn_to(self, entry: int, trials: Sequence[Trial]) -> None:
        """Tensors of one entry's workloads at a time: those of all may not fit the device."""
        if entry != self._entry:
            for trial in self._trials:
                trial.release()
            self._wanted = [trial.call(PinnedTable(self._table)) for trial in trials]
            self._entry = entry


def _agree(x: torch.Tensor, want: torch.Tensor) -> bool:
    x, want = x.to(torch.float32), want.to(torch.float32)
    return bool((x - want).abs().max() <= AGREEMENT * want.abs().max())


def trials_on(backend: GpuBackend) -> list[Trial]:
    """The contract's workloads on this device; those that its kernels refuse are left out."""
    dtype = backend.capabilities.activation_dtype[backend.capabilities.default_dtype]
    fp8 = next((d for d in backend.capabilities.kv_dtypes if d.itemsize == 1), None)

    def kv_cache(spec: KVCacheSpec, num_blocks: int) -> KVCache:
        return backend.kv_view(backend.allocate_kv_pool(num_blocks, spec.block_bytes), spec)

    tensors = Tensors(backend.device, dtype, kv_cache)
    return [
        DeviceTrial(backend, workload, tensors)
        for workload in list_workloads(dtype, fp8)
        if hasattr(backend.ops, workload.op) and backend.ops.supports(workload.op, workload.spec) is None
    ]


class DeviceTrial:
    """A workload of the contract on a device: the same numbers under every table.

    Weights and KV are made once and kept, which takes seconds. The others' tensors are made for each call: some ops
    write over what they read.
    """

    def __init__(self, backend: GpuBackend, workload: Workload, tensors: Tensors) -> None:
        self.name = workload.name
        self._backend = backend
        self._workload = workload
        self._tensors = tensors
        self._kept: list[Prepared] = []

    def call(self, table: TuningTable) -> torch.Tensor:
        run = self._under(table)[0]
        out = cast(torch.Tensor, run.keywords.get("out", run.keywords.get("out_q", run.keywords.get("out_ids"))))
        if self._workload.op != "lora_gemm":  # adds to what is there
            out.view(torch.uint8).fill_(0xFF)  # NaN, or -1: what a launch leaves out must not look right
        run()
        self._backend.synchronize()
        return out.clone()

    def seconds(self, table: TuningTable) -> float:
        return seconds_of(self._backend, *self._under(table))

    def release(self) -> None:
        self._kept = []

    def _under(self, table: TuningTable) -> list[Prepared]:
        """Calls of the ops that such a table makes."""
        ops = self._backend.make_ops(replace(self._backend.gpu, tuning=table))
        if not self._workload.from_memory:
            torch.manual_seed(0)
            return [self._workload.prepare(ops, self._tensors)]
        if not self._kept:
            torch.manual_seed(0)
            cache_bytes = self._backend.capabilities.cache_bytes
            self._kept = self._workload.prepare_all(self._backend.ops, self._tensors, cache_bytes)
        op = getattr(ops, self._workload.op)
        return [
            functools.partial(
                op, *(ops.plan(x.meta) if isinstance(x, StepPlan) else x for x in run.args), **run.keywords
            )
            for run in self._kept
        ]
