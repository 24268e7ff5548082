"""The element types of GGUF files: their ids, and how many bytes a block of elements takes.

A quantised row is a run of blocks; each holds its own scale (and minimum), then the packed numbers. What is inside a
block is known to `core/backend/blocks.py`. Source: the GGUF specification of the ggml project.
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

UNSUPPORTED_TYPE_NAMES: dict[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
