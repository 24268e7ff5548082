"""What is known of a chip before one is seen: sizes that kernels are cut to, and limits they are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator.

    Attributes:
        name: for people.
        arch: as its compiler names it ("sm_90", "gfx942").
        warp_size: lanes that run in step.
        num_units: streaming multiprocessors or compute units.
        num_dies: dies with a second-level cache of their own; programs are dealt out to them in turn.
        shared_bytes: on-chip memory that one program may use (shared memory, LDS).
        registers: 32-bit registers of one unit.
        memory_bytes: of the device.
        bandwidth_bytes_per_s: of its memory, as specified.
        unit_bytes_per_s: that one unit can draw from the second-level cache.
        flops: per second, a multiply-add counted twice, dense, by operand ("bfloat16", "float8", "int8", "float32").
        fp8: flavour of its 8-bit floats.
        cache_bytes: of the last cache before the memory, all units' together. Weights smaller than this are read faster
            when they are read again and again than in a model.
        fp8_accumulation: class in which the backend's kernels add up products of 8-bit floats, as the suite names it.
    """

    name: str
    arch: str
    warp_size: int
    num_units: int
    num_dies: int
    shared_bytes: int
    registers: int
    memory_bytes: int
    bandwidth_bytes_per_s: float
    unit_bytes_per_s: float
    flops: Mapping[str, float]
    fp8: str
    cache_bytes: int
    fp8_accumulation: str = "fp32"
