"""KV groups as the scheduler sees them: sizes and windows in tokens and blocks, no bytes and no tensors.

    group 0 (full)     [b][b][b][b][b][b]        every block of the sequence stays
    group 1 (window)   [0][0][0][b][b][b]        blocks that no later query can see become the null block, id 0

Layers that share a KVCacheSpec form groups; each has its own block table and all draw from one pool, whose blocks
all have the same number of bytes. A prefix hit must hold in every group, so its length is a multiple of the least
common multiple of the block sizes. Only the block manager and the engine (which makes the specs) use this file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NULL_BLOCK_ID = 0
"""Names no content: never allocated, valid as padding, may hold anything."""


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """One group of layers with one block table.

    Attributes:
        group_id: its index in every per-group tuple.
        block_size: tokens of a block.
        window: a query sees itself and window - 1 tokens before it; None sees all.
        num_layers: layers in the group.
    """

    group_id: int
    block_size: int
    window: int | None
    num_layers: int

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_layers < 1 or (self.window is not None and self.window < 1):
            raise ValueError(f"block_size, num_layers and window must be at least 1: {self}")

    def first_visible_block(self, position: int) -> int:
        """Index of the first block that a query at `position`, or any later one, can see."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens fill, from the first token on."""
        return -(-num_tokens // self.block_size)

    def peak_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of num_tokens holds at once when it is computed token by token."""
        whole = self.blocks_for(num_tokens)
        if self.window is None:
            return whole
        return min(whole, (self.window + self.block_size - 2) // self.block_size + 1)


def alignment_of(groups: Sequence[KVGroupSpec]) -> int:
    """The unit of prefix hits, in tokens: the least common multiple of the block sizes."""
    return math.lcm(*(group.block_size for group in groups))


def peak_blocks(groups: Sequence[KVGroupSpec], num_tokens: int) -> int:
    """The fewest blocks that a pool must have so that num_tokens tokens of one request alone can be computed."""
    return sum(group.peak_blocks(num_tokens) for group in groups)
