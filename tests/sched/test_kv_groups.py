"""Several KV groups over one pool: windows, block sizes that differ, early freeing."""

from __future__ import annotations

import pytest

from octavo.core.sched.kv_groups import KVGroupSpec, alignment_of
from tests.sched.build import groups_of, harness_of, request_of


def cached_after(harness, prompt, max_tokens=1):
    """Serve `prompt` twice; returns the second one's cached tokens."""
    for request_id in ("first", "second"):
        harness.add(request_of(request_id, prompt, max_tokens))
        harness.drain()
    harness.check_replies()
    return harness.ended["second"].num_cached_tokens


@pytest.mark.parametrize(
    ("window", "position", "block"), [(None, 100, 0), (1, 7, 1), (1, 8, 2), (4, 6, 0), (4, 7, 1), (5, 7, 0), (9, 3, 0)]
)
def test_first_visible_block_counts_the_query_itself(window, position, block):
    assert KVGroupSpec(0, 4, window, 1).first_visible_block(position) == block


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 17])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_peak_blocks_is_what_token_by_token_needs(window, block_size):
    group = KVGroupSpec(0, block_size, window, 1)
    for num_tokens in range(1, 60):
        held = [position // block_size + 1 - group.first_visible_block(position) for position in range(num_tokens)]
        assert max(held) <= group.peak_blocks(num_tokens) <= group.blocks_for(num_tokens)
    assert max(held) == group.peak_blocks(num_tokens)


def test_hits_are_multiples_of_all_block_sizes():
    groups = groups_of((4, None), (6, None))
    assert alignment_of(groups) == 12
    assert cached_after(harness_of(groups=groups), list(range(35))) == 24
    assert cached_after(harness_of(groups=groups), list(range(37))) == 36


def test_a_window_group_needs_only_the_end_of_the_prefix():
    groups = groups_of((4, None), (4, 6))
    harness = harness_of(groups=groups, max_num_batched_tokens=8)
    prompt = list(range(40))
    harness.add(request_of("first", prompt, 1))
    harness.drain()
    index = harness.blocks._pool.index_of(1)
    lost = [harness.requests["first"].block_hashes[4][i] for i in range(7)]  # a query at 36 sees blocks 7 and 8
    for content in lost:
        harness.blocks._pool.forget(index[content])
    harness.add(second := request_of("second", prompt, 1))
    scheduled = harness.step()
    assert second.num_cached_tokens == 36
    full, windowed = scheduled.new_requests[0].block_ids
    assert 0 not in full
    assert windowed[:7] == (0,) * 7
    assert 0 not in windowed[7:]
    harness.check_replies()


def test_a_missing_block_in_the_window_shortens_the_hit_for_all_groups():
    groups = groups_of((4, None), (4, 6))
    harness = harness_of(groups=groups)
    prompt = list(range(40))
    harness.add(request_of("first", prompt, 1))
    harness.drain()
    pool = harness.blocks._pool
    pool.forget(pool.lookup(1, harness.requests["first"].block_hashes[4][7]))
    harness.add(second := request_of("second", prompt, 1))
    harness.drain()
    assert second.num_cached_tokens == 28
    harness.check_replies()


def test_a_hit_that_one_window_shortens_is_checked_again_in_the_others():
    groups = groups_of((4, 6), (4, 9))
    harness = harness_of(groups=groups)
    prompt = list(range(40))
    harness.add(request_of("first", prompt, 1))
    harness.drain()
    pool, chain = harness.blocks._pool, harness.requests["first"].block_hashes[4]
    pool.forget(pool.lookup(1, chain[7]))  # so no more than 28 tokens, at the end of which
    pool.forget(pool.lookup(0, chain[6]))  # the other group misses a block that it did not need for 36
    harness.add(second := request_of("second", prompt, 1))
    harness.drain()
    assert second.num_cached_tokens == 24
    harness.check_replies()


@pytest.mark.parametrize("chunk", [4, 8, 9, 16, 40])
def test_window_smaller_than_the_chunk_loses_no_key(chunk):
    harness = harness_of(groups=groups_of((4, None), (4, 8)), max_num_batched_tokens=chunk, max_num_seqs=4)
    harness.add(request_of("r", 40, 12))
    harness.drain()  # the simulator checks every key that a query can see
    harness.check_replies()


def test_blocks_that_left_the_window_are_freed_at_once():
    harness = harness_of(groups=groups_of((4, 8)), max_num_batched_tokens=8)
    harness.add(request_of("r", 4, 100))
    most = 0
    while harness.scheduler.has_unfinished():
        harness.step()
        most = max(most, harness.blocks.num_used_blocks)
    assert most == KVGroupSpec(0, 4, 8, 1).peak_blocks(104) == 3


def test_a_window_lets_a_long_request_through_a_small_pool():
    # 200 tokens in a pool of 4 blocks of 4: the chunk is cut to what fits.
    harness = harness_of(num_blocks=5, groups=groups_of((4, 8)))
    harness.add(request_of("r", 150, 50))
    harness.drain()
    harness.check_replies()


def test_groups_must_be_sound():
    with pytest.raises(ValueError, match="at least 1"):
        KVGroupSpec(0, 4, 0, 1)
    with pytest.raises(ValueError, match="numbered"):
        harness_of(groups=(KVGroupSpec(1, 4, None, 1),))
