"""The AMD chips that this backend knows. Figures: AMD's data sheets, without sparsity.

A unit draws 64 bytes a cycle from its die's second-level cache; behind those lies one cache for all (Infinity Cache).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from octavo.backends.common.chip import Chip

MI300X = Chip(
    name="AMD Instinct MI300X",
    arch="gfx942",
    warp_size=64,
    num_units=304,
    num_dies=8,
    shared_bytes=64 * 1024,
    registers=131072,
    memory_bytes=192 * 10**9,
    bandwidth_bytes_per_s=5.3e12,
    unit_bytes_per_s=64 * 2.1e9,
    flops=MappingProxyType(
        {"bfloat16": 1307e12, "float16": 1307e12, "float8": 2615e12, "int8": 2615e12, "float32": 163e12}
    ),
    fp8="e4m3fnuz",
    cache_bytes=256 * 2**20,
)
MI355X = replace(
    MI300X,
    name="AMD Instinct MI355X",
    arch="gfx950",
    num_units=256,
    shared_bytes=160 * 1024,
    memory_bytes=288 * 10**9,
    bandwidth_bytes_per_s=8e12,
    flops=MappingProxyType(
        {"bfloat16": 2500e12, "float16": 2500e12, "float8": 5000e12, "int8": 5000e12, "float32": 157e12}
    ),
    fp8="e4m3fn",
)
CHIPS = (MI300X,)
"""What the backend runs on."""

BUILDABLE = (*CHIPS, MI355X)
"""What its kernels are compiled for; nothing was tuned for the ones that it doesn't run on."""

DEFAULT = MI300X
"""What kernels are cut to where no device is present."""
