"""Requests that want a vector: they end with their prompt, skip no rows they need, and are whole where they must be."""

from __future__ import annotations

import pytest

from octavo.core.base.params import FinishReason
from octavo.core.base.pooling import PoolingJob
from octavo.core.sched.block_manager import BlockManager
from octavo.core.sched.output import ModelRunnerOutput
from octavo.core.sched.policy import WholePromptLimit
from octavo.core.sched.scheduler import Scheduler
from tests.sched.build import groups_of, limits_of, request_of

EVERY, LAST = PoolingJob(needs_every_token=True), PoolingJob(needs_every_token=False)


def scheduler_of(*, whole: bool = False, block_size: int = 4, num_blocks: int = 100, **limits: object) -> Scheduler:
    blocks = BlockManager(num_blocks, groups_of((block_size, None)), kv_dtype="float32")
    return Scheduler(limits_of(**limits), blocks, token_limits=(WholePromptLimit(),) if whole else ())


def step(scheduler: Scheduler, **pooled: object) -> tuple[dict[str, int], list[object]]:
    """One step; what the runner made of it."""
    scheduled = scheduler.schedule()
    deltas = scheduler.update(scheduled, ModelRunnerOutput(pooled=dict(pooled)))
    return dict(scheduled.num_scheduled_tokens), list(deltas)


def test_a_request_ends_with_its_prompt_and_its_vector() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=8)
    scheduler.add(request_of("a", 12, 0, pooling=LAST))
    assert step(scheduler) == ({"a": 8}, [])
    counts, (delta,) = step(scheduler, a="vector")
    assert counts == {"a": 4}
    assert (delta.pooled, delta.finish_reason, delta.new_token_ids) == ("vector", FinishReason.STOP, ())
    assert not scheduler.has_unfinished()
    assert scheduler.stats().kv_blocks_used == 0


def test_a_missing_vector_is_the_runners_fault() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 3, 0, pooling=LAST))
    with pytest.raises(RuntimeError, match="made no vector for a"):
        step(scheduler)


def test_only_rows_that_are_not_needed_are_skipped() -> None:
    scheduler = scheduler_of()
    prompt = list(range(20))
    for job, cached in ((EVERY, 0), (LAST, 16), (EVERY, 0)):
        scheduler.add(request_of("a", prompt, 0, pooling=job))
        counts, (delta,) = step(scheduler, a="vector")
        assert counts == {"a": 20 - cached}
        assert delta.num_cached_tokens == cached


def test_who_needs_every_row_waits_for_nobody() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=32)
    prompt = list(range(20))
    scheduler.add(request_of("a", prompt, 0, pooling=LAST))
    scheduler.add(request_of("b", prompt, 0, pooling=LAST))
    scheduler.add(request_of("c", prompt, 0, pooling=EVERY))
    counts, _ = step(scheduler, a="vector")
    assert counts == {"a": 20, "c": 12}  # b waits for the blocks that a computes
    counts, _ = step(scheduler, b="vector", c="vector")
    assert counts == {"c": 8, "b": 4}


def test_whole_prompts_or_nothing_in_the_order_they_came() -> None:
    scheduler = scheduler_of(whole=True, block_size=16, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=16)
    for name, length in (("a", 10), ("b", 16), ("c", 3), ("d", 13), ("e", 1)):
        scheduler.add(request_of(name, length, 0, pooling=EVERY))
    seen = []
    while scheduler.has_unfinished():
        counts, deltas = step(scheduler, **dict.fromkeys("abcde", "vector"))
        assert [delta.request_id for delta in deltas] == list(counts)
        seen.append(counts)
    assert seen == [{"a": 10}, {"b": 16}, {"c": 3, "d": 13}, {"e": 1}]
