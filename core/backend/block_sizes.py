"""How large the blocks of GGUF's quantised types are. Standard library only: a file's header is read without numpy.

`blocks.py` knows what is inside a block. Source: the GGUF specification and block definitions of the ggml project.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockSize(NamedTuple):
    """`elements` of a row in `num_bytes` bytes; every `group` of them shares a scale (and a minimum)."""

    elements: int
    num_bytes: int
    group: int


BLOCK_SIZES = {
    "Q8_0": BlockSize(32, 34, 32),
    "Q4_0": BlockSize(32, 18, 32),
    "Q4_1": BlockSize(32, 20, 32),
    "Q5_0": BlockSize(32, 22, 32),
    "Q5_1": BlockSize(32, 24, 32),
    "Q4_K": BlockSize(256, 144, 32),
    "Q5_K": BlockSize(256, 176, 32),
    "Q6_K": BlockSize(256, 210, 16),
}
"""By GGUF's names. Never written to."""
