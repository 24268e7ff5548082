"""The KV pool as a picture: a letter for each block, or for a few neighbours.

    blocks   [1][2][3][4][5][6][7][8] …          f free        nobody holds it, nothing in it
    cells     └─ f ─┘└─ c ─┘└─ s ─┘ …            c cached      free, but a prefix hit can still use it
                                                 u in use      one request holds it
    a cell shows the busiest of its blocks       s shared      several requests hold it

Drawn only when somebody asks, in one pass over the pool; nothing is kept for it between two questions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from octavo.core.sched.block_pool import BlockPool

MAX_CELLS = 4096
LETTERS = b"fcus"
"""By level: the busier, the higher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """The pool at one moment; total = free + cached + used.

    Attributes:
        block_size: tokens of a block.
        total, used, cached: blocks that can hold KV; those that requests hold; free ones whose content can be hit.
        blocks_per_cell: blocks behind each letter; the last cell may have fewer.
        cells: letters of LETTERS, at most MAX_CELLS, in the order of block ids.
    """

    block_size: int
    total: int
    used: int
    cached: int
    blocks_per_cell: int
    cells: str


def draw(pool: BlockPool, block_size: int, max_cells: int = MAX_CELLS) -> BlockMap:
    """The picture of a pool, in time proportional to its blocks."""
    levels = bytes(
        min(block.ref_count, 2) + 1 if block.ref_count else block.content_hash is not None for block in pool.blocks[1:]
    )
    counts = Counter(levels)
    per_cell = -(-len(levels) // max_cells)
    cells = bytes(LETTERS[max(levels[start : start + per_cell])] for start in range(0, len(levels), per_cell))
    return BlockMap(
        block_size=block_size,
        total=len(levels),
        used=counts[2] + counts[3],
        cached=counts[1],
        blocks_per_cell=per_cell,
        cells=cells.decode(),
    )
