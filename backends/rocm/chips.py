"""The AMD chips that this backend knows. Figures: AMD's data sheets, without sparsity."""

from __future__ import annotations

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
    flops=MappingProxyType(
        {"bfloat16": 1307e12, "float16": 1307e12, "float8": 2615e12, "int8": 2615e12, "float32": 163e12}
    ),
    fp8="e4m3fnuz",
)
CHIPS = (MI300X,)
DEFAULT = MI300X
"""What kernels are cut to where no device is present."""
