"""Accumulation classes that a backend may declare per op in `Capabilities.accumulation`, and what each allows.

    class          exact lane: partial sums of integers stay      statistical lane: error of one addition
    "fp32"         ≤ 2^24 units                                   u = 2^-24
    "fp32-trunc"   ≤ 2^24 units (integers truncate to themselves) u = 2^-23, one-sided: grows with K, not √K
    "tf32"         ≤ 2^24, operands ≤ 2^11                        u = 2^-24, operands rounded to 2^-11
    "fp22"         ≤ 2^13 units                                   u = 2^-13, one-sided (some fp8 tensor cores)
    "fp22-128"     ≤ 2^13 units                                   "fp22" for 128 columns, whose sums are added in fp32
    "fp64"         ≤ 2^53 units                                   u = 2^-53

Declaring a weaker class is allowed and shown in the report; an undeclared one fails the case that reveals it. An op may
have another class where both operands are 8-bit floats: `SCALED` behind its name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.core.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Accumulation:
    """What a class promises.

    Attributes:
        bits: integers up to 2^bits are added without rounding, in any order.
        unit: unit roundoff of one addition.
        truncating: additions round one way, so that errors add up in K rather than in √K.
        operand_unit: unit roundoff with which operands wider than this are rounded before the product; 0: not.
        operand_bits: integers up to 2^operand_bits survive that.
        run: unit holds within as many columns, counted from the first; their sums are added in fp32. 0: in all.
    """

    name: str
    bits: int
    unit: float
    truncating: bool = False
    operand_unit: float = 0.0
    operand_bits: int = 24
    run: int = 0

    def error(self, inner: int) -> float:
        """What a sum of `inner` products may be off by, as a share of its partial sums' size; see product_bound."""
        if self.run:
            return self.unit * math.sqrt(min(inner, self.run)) + FP32.unit * math.sqrt(inner)
        return self.unit * (float(inner) if self.truncating else math.sqrt(inner))


SCALED = "/float8"
"""`gemm/float8` in Capabilities.accumulation: gemm, where it multiplies 8-bit floats with 8-bit floats."""

FP32 = Accumulation("fp32", 24, 2.0**-24)
CLASSES = {
    c.name: c
    for c in (
        FP32,
        Accumulation("fp32-trunc", 24, 2.0**-23, truncating=True),
        Accumulation("tf32", 24, 2.0**-24, operand_unit=2.0**-11, operand_bits=11),
        Accumulation("fp22", 13, 2.0**-13, truncating=True),
        Accumulation("fp22-128", 13, 2.0**-13, run=128),
        Accumulation("fp64", 53, 2.0**-53, operand_bits=53),
    )
}
"""Never written to."""


def accumulation(name: str) -> Accumulation:
    """The class of a name. Raises ConfigError for one that the suite doesn't know."""
    if name not in CLASSES:
        raise ConfigError(
            f"Capabilities.accumulation names the class {name!r}; the suite knows {', '.join(CLASSES)}",
            field="accumulation",
        )
    return CLASSES[name]
