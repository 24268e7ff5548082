"""Counters as values. An owner keeps plain integers and hands out frozen snapshots; nothing here is global.

SchedulerCounters   grows with every step; owned and written by one Scheduler
SchedulerStats      a frozen snapshot of it with the gauges of the moment, for logs and exporters
Histogram           how often a quantity fell below each of a few bounds, and its sum
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from octavo.core.base.params import FinishReason


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the scheduler was made.

    Attributes:
        steps: schedule() calls that gave work.
        scheduled_tokens: tokens computed, recomputed ones included.
        drafted_tokens, accepted_tokens: of them, guesses, and guesses that held.
        generated_tokens: tokens given to requests, each once.
        preemptions: times a running request lost its blocks.
        prefix_query_tokens, prefix_hit_tokens: prompt tokens at first starts, and those found in the cache.
        finished: reason -> requests that ended so.
    """

    steps: int = 0
    scheduled_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def count_step(self, num_tokens: int, num_drafts: int) -> None:
        """A step computes so many tokens, and so many of them are guesses."""
        self.steps += num_tokens > 0
        self.scheduled_tokens += num_tokens
        self.drafted_tokens += num_drafts

    def stats(self, **gauges: int) -> SchedulerStats:
        """A snapshot of the totals, with these gauges."""
        return SchedulerStats(
            **gauges,
            steps=self.steps,
            scheduled_tokens=self.scheduled_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            finished=dict(self.finished),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler at one moment.

    Attributes:
        num_running, num_waiting: requests; gated ones count as waiting.
        num_gated: waiting requests that a gate holds back.
        kv_blocks_total, kv_blocks_used: blocks that can hold KV, and those that live requests hold.
        kv_blocks_cached: free blocks whose content a prefix hit can still use.
        others: as in SchedulerCounters.
    """

    num_running: int
    num_waiting: int
    num_gated: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int
    steps: int
    scheduled_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    generated_tokens: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    finished: Mapping[FinishReason, int]

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that live requests hold, in [0, 1]."""
        return self.kv_blocks_used / self.kv_blocks_total


class Histogram:
    """Counts of a quantity in ranges. It keeps no observation, so it is as small after a year as at the start.

    Args:
        bounds: upper ends of the ranges, rising; the last range has none.

    Attributes:
        counts: observations in each range alone, one more than bounds.
        total: their sum.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation; a bound belongs to the range that it ends."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self.counts)
