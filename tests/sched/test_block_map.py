"""The picture of the KV pool."""

from __future__ import annotations

import pytest

from octavo.core.sched.block_map import draw
from octavo.core.sched.block_pool import BlockPool


def pool_with(states: str) -> BlockPool:
    """A pool whose blocks 1, 2, … are in these states."""
    pool = BlockPool(len(states) + 1, num_groups=1)
    taken = [pool.take() for _ in states]
    for i, (block, state) in enumerate(zip(taken, states, strict=True)):
        if state == "c":
            pool.publish(block, 0, b"%d" % i)
        if state in "fc":
            pool.release(block)
        if state == "s":
            pool.share(block)
    return pool


def test_a_letter_tells_what_its_block_is() -> None:
    made = draw(pool_with("fcusuufc"), block_size=16)
    assert made.cells == "fcusuufc"
    assert (made.total, made.used, made.cached) == (8, 4, 2)
    assert (made.block_size, made.blocks_per_cell) == (16, 1)


def test_the_null_block_is_not_drawn() -> None:
    assert draw(BlockPool(4, num_groups=2), block_size=1).cells == "fff"


def test_a_used_block_with_content_is_in_use() -> None:
    pool = BlockPool(2, num_groups=1)
    pool.publish(pool.take(), 0, b"x")
    assert draw(pool, block_size=1).cells == "u"


@pytest.mark.parametrize(("states", "cells"), [("ff", "f"), ("fc", "c"), ("cu", "u"), ("us", "s"), ("sf", "s")])
def test_a_cell_of_several_blocks_shows_the_busiest(states: str, cells: str) -> None:
    made = draw(pool_with(states), block_size=16, max_cells=1)
    assert (made.cells, made.blocks_per_cell) == (cells, 2)


@pytest.mark.parametrize(("num_blocks", "max_cells", "per_cell", "cells"), [(9, 4, 3, 3), (8, 4, 2, 4), (4, 4, 1, 4)])
def test_no_more_cells_than_allowed_and_no_block_left_out(
    num_blocks: int, max_cells: int, per_cell: int, cells: int
) -> None:
    made = draw(pool_with("f" * (num_blocks - 1) + "u"), block_size=16, max_cells=max_cells)
    assert (made.blocks_per_cell, len(made.cells)) == (per_cell, cells)
    assert made.cells[-1] == "u"
