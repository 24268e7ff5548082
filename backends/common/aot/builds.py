"""The builds of a backend: every launch of every workload, under every set of launch parameters that can serve it.

    free and deterministic, for each workload, for each entry of the tuning table that it may ask for:
        the ops run on tensors without data, their launches are noted, equal ones once       ──► Build

A compiler may make another kernel of it where a tensor's memory is small enough for 32-bit distances. KV pools of a
device are not, those of tests are: where the vendor's compiler makes the difference, both are built.

Costs nothing of a compiler until `build()`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.backends.common.aot.compile import compile_launch
from octavo.backends.common.aot.occupancy import programs_per_unit
from octavo.backends.common.aot.roofline import predict
from octavo.backends.common.chip import Chip
from octavo.backends.common.gpu import Gpu
from octavo.backends.common.launch import LaunchRecord, Recorder
from octavo.backends.common.tuning import PinnedTable, TuningTable
from octavo.core.backend import KVCache, KVCacheSpec, KVLayout, KVPool, torch_kv_view
from octavo.core.backend.builds import BuildResult
from octavo.core.backend.workloads import Tensors, Workload, list_workloads

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Build:
    """A KernelBuild of the contract.

    Attributes:
        read: the backend's module that reads compiled kernels.
        is_default: whether the workload gets these launch parameters without being told to.
        siblings: all chips of the architecture, whose limits are told apart.
    """

    name: str
    op: str
    target: str
    chip: Chip
    read: ModuleType
    record: LaunchRecord
    workload: Workload
    is_default: bool
    siblings: Sequence[Chip]

    def build(self) -> BuildResult:
        compiled = compile_launch(self.record, self.chip)
        figures = self.read.read(compiled)
        faults = self.read.faults(
            compiled, figures, self.chip, wide_loads=self.workload.wide_loads, may_spill=not self.is_default
        )
        return BuildResult(figures | self._expected(figures), tuple(faults))

    def _expected(self, figures: dict[str, float]) -> dict[str, float]:
        """Occupancy, and the roofline of the workload. A merge or a second pass is counted with its workload's work."""
        per_unit = programs_per_unit(self.chip, self.read.footprint(figures))
        grid = math.prod(self.record.grid)
        resident = min(grid, per_unit * self.chip.num_units)
        prediction = predict(
            self.chip,
            self.workload.cost,
            programs=grid,
            bytes_in_flight=resident * self.read.bytes_per_turn(figures),
        )
        return {
            "programs_per_unit": per_unit,
            "programs": grid,
            "limit_us": round(prediction.limit_us, 2),
            "expected_share": round(prediction.share, 3),
            "is_default": self.is_default,
            **{f"limit_us {chip.name}": round(self._limit_us(chip), 2) for chip in self.siblings},
        }

    def _limit_us(self, chip: Chip) -> float:
        return predict(chip, self.workload.cost, programs=chip.num_units, bytes_in_flight=math.inf).limit_us


def list_builds(
    make_ops: Callable[[Gpu], Any],
    chip: Chip,
    table: TuningTable,
    read: ModuleType,
    siblings: Sequence[Chip],
    *,
    near_bytes: int | None = None,
) -> list[Build]:
    """All builds for one chip.

    Args:
        make_ops: the backend's ops on a device.
        read: the backend's read.py.
        siblings: all chips of this one's architecture.
        near_bytes: of a tensor's memory, up to which the vendor's compiler makes another kernel; None: it never asks.
    """
    fp8 = torch.float8_e4m3fn if chip.fp8 == "e4m3fn" else torch.float8_e4m3fnuz
    builds: dict[tuple[Any, ...], Build] = {}
    pools = (("", (near_bytes or 0) + 1), *((("-small-pool", 0),) if near_bytes else ()))
    for (pool, pool_bytes), is_fixed, workload in itertools.product(
        pools, (False, True), list_workloads(torch.bfloat16, fp8)
    ):
        gpu = Gpu(META, chip, Recorder(), table, deterministic=is_fixed)
        for label, records in _launches(make_ops, gpu, workload, pool_bytes):
            for record in records:
                key = (workload.op, *identity(record, near_bytes))
                mode = "-fixed" if is_fixed else ""
                name = f"{workload.op}.{record.kernel.__name__}/{workload.name}{mode}{pool}-{label}"
                build = Build(name, workload.op, chip.arch, chip, read, record, workload, label == "default", siblings)
                builds.setdefault(key, build)
    return list(builds.values())


def _launches(
    make_ops: Callable[[Gpu], Any], gpu: Gpu, workload: Workload, pool_bytes: int
) -> Iterator[tuple[str, list[LaunchRecord]]]:
    """What a workload starts: as the table has it, and under each entry that fits a question it asks.

    pool_bytes: the least memory of a KV pool.
    """
    make_kv = functools.partial(_kv_cache, pool_bytes)

    def run(pinned: PinnedTable) -> list[LaunchRecord]:
        recorder = Recorder()
        ops = make_ops(replace(gpu, launch=recorder, tuning=pinned))
        if hasattr(ops, workload.op) and ops.supports(workload.op, workload.spec) is None:
            workload.prepare(ops, Tensors(META, torch.bfloat16, make_kv))()
        return recorder.records

    table = gpu.tuning
    default = PinnedTable(table)
    yield "default", run(default)
    for kernel in sorted(default.asked):
        for index, entry in enumerate(table.by_kernel[kernel]):
            if gpu.deterministic and "mode" not in entry.when:
                continue  # it is built in free mode; deterministic takes it only where nothing is kept for it
            pinned = PinnedTable(table, entry)
            records = run(pinned)
            if pinned.was_taken:
                yield f"{kernel}.{index}", records


def _kv_cache(pool_bytes: int, spec: KVCacheSpec, num_blocks: int) -> KVCache:
    layout = KVLayout.NHD if spec.v_head_dim else KVLayout.MLA
    storage = torch.empty(max(pool_bytes, num_blocks * spec.block_bytes), dtype=torch.uint8, device=META)
    return torch_kv_view(KVPool(num_blocks, spec.block_bytes, storage), spec, layout)


def identity(record: LaunchRecord, near_bytes: int | None = None) -> tuple[Any, ...]:
    """What decides the compiled form of a launch: the kernel, what Triton specialises on, constants and options.

    near_bytes: as in `list_builds`.
    """
    arguments = tuple(
        _specialised(argument, near_bytes, by_value=not parameter.do_not_specialize)
        for parameter, argument in zip(record.kernel.params, record.args, strict=False)
    )
    return (record.kernel.__name__, arguments, tuple(sorted(record.constants.items(), key=lambda item: item[0])))


def _specialised(argument: Any, near_bytes: int | None, *, by_value: bool) -> Any:
    if isinstance(argument, TensorDescriptor):
        return ("descriptor", argument.base.dtype, tuple(argument.block_shape))
    if isinstance(argument, torch.Tensor):
        is_near = near_bytes is not None and argument.untyped_storage().nbytes() <= near_bytes
        return ("tensor", argument.dtype, is_near)
    if isinstance(argument, int) and not isinstance(argument, bool):
        value = (argument == 1, argument % 16 == 0) if by_value else ()
        return ("int", argument.bit_length() > 31, *value)
    return type(argument)
