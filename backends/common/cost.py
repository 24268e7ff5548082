"""What a launch must move and multiply at the least, from shapes alone. Kept beside the kernels, read by the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one launch.

    Attributes:
        bytes: read from and written to the device's memory, each byte once.
        flops: a multiply-add counted twice, by operand ("bfloat16", "float16", "float8", "int8", "float32").
    """

    bytes: float
    flops: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        operands = {**self.flops, **other.flops}
        return Cost(
            self.bytes + other.bytes,
            {operand: self.flops.get(operand, 0) + other.flops.get(operand, 0) for operand in operands},
        )
