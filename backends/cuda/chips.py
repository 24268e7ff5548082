"""The NVIDIA chips that this backend knows. Figures: NVIDIA's data sheets of the SXM forms, without sparsity.

A unit draws 64 bytes a cycle from the second-level cache, which is the last one.

Hopper's tensor cores align the 32 products of 8-bit floats that they add at once, and the sum so far, to the largest of
them and keep some 14 bits. Measured by DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), 3.3.2.
"""

from __future__ import annotations

from dataclasses import replace
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
    unit_bytes_per_s=64 * 1.755e9,
    flops=_HOPPER_FLOPS,
    fp8="e4m3fn",
    cache_bytes=50 * 2**20,
    fp8_accumulation="fp22-128",
)
H200 = replace(H100, name="NVIDIA H200", memory_bytes=141 * 10**9, bandwidth_bytes_per_s=4.8e12)
B200 = replace(
    H200,
    name="NVIDIA B200",
    arch="sm_100",
    num_units=148,
    cache_bytes=126 * 2**20,
    memory_bytes=180 * 10**9,
    bandwidth_bytes_per_s=8e12,
    flops=MappingProxyType(
        {"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12, "int8": 4500e12, "float32": 80e12}
    ),
)
CHIPS = (H200, H100)
"""What the backend runs on."""

BUILDABLE = (*CHIPS, B200)
"""What its kernels are compiled for; nothing was tuned for the ones that it doesn't run on."""

DEFAULT = H200
"""What kernels are cut to where no device is present."""
