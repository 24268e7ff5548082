"""A step's work does not grow with what waits or with what was computed before.

Counted in function calls, which a busy machine does not change; tests/bench/bench_scheduler.py has the milliseconds.
"""

from __future__ import annotations

import gc
import sys

import pytest

from octavo.core.sched.output import ModelRunnerOutput, SampledTokens
from tests.sched.build import harness_of, request_of


def calls_of_a_step(scheduler):
    """Python and C function calls of one schedule() + update()."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # its callbacks are calls too
    sys.setprofile(note)
    try:
        scheduled = scheduler.schedule()
        sampled = dict.fromkeys(scheduled.num_scheduled_tokens, SampledTokens((7,)))
        scheduler.update(scheduled, ModelRunnerOutput(sampled=sampled))
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def decoding(num_waiting, **limits):
    harness = harness_of(num_blocks=20_000, max_model_len=100_000, max_num_batched_tokens=2048, **limits)
    for i in range(64):
        harness.scheduler.add(request_of(f"r{i}", 17, 1000))
    calls_of_a_step(harness.scheduler)
    for i in range(num_waiting):
        harness.scheduler.add(request_of(f"w{i}", 17, 1000))
    return harness.scheduler


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_flat_in_the_number_of_waiting_requests(policy):
    few, many = (decoding(count, max_num_seqs=64, policy=policy) for count in (1, 5000))
    few_calls, many_calls = ([calls_of_a_step(scheduler) for _ in range(20)] for scheduler in (few, many))
    assert few_calls == many_calls


def test_flat_in_the_length_of_running_requests():
    scheduler = decoding(0, max_num_seqs=64)
    early = sum(calls_of_a_step(scheduler) for _ in range(16))
    for _ in range(480):
        calls_of_a_step(scheduler)
    late = sum(calls_of_a_step(scheduler) for _ in range(16))
    assert late == pytest.approx(early, rel=0.01)
