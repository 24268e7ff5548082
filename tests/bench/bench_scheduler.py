"""What one schedule() + update() costs, however many requests wait.

    PYTHONPATH=src python tests/bench/bench_scheduler.py            one line of JSON
    python -m pytest tests/bench/bench_scheduler.py                 the same as a pytest-benchmark

256 requests decode in a large pool while more wait: either all seats are taken, or seats are free and the pool has
no block for the first one that waits. Goal: at most 1 ms (median), and flat in the number waiting.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from octavo.core.base.params import SamplingParams
from octavo.core.sched.block_manager import BlockManager
from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.output import ModelRunnerOutput, SampledTokens
from octavo.core.sched.policy import SchedulerLimits
from octavo.core.sched.request import Request
from octavo.core.sched.scheduler import Scheduler

NUM_RUNNING = 256
PROMPT_TOKENS = 60
BLOCK_SIZE = 16
WAITING = (0, 1_000, 100_000)
LONGEST = 131_072
DRAWN = SampledTokens((7,))


def decoding(num_waiting: int, *, free_seats: bool, windowed: bool = False) -> Scheduler:
    """A scheduler with NUM_RUNNING decoding and num_waiting waiting requests."""
    groups = [KVGroupSpec(0, BLOCK_SIZE, None, 1)] + ([KVGroupSpec(1, BLOCK_SIZE, 512, 1)] if windowed else [])
    limits = SchedulerLimits(
        max_num_seqs=NUM_RUNNING * (2 if free_seats else 1),
        max_num_batched_tokens=NUM_RUNNING * PROMPT_TOKENS,
        max_model_len=LONGEST,
        admission_headroom=0.0,
    )
    blocks = BlockManager(1 + len(groups) * LONGEST // BLOCK_SIZE, groups, kv_dtype="float32")
    scheduler = Scheduler(limits, blocks)
    for i in range(NUM_RUNNING):
        scheduler.add(_request(f"r{i}", i, PROMPT_TOKENS))
    step(scheduler)
    if free_seats:  # the next in line needs more blocks than others have left, though the running can grow
        scheduler.add(_request("head", -1, LONGEST - 1024))
    for i in range(num_waiting):
        scheduler.add(_request(f"w{i}", NUM_RUNNING + i, PROMPT_TOKENS))
    return scheduler


def _request(request_id: str, salt: int, num_prompt_tokens: int) -> Request:
    prompt = [salt % 1000 + j for j in range(num_prompt_tokens)]
    return Request(request_id, prompt, SamplingParams(max_tokens=None), cache_salt=str(salt))


def step(scheduler: Scheduler) -> int:
    """One step whose result draws a token for everyone; returns the ns spent in the scheduler."""
    start = time.perf_counter_ns()
    scheduled = scheduler.schedule()
    spent = time.perf_counter_ns() - start
    result = ModelRunnerOutput(sampled=dict.fromkeys(scheduled.num_scheduled_tokens, DRAWN))
    start = time.perf_counter_ns()
    scheduler.update(scheduled, result)
    return spent + time.perf_counter_ns() - start


def median_ms(scheduler: Scheduler, steps: int) -> float:
    """Median of `steps` steps, in ms."""
    return statistics.median(step(scheduler) for _ in range(steps)) / 1e6


def measure(steps: int = 320) -> dict[str, Any]:
    """Median ms per step by number waiting, interleaved so that a noisy machine hits all alike."""
    figures: dict[str, Any] = {"num_running": NUM_RUNNING, "steps": steps, "unit": "ms"}
    cases = {
        "seats_taken": {n: decoding(n, free_seats=False) for n in WAITING},
        "seats_taken_with_window": {n: decoding(n, free_seats=False, windowed=True) for n in WAITING[:1]},
        "pool_short": {n: decoding(n, free_seats=True) for n in WAITING},
    }
    spent: dict[tuple[str, int], list[int]] = {}
    for _ in range(steps):
        for name, schedulers in cases.items():
            for num_waiting, scheduler in schedulers.items():
                spent.setdefault((name, num_waiting), []).append(step(scheduler))
    for (name, num_waiting), times in spent.items():
        figures.setdefault(name, {})[str(num_waiting)] = round(statistics.median(times) / 1e6, 4)
    for schedulers in cases.values():
        for scheduler in schedulers.values():
            assert scheduler.num_running == NUM_RUNNING
    return figures


def test_step_with_many_waiting(benchmark: Any) -> None:
    scheduler = decoding(1_000, free_seats=False)
    benchmark.pedantic(step, args=(scheduler,), rounds=320)
    assert benchmark.stats.stats.median <= 1e-3


if __name__ == "__main__":
    print(json.dumps(measure()))
