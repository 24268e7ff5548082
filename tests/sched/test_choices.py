"""n > 1: choices of one request share the prompt's blocks, and write to none that another reads."""

from __future__ import annotations

import pytest

from octavo.core.base.params import FinishReason
from tests.sched.build import choices_of, groups_of, harness_of


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_the_prompt_is_computed_once_and_stored_once(length):
    harness = harness_of(max_num_batched_tokens=64)
    for choice in choices_of("r", 4, length, 6):
        harness.add(choice)
    first = harness.step()
    assert first.num_scheduled_tokens == {"r#0": length}
    second = harness.step()
    # Each sibling recomputes the last prompt token alone, so as to draw its own.
    assert second.num_scheduled_tokens == {"r#0": 1, "r#1": 1, "r#2": 1, "r#3": 1}
    ends_inside = (length - 1) % 16 != 0
    assert len(second.block_copies) == (3 if ends_inside else 0)
    shared, own = (length - 1) // 16, -(-(length + 1) // 16) - (length - 1) // 16
    assert harness.blocks.num_used_blocks <= shared + 4 * own
    harness.drain()
    harness.check_replies()
    assert len({tuple(reply) for reply in harness.replies.values()}) > 1


def test_choices_share_under_windows():
    harness = harness_of(groups=groups_of((4, None), (4, 6), (2, 3)), num_blocks=200)
    for choice in choices_of("r", 3, 21, 12):
        harness.add(choice)
    harness.drain()
    harness.check_replies()
    assert harness.scheduler.stats().scheduled_tokens == 21 + 2 + 3 * 11


def test_a_choice_that_gets_a_seat_late_shares_a_block_that_holds_a_reply():
    harness = harness_of(max_num_seqs=2)
    for choice in choices_of("r", 3, 36, 10):
        harness.add(choice)
    for _ in range(5):
        harness.step()
    harness.note(harness.scheduler.abort(["r#1"]))
    scheduled = harness.step()
    assert scheduled.num_scheduled_tokens == {"r#0": 1, "r#2": 1}
    assert len(scheduled.block_copies) == 1
    harness.drain()
    harness.check_replies()


def test_a_window_that_passed_over_the_prompt_means_the_prefix_cache():
    # The first choice is far ahead when the last gets a seat: its window no longer holds the end of the prompt.
    harness = harness_of(max_num_seqs=2, groups=groups_of((4, None), (4, 4)))
    for choice in choices_of("r", 3, 10, 40):
        harness.add(choice)
    for _ in range(20):
        harness.step()
    harness.note(harness.scheduler.abort(["r#1"]))
    scheduled = harness.step()
    assert scheduled.num_scheduled_tokens == {"r#0": 1, "r#2": 2}
    assert scheduled.block_copies == ()
    assert harness.requests["r#2"].num_cached_tokens == 8
    harness.drain()
    harness.check_replies()


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_siblings_go_on_when_the_first_choice_ends_early(reason, after):
    harness = harness_of(max_num_batched_tokens=32)
    for choice in choices_of("r", 3, 50, 6):
        harness.add(choice)
    for _ in range(after):
        harness.step()
    harness.note(harness.scheduler.abort(["r#0"], reason))
    harness.drain()
    assert len(harness.replies["r#1"]) == len(harness.replies["r#2"]) == 6


def test_a_first_choice_of_one_token_leaves_its_prompt_in_the_cache():
    harness = harness_of()
    for choice in choices_of("r", 3, 40, 1):
        harness.add(choice)
    harness.drain()
    harness.check_replies()
    assert harness.scheduler.stats().scheduled_tokens == 40 + 2 * 8
    assert harness.requests["r#1"].num_cached_tokens == 32


def test_shared_prompts_are_not_prefix_hits():
    harness = harness_of()
    for choice in choices_of("r", 3, 40, 6):
        harness.add(choice)
    harness.drain()
    assert [request.num_cached_tokens for request in harness.requests.values()] == [0, 0, 0]
    assert harness.scheduler.stats().prefix_query_tokens == 40


def test_without_a_prefix_cache_choices_still_share():
    harness = harness_of(caching=False)
    for choice in choices_of("r", 4, 40, 6):
        harness.add(choice)
    harness.drain()
    harness.check_replies()
    assert harness.scheduler.stats().scheduled_tokens == 40 + 3 + 4 * 5


def test_choices_of_different_requests_are_no_siblings():
    harness = harness_of()
    for choice in [*choices_of("a", 2, 20, 6), *choices_of("b", 2, 20, 6)]:
        harness.add(choice)
    harness.drain()
    harness.check_replies()
