"""Speculative decoding in the scheduler: who gets guesses, what becomes of them, what they never cost others."""

from __future__ import annotations

import pytest

from octavo.core.base.params import FinishReason
from octavo.core.sched.drafting import LONGEST_REST, Drafting
from octavo.core.sched.kv_groups import KVGroupSpec
from tests.sched.build import limits_of, request_of
from tests.sched.simulator import Guesser, Harness

ALWAYS, NEVER = 10**9, 1
"""One guess in so many is wrong."""


def harness_of(wrong_one_in=ALWAYS, *, num_blocks=65, max_tokens=4, max_rows=32, pays=lambda _: True, **limits):
    drafting = Drafting(Guesser(wrong_one_in), max_tokens=max_tokens, max_rows=max_rows, pays=pays)
    return Harness((KVGroupSpec(0, 4, None, 1),), num_blocks, limits_of(**limits), drafting=drafting)


def steps_of(harness):
    count = harness.drain()
    harness.check_replies()
    return count


def test_guesses_that_hold_save_steps():
    harness = harness_of()
    harness.add(request_of("r", [1, 2, 3], 41))
    assert steps_of(harness) == 1 + 8  # the prompt gives one token, and each step behind it five
    stats = harness.scheduler.stats()
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.generated_tokens) == (32, 32, 41)


def test_wrong_guesses_change_nothing_and_become_rare():
    harness = harness_of(NEVER)
    harness.add(request_of("r", [1, 2, 3], 200))
    assert steps_of(harness) == 200
    stats = harness.scheduler.stats()
    assert stats.accepted_tokens == 0
    assert stats.generated_tokens == 200
    rests = [min(LONGEST_REST, 2**i) for i in range(20)]
    tries = next(i for i in range(20) if sum(rests[:i]) + i >= 199)
    assert 0 < stats.drafted_tokens <= tries * 4


def test_a_reply_is_never_guessed_beyond_its_end():
    for max_tokens in range(1, 12):
        harness = harness_of()
        harness.add(request_of("r", [1, 2, 3], max_tokens))
        while harness.scheduler.has_unfinished():
            scheduled = harness.step()
            request = harness.requests["r"]
            assert scheduled.total_num_scheduled_tokens <= request.num_prompt_tokens + max_tokens - 1
        harness.check_replies()
        assert harness.ended["r"].finish_reason is FinishReason.LENGTH


def test_a_stop_token_among_the_guesses_ends_the_reply_there():
    harness = harness_of(max_tokens=16)
    request = harness.add(request_of("r", [1, 2, 3], 100, sampling={"stop_token_ids": (2,)}))
    steps_of(harness)
    assert harness.ended["r"].stop_reason == 2
    assert request.output_token_ids[-1] == 2
    assert harness.blocks.num_used_blocks == 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (1, 2, 3)},
        {"bad_words_token_ids": ((1, 2),)},
        {"logits_processors": (lambda prompt, outputs, logits: logits,)},
        {"min_tokens": 10},
    ],
)
def test_draws_that_depend_on_the_tokens_before_them_are_not_guessed(sampling):
    harness = harness_of()
    harness.add(request_of("r", [1, 2, 3], 10, sampling=sampling))
    assert steps_of(harness) == 10
    assert harness.scheduler.stats().drafted_tokens == 0


def test_min_tokens_that_are_reached_hold_nobody_back():
    harness = harness_of()
    harness.add(request_of("r", [1, 2, 3], 20, sampling={"min_tokens": 5}))
    assert steps_of(harness) < 12


def test_guesses_take_what_is_left_of_the_budget():
    harness = harness_of(max_num_batched_tokens=8, max_num_seqs=8)
    harness.add(request_of("decoding", [1], 60))
    harness.step()
    harness.add(request_of("prompt", list(range(1, 29)), 2))
    while harness.runner.rows.get("prompt") is None or harness.requests["prompt"].num_computed_tokens < 28:
        scheduled = harness.step()
        assert scheduled.num_scheduled_tokens["prompt"] >= min(7, 28)
        if harness.requests["prompt"].num_computed_tokens < 28:
            assert scheduled.drafts == {}
    steps_of(harness)


def test_rows_are_bounded():
    harness = harness_of(max_rows=6, max_num_seqs=5)
    for i in range(5):
        harness.add(request_of(f"r{i}", [1, 2, i + 1], 30))
    while harness.scheduler.has_unfinished():
        scheduled = harness.step()
        drafts = sum(map(len, scheduled.drafts.values()))
        assert len(scheduled.num_scheduled_tokens) + drafts <= 6
    harness.check_replies()


def test_nobody_is_put_out_for_guesses():
    """Two requests that fill the pool together to the last block: without guesses nobody is preempted."""
    harness = harness_of(num_blocks=1 + 2 * 4, max_tokens=8)
    for name in ("a", "b"):
        harness.add(request_of(name, [1, 2, 3], 14))
    steps_of(harness)
    assert harness.scheduler.stats().preemptions == 0
    assert harness.scheduler.stats().accepted_tokens > 0


def test_no_guesses_where_they_do_not_pay():
    harness = harness_of(pays=lambda num_requests: num_requests < 2)
    for name in ("a", "b"):
        harness.add(request_of(name, [1, 2, 3], 20 if name == "a" else 10))
    while "b" not in harness.ended:
        assert harness.step().drafts == {}
    assert harness.step().drafts.keys() == {"a"}
    steps_of(harness)


def test_a_preempted_request_is_guessed_again():
    harness = harness_of(num_blocks=1 + 8, max_num_seqs=2)
    for name in ("a", "b"):
        harness.add(request_of(name, [1, 2, 3], 26))
    steps_of(harness)
    stats = harness.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 0
