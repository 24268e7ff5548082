"""The NVIDIA chips that this backend knows. Figures: NVIDIA's data sheets of the SXM forms, without sparsity."""

from __future__ import annotations

from types import MappingProxyType

from octavo.backends.common.chip import Chip

_HOPPER_FLOPS = MappingProxyType(
    {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "int8": 1979e12, "float32": 67e12}
)

H100 = Chip(
    name="NVIDIA H100",
    arch="sm_90",
    warp_size=32,
    num_units=132,
    num_dies=1,
    shared_bytes=227 * 1024,
    registers=65536,
    memory_bytes=80 * 10**9,
    bandwidth_bytes_per_s=3.35e12,
    flops=_HOPPER_FLOPS,
    fp8="e4m3fn",
)
H200 = Chip(
    name="NVIDIA H200",
    arch="sm_90",
    warp_size=32,
    num_units=132,
    num_dies=1,
    shared_bytes=227 * 1024,
    registers=65536,
    memory_bytes=141 * 10**9,
    bandwidth_bytes_per_s=4.8e12,
    flops=_HOPPER_FLOPS,
    fp8="e4m3fn",
)
CHIPS = (H100, H200)
DEFAULT = H200
"""What kernels are cut to where no device is present."""
