"""Requests that outgrow the pool together, and priorities."""

from __future__ import annotations

import pytest

from tests.sched.build import choices_of, groups_of, harness_of, request_of


def fill(harness):
    """Six growing requests, some with several choices, prompts of 3 tokens that grow past a block."""
    for i in range(3):
        harness.add(request_of(f"r{i}", 3, 30))
    for choice in choices_of("n", 3, 3, 30):
        harness.add(choice)


@pytest.mark.parametrize("groups", [((4, None),), ((4, None), (4, 6))])
def test_growing_requests_in_a_small_pool_are_answered_as_in_a_large_one(groups):
    small = harness_of(num_blocks=24, groups=groups_of(*groups))
    large = harness_of(num_blocks=500, groups=groups_of(*groups))
    for harness in (small, large):
        fill(harness)
        harness.drain()
        harness.check_replies()
    assert small.scheduler.stats().preemptions > 0
    assert large.scheduler.stats().preemptions == 0
    assert small.replies == large.replies
    assert small.scheduler.stats().generated_tokens == large.scheduler.stats().generated_tokens == 180


def test_tokens_computed_again_are_not_prefix_hits():
    harness = harness_of(num_blocks=24, groups=groups_of((4, None)))
    fill(harness)
    harness.drain()
    again = [request for request in harness.requests.values() if request.num_preemptions]
    assert again
    assert all(request.num_cached_tokens == 0 for request in again)
    assert harness.scheduler.stats().prefix_hit_tokens == 0


def test_a_preempted_request_comes_back_whole():
    harness = harness_of(num_blocks=9, max_num_seqs=2)
    harness.add(request_of("first", 60, 60))
    harness.add(request_of("second", 4, 60))
    scheduled = harness.step()
    while not scheduled.preempted_request_ids:
        scheduled = harness.step()
    assert scheduled.preempted_request_ids == ("second",)
    assert harness.requests["second"].num_computed_tokens == 0
    so_far = tuple(harness.requests["second"].token_ids)
    while not scheduled.new_requests:
        scheduled = harness.step()
    (resumed,) = scheduled.new_requests
    assert resumed.resumed
    assert (resumed.token_ids, resumed.num_prompt_tokens) == (so_far, 4)
    harness.drain()
    harness.check_replies()


def test_nobody_starts_on_the_blocks_that_a_preempted_request_gave_up():
    harness = harness_of(num_blocks=9, max_num_seqs=3)
    harness.add(request_of("first", 60, 30))
    harness.add(request_of("second", 60, 30))
    harness.step()
    harness.step()
    harness.add(request_of("third", 4, 4))  # its one block comes free with those of the second
    scheduled = harness.step()
    while not scheduled.preempted_request_ids:
        scheduled = harness.step()
    assert scheduled.preempted_request_ids == ("second",)
    assert list(scheduled.num_scheduled_tokens) == ["first"]
    while not scheduled.new_requests:
        scheduled = harness.step()
    assert scheduled.new_requests[0].request_id == "second"
    harness.drain()
    harness.check_replies()


def test_the_runner_hears_of_the_end_of_a_preempted_request():
    harness = harness_of(num_blocks=9, max_num_seqs=2)
    harness.add(request_of("first", 60, 60))
    harness.add(request_of("second", 4, 60))
    while not harness.step().preempted_request_ids:
        pass
    harness.note(harness.scheduler.abort(["second"]))
    assert harness.step().finished_request_ids == ("second",)
    harness.drain()


def test_the_cache_often_still_has_what_a_preempted_request_computed():
    harness = harness_of(num_blocks=9, max_num_seqs=2)
    harness.add(request_of("first", 30, 40))
    harness.add(request_of("second", 40, 40))
    harness.drain()
    resumed = harness.requests["second"]
    assert resumed.num_preemptions == 1
    assert harness.scheduler.stats().scheduled_tokens < 69 + 79 + 40
    harness.check_replies()


def test_first_come_is_never_preempted():
    harness = harness_of(num_blocks=24, groups=groups_of((4, None)))
    fill(harness)
    harness.drain()
    assert harness.requests["r0"].num_preemptions == 0
    assert next(iter(harness.ended)) == "r0"


def test_prompt_logprobs_come_once_whenever_it_was_preempted():
    harness = harness_of(num_blocks=9, max_num_seqs=3, max_num_batched_tokens=16)
    harness.add(request_of("first", 30, 60))
    for name in ("a", "b"):
        harness.add(request_of(name, 60, 20, sampling={"prompt_logprobs": 1}))
    resumed = []
    while harness.scheduler.has_unfinished():
        # The harness refuses a second delivery, the simulator a skipped position.
        delivered = harness.prompt_logprobs.keys() | {"first"}
        for new in harness.step().new_requests:
            assert new.needs_prompt_logprobs == (new.request_id not in delivered)
            resumed += [new.needs_prompt_logprobs] if new.resumed else []
    assert False in resumed
    assert harness.prompt_logprobs == {"a": 60, "b": 60}
    assert harness.scheduler.stats().preemptions > 0
    harness.check_replies()


# ---------------------------------------------------------------------------------------- priorities


def test_lower_values_start_first_and_equals_in_order_of_arrival():
    harness = harness_of(policy="priority", max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
        harness.add(request_of(name, 4, 2, priority=priority))
    harness.drain()
    assert list(harness.ended) == ["c", "b", "d", "a"]


def test_fcfs_does_not_look_at_priorities():
    harness = harness_of(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", -1)):
        harness.add(request_of(name, 4, 2, priority=priority))
    harness.drain()
    assert list(harness.ended) == ["a", "b"]


@pytest.mark.parametrize("short_of", ["seats", "blocks"])
def test_an_urgent_request_takes_the_place_of_a_less_urgent_one(short_of):
    seats, num_blocks = (2, 65) if short_of == "seats" else (8, 9)
    harness = harness_of(policy="priority", max_num_seqs=seats, num_blocks=num_blocks)
    harness.add(request_of("low", 50, 14, priority=2))
    harness.add(request_of("middle", 50, 14, priority=1))
    harness.step()
    harness.step()
    harness.add(request_of("urgent", 50, 14, priority=0))
    scheduled = harness.step()
    assert scheduled.preempted_request_ids == ("low",)
    assert next(iter(scheduled.num_scheduled_tokens)) == "urgent"
    harness.drain()
    harness.check_replies()
    assert harness.requests["middle"].num_preemptions == 0


def test_equals_do_not_take_each_others_place():
    harness = harness_of(policy="priority", max_num_seqs=1)
    harness.add(request_of("a", 4, 20, priority=1, arrival_time=5.0))
    harness.step()
    harness.add(request_of("b", 4, 20, priority=1, arrival_time=1.0))
    harness.drain()
    assert harness.scheduler.stats().preemptions == 0


def test_an_urgent_prompt_gets_the_budget_before_a_less_urgent_one():
    harness = harness_of(policy="priority", max_num_batched_tokens=16)
    harness.add(request_of("low", 200, 1, priority=1))
    harness.step()
    harness.add(request_of("urgent", 40, 1, priority=0))
    assert harness.step().num_scheduled_tokens == {"urgent": 15, "low": 1}
    assert harness.step().num_scheduled_tokens == {"urgent": 15, "low": 1}
    assert harness.step().num_scheduled_tokens == {"urgent": 10, "low": 6}


def test_ageing_lets_the_least_urgent_through_a_flood():
    # One urgent request a second for ever; a level outweighs 10 s.
    harness = harness_of(policy="priority", max_num_seqs=1, priority_ageing_s=10.0)
    harness.add(request_of("low", 4, 2, priority=1, arrival_time=0.0))
    for second in range(40):
        harness.add(request_of(f"urgent {second}", 4, 2, priority=0, arrival_time=float(second)))
        harness.step()
    assert "low" in harness.ended
    strict = harness_of(policy="priority", max_num_seqs=1, priority_ageing_s=None)
    strict.add(request_of("low", 4, 2, priority=1, arrival_time=0.0))
    for second in range(40):
        strict.add(request_of(f"urgent {second}", 4, 2, priority=0, arrival_time=float(second)))
        strict.step()
    assert "low" not in strict.ended
