"""Guesses are made where they have been worth their time, by measured seconds per token."""

from __future__ import annotations

from octavo.core.engine.draft_payoff import ENOUGH_STEPS, PROBE_STEPS, DraftPayoff
from octavo.core.sched.output import ModelRunnerOutput, SampledTokens, SchedulerOutput


def step_of(num_requests, drafts=0, prompt_tokens=0):
    names = [f"r{i}" for i in range(num_requests)]
    counts = dict.fromkeys(names, 1 + drafts)
    counts[names[0]] += prompt_tokens
    return SchedulerOutput(
        step_id=1, new_requests=(), running=(), num_scheduled_tokens=counts, finished_request_ids=(),
        preempted_request_ids=(), block_copies=(), total_num_scheduled_tokens=sum(counts.values()),
        drafts=dict.fromkeys(names, (1,) * drafts) if drafts else {},
    )  # fmt: skip


def saw(payoff, num_requests, *, seconds, drafts=0, accepted=0, prompt_tokens=0, times=1):
    sampled = {f"r{i}": SampledTokens((1,) * (1 + accepted)) for i in range(num_requests)}
    for _ in range(times):
        payoff.saw(step_of(num_requests, drafts, prompt_tokens), ModelRunnerOutput(sampled=sampled), seconds)


def compared(num_requests=1, *, with_drafts, without):
    """A payoff that has seen enough steps of both kinds, whose guesses gave one token more."""
    payoff = DraftPayoff()
    saw(payoff, num_requests, seconds=with_drafts, drafts=4, accepted=1, times=ENOUGH_STEPS)
    saw(payoff, num_requests, seconds=without, times=ENOUGH_STEPS)
    return payoff


def test_both_kinds_are_tried_before_they_are_compared():
    payoff = DraftPayoff()
    assert payoff.allows(1)
    saw(payoff, 1, seconds=1.0, drafts=4, times=ENOUGH_STEPS)
    assert not payoff.allows(1)
    saw(payoff, 1, seconds=1.0, times=ENOUGH_STEPS)
    assert payoff.allows(1)


def test_by_seconds_per_token_and_not_per_step():
    assert compared(with_drafts=1.9, without=1.0).allows(1)
    assert not compared(with_drafts=2.1, without=1.0).allows(1)


def test_few_requests_and_many_are_judged_apart():
    payoff = compared(16, with_drafts=9.0, without=1.0)
    assert not payoff.allows(16)
    assert not payoff.allows(31)
    assert payoff.allows(15)
    assert payoff.allows(32)


def test_the_worse_kind_is_tried_again():
    payoff = compared(with_drafts=9.0, without=1.0)
    saw(payoff, 1, seconds=1.0, times=PROBE_STEPS - ENOUGH_STEPS - 1)
    assert not payoff.allows(1)
    saw(payoff, 1, seconds=1.0)
    assert payoff.allows(1)
    saw(payoff, 1, seconds=9.0, drafts=4, accepted=1)
    assert not payoff.allows(1)


def test_a_change_for_the_better_is_noticed():
    payoff = compared(with_drafts=3.0, without=1.0)
    probes = 0
    while not payoff.allows(1) or probes < 3:
        if payoff.allows(1):
            saw(payoff, 1, seconds=1.0, drafts=4, accepted=4)
            probes += 1
            assert probes < 100
        else:
            saw(payoff, 1, seconds=1.0)
    saw(payoff, 1, seconds=1.0, drafts=4, accepted=4, times=20)
    assert payoff.allows(1)


def test_steps_that_compute_prompts_say_nothing():
    payoff = compared(2, with_drafts=1.0, without=1.0)
    saw(payoff, 2, seconds=900.0, drafts=4, prompt_tokens=100, times=50)
    saw(payoff, 2, seconds=0.001, prompt_tokens=100, times=50)
    assert payoff.allows(2)


def test_a_step_without_work_says_nothing():
    nothing = SchedulerOutput(
        step_id=1, new_requests=(), running=(), num_scheduled_tokens={}, finished_request_ids=("r",),
        preempted_request_ids=(), block_copies=(), total_num_scheduled_tokens=0,
    )  # fmt: skip
    payoff = DraftPayoff()
    payoff.saw(nothing, ModelRunnerOutput(), 1.0)
    assert payoff.allows(0)
