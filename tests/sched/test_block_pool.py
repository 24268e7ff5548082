"""Free list, references and index of the block pool."""

from __future__ import annotations

import pytest

from octavo.core.sched.block_pool import BlockPool


def free_ids(pool):
    return [block.block_id for block in pool.free_blocks()]


def test_block_zero_is_never_given_out():
    pool = BlockPool(5, 1)
    assert pool.num_usable == pool.num_free == 4
    assert [pool.take().block_id for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1, 1)


def test_blocks_without_content_are_reused_before_those_with():
    pool = BlockPool(5, 1)
    first, second, third = pool.take(), pool.take(), pool.take()
    pool.publish(first, 0, b"first")
    pool.publish(second, 0, b"second")
    for block in (second, third, first):
        pool.release(block)
    assert free_ids(pool) == [3, 4, 2, 1]


def test_content_is_found_until_its_block_is_reused():
    pool = BlockPool(3, 1)
    block = pool.take()
    pool.publish(block, 0, b"content")
    pool.release(block)
    assert pool.lookup(0, b"content") is block
    pool.take()
    assert pool.lookup(0, b"content") is block
    assert pool.take() is block
    assert pool.lookup(0, b"content") is None
    assert pool.num_cached == 0


def test_sharing_a_free_block_takes_it_out_of_the_middle_of_the_list():
    pool = BlockPool(5, 1)
    blocks = [pool.take() for _ in range(4)]
    for i, block in enumerate(blocks):
        pool.publish(block, 0, bytes([i]))
        pool.release(block)
    pool.share(blocks[1])
    pool.share(blocks[1])
    assert free_ids(pool) == [1, 3, 4]
    pool.release(blocks[1])
    assert free_ids(pool) == [1, 3, 4]
    pool.release(blocks[1])
    assert free_ids(pool) == [1, 3, 4, 2]


def test_groups_have_their_own_index():
    pool = BlockPool(4, 2)
    left, right = pool.take(), pool.take()
    pool.publish(left, 0, b"same")
    pool.publish(right, 1, b"same")
    assert pool.lookup(0, b"same") is left
    assert pool.lookup(1, b"same") is right
    pool.forget(left)
    assert pool.lookup(0, b"same") is None
    assert pool.lookup(1, b"same") is right


def test_content_that_is_there_already_is_not_entered_twice():
    pool = BlockPool(4, 1)
    first, second = pool.take(), pool.take()
    pool.publish(first, 0, b"same")
    pool.publish(second, 0, b"same")
    assert pool.lookup(0, b"same") is first
    pool.release(second)
    assert free_ids(pool)[0] == second.block_id
