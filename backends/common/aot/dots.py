"""The products in a kernel, from Triton's own intermediate form (TTIR): what the compiler was asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass

_DOT = re.compile(r"tt\.dot(?:_scaled)? .*: tensor<(\d+)x(\d+)x(\w+)> \* tensor<(\d+)x(\d+)x(\w+)>")
_NARROW = ("bf16", "f16", "f8", "i8")


@dataclass(frozen=True, slots=True)
class Dot:
    """A product [rows, k] x [k, columns].

    Attributes:
        operand: as TTIR names it ("bf16", "f8E4M3FN").
    """

    rows: int
    k: int
    columns: int
    operand: str

    @property
    def is_narrow(self) -> bool:
        """Whether its operands are of 16 bits or fewer, for which every chip here has matrix units."""
        return self.operand.startswith(_NARROW)


def widest_dot(ttir: str) -> Dot | None:
    """The product of most rows; None in a kernel without one."""
    dots = [Dot(int(m[1]), int(m[2]), int(m[5]), m[3]) for m in _DOT.finditer(ttir)]
    return max(dots, key=lambda dot: dot.rows, default=None)
