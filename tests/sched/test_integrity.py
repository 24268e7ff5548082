"""check_integrity() notices damage of every kind; otherwise the random histories would prove little."""

from __future__ import annotations

import pytest

from octavo.core.sched.integrity import IntegrityError
from tests.sched.build import choices_of, groups_of, harness_of, request_of


@pytest.fixture
def harness():
    """One request mid-way, two choices that share blocks, and one that ended."""
    harness = harness_of(groups=groups_of((4, None), (4, 6)), num_blocks=100)
    harness.add(request_of("ended", 9, 2))
    harness.drain()
    harness.add(request_of("r", 13, 20))
    for choice in choices_of("n", 2, 9, 20):
        harness.add(choice)
    harness.step()
    harness.step()
    harness.blocks.check_integrity()
    return harness


def held(harness, request_id="r"):
    return harness.blocks._held[request_id]


def lose_a_reference(harness):
    held(harness).tables[0][0].ref_count -= 1


def free_a_block_in_use(harness):
    harness.blocks._pool._free.append(held(harness).tables[0][0])


def leak_a_block(harness):
    harness.blocks._pool.take()


def drop_too_early(harness):
    table = held(harness).tables[1]
    harness.blocks._pool.release(table[-1])
    table[-1] = harness.blocks._pool.null_block


def keep_what_left_the_window(harness):
    held(harness).tables[1][0] = harness.blocks._pool.take()


def share_what_will_be_written(harness):
    table, other = held(harness, "n#0").tables[0], held(harness, "n#1").tables[0]
    harness.blocks._pool.release(other[-1])
    other[-1] = table[-1]
    table[-1].ref_count += 1


def publish_under_a_wrong_name(harness):
    pool, block = harness.blocks._pool, held(harness).tables[0][0]
    pool.forget(block)
    pool.publish(block, 0, b"wrong")


def publish_what_is_not_full(harness):
    harness.blocks._pool.publish(held(harness).tables[0][-1], 0, b"early")


def lose_an_index_entry(harness):
    index = harness.blocks._pool.index_of(0)
    del index[next(iter(index))]


def compute_beyond_the_end(harness):
    harness.requests["r"].num_computed_tokens = 99


def claim_more_cached_than_computed(harness):
    harness.requests["r"].num_cached_tokens = 99


def leave_a_claim_behind(harness):
    harness.blocks._computing[b"hash"] = harness.requests["ended"]


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_reference,
        free_a_block_in_use,
        leak_a_block,
        drop_too_early,
        keep_what_left_the_window,
        share_what_will_be_written,
        publish_under_a_wrong_name,
        publish_what_is_not_full,
        lose_an_index_entry,
        compute_beyond_the_end,
        claim_more_cached_than_computed,
        leave_a_claim_behind,
    ],
)
def test_damage_is_noticed(harness, damage):
    damage(harness)
    with pytest.raises(IntegrityError):
        harness.blocks.check_integrity()
