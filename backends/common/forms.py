"""In which form a weight lies on a GPU: what its scheme asks for, in terms of what the kernels read.

    scheme                          form      a row holds                     scales [G, N], offsets [G, N], fp32
    none                            plain     K numbers of WeightSpec.dtype
    int8; Q8_0, Q5_0, Q6_K          int8      K codes                         scales
    int8 + zero points; Q5_1, Q5_K  int8      K codes                         scales, offsets
    int4; Q4_0                      int4      nibbles code + 8                scales
    int4 + zero points; Q4_1, Q4_K  uint4     nibbles code                    scales, offsets
    mxfp4                           e2m1      nibbles code                    scales
    fp8                             fp8       K numbers of the chip's fp8     scales

value = code * scale - offset. Scales are fp32, one a row and group, whatever blocks they came in: G is ceil(K / group),
or 1 where a row has one scale, and one more where the padding of nibbles begins a group. A block's scale stands in each
of its rows, so that rows may be interleaved freely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from octavo.core.backend import QuantFormat, QuantScheme, Unsupported, WeightSpec

FormName = Literal["plain", "int8", "int4", "uint4", "e2m1", "fp8"]

MIN_GROUP = 16
"""Columns that share a scale, at least."""

NIBBLE_ALIGNMENT = 128
"""The second half of a row of nibbles begins at a multiple of this many columns, or of a smaller group; so a tile of a
product is no wider."""

_GGUF: dict[QuantFormat, tuple[FormName, bool]] = {
    QuantFormat.GGUF_Q8_0: ("int8", False),
    QuantFormat.GGUF_Q4_0: ("int4", False),
    QuantFormat.GGUF_Q4_1: ("uint4", True),
    QuantFormat.GGUF_Q5_0: ("int8", False),
    QuantFormat.GGUF_Q5_1: ("int8", True),
    QuantFormat.GGUF_Q4_K: ("uint4", True),
    QuantFormat.GGUF_Q5_K: ("int8", True),
    QuantFormat.GGUF_Q6_K: ("int8", False),
}
"""Form, and whether it has offsets. Never written to."""


@dataclass(frozen=True, slots=True)
class Form:
    """How codes and scales of a weight lie.

    Attributes:
        dtype: of the codes' tensor.
        group: columns that share a scale; 0: a whole row.
    """

    name: FormName
    dtype: torch.dtype
    group: int = 0
    has_offsets: bool = False

    @property
    def has_scales(self) -> bool:
        return self.name != "plain"

    @property
    def is_nibbles(self) -> bool:
        return self.name in ("int4", "uint4", "e2m1")

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.is_nibbles else 8 * self.dtype.itemsize

    def half(self, columns: int) -> int:
        """Bytes of a row of nibbles that hold codes; of the other forms simply its columns."""
        if not self.is_nibbles:
            return columns
        step = min(self.group or NIBBLE_ALIGNMENT, NIBBLE_ALIGNMENT)
        return -(-columns // (2 * step)) * step

    def row_elements(self, columns: int) -> int:
        """Elements from row to row: a multiple of 16 bytes, so that descriptors can read it."""
        per_16_bytes = 16 // self.dtype.itemsize
        return -(-self.half(columns) // per_16_bytes) * per_16_bytes

    def groups(self, columns: int) -> int:
        """Of a row, those included that only the padding of a row of nibbles reaches."""
        reached = 2 * self.half(columns) if self.is_nibbles else columns
        return -(-reached // self.group) if self.group else 1


def form_of(spec: WeightSpec, fp8: torch.dtype, fp8_formats: tuple[QuantFormat, ...]) -> Form | Unsupported:
    """The form of a weight, or why there is none.

    Args:
        fp8: the chip's 8-bit float.
        fp8_formats: those that can be repacked to it without loss.
    """
    if spec.gated and spec.out_features % 2:
        return Unsupported(f"a gated weight has two equal halves; this one has {spec.out_features} rows")
    scheme = spec.scheme
    if scheme is None:
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return Unsupported(f"plain weights are stored in fp32, bf16 or fp16, not {spec.dtype}")
        return Form("plain", spec.dtype)
    group = _group(scheme)
    if group and (group < MIN_GROUP or group & (group - 1)):
        return Unsupported(f"scales of {group} columns; the kernels take powers of two from {MIN_GROUP} on")
    return _form(scheme, group, fp8, fp8_formats)


def _group(scheme: QuantScheme) -> int:
    block = scheme.format.block
    return block.group if block is not None else max(scheme.group_size, 0)


def _form(
    scheme: QuantScheme, group: int, fp8: torch.dtype, fp8_formats: tuple[QuantFormat, ...]
) -> Form | Unsupported:
    has_zeros = not scheme.symmetric
    if scheme.format in _GGUF:
        name, has_offsets = _GGUF[scheme.format]
        return Form(name, torch.int8 if name == "int8" else torch.uint8, group, has_offsets)
    if scheme.format is QuantFormat.INT8:
        return Form("int8", torch.int8, group, has_zeros)
    if scheme.format is QuantFormat.INT4:
        return Form("uint4" if has_zeros else "int4", torch.uint8, group, has_zeros)
    if has_zeros:
        return Unsupported(f"{scheme.format} codes have no zero points")
    if scheme.format is QuantFormat.MXFP4:
        return Form("e2m1", torch.uint8, group)
    if scheme.format not in fp8_formats:
        return Unsupported(f"the chip's 8-bit float is {fp8}; {scheme.format} does not fit into it without loss")
    return Form("fp8", fp8, group)
