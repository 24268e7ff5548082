"""The element types of GGUF files: their ids, and how many bytes a block of elements takes.

A quantised row is a run of blocks; each holds its own scale (and minimum), then the packed numbers. What is inside a
block is known to `core/backend/blocks.py`; of the rarer types, whose codes index tables, to the format's own Python
package `gguf`, which is imported for them alone. Source: the GGUF specification of the ggml project.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.backend.block_sizes import BLOCK_SIZES


@dataclass(frozen=True, slots=True)
class GGMLType:
    """How elements are stored: `block_elements` of them in `block_bytes` bytes."""

    name: str
    block_elements: int
    block_bytes: int


def _quantised(name: str) -> GGMLType:
    size = BLOCK_SIZES[name]
    return GGMLType(name, size.elements, size.num_bytes)


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    30: GGMLType("BF16", 1, 2),
    8: _quantised("Q8_0"),
    2: _quantised("Q4_0"),
    3: _quantised("Q4_1"),
    6: _quantised("Q5_0"),
    7: _quantised("Q5_1"),
    12: _quantised("Q4_K"),
    13: _quantised("Q5_K"),
    14: _quantised("Q6_K"),
}

PACKAGE_TYPES: dict[int, GGMLType] = {
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    29: GGMLType("IQ1_M", 256, 56),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
}
"""Types that the package `gguf` dequantises."""

GGML_TYPES |= PACKAGE_TYPES

UNSUPPORTED_TYPE_NAMES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    40: "NVFP4",
    41: "Q1_0",
}
