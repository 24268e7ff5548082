"""Whoever follows the KV events knows what is cached: random histories with preemption, eviction, failures, resets."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from octavo.core.engine.kv_events.events import EventBatch, EventRecorder
from tests.engine.kv_event_reader import Index, parse_payload
from tests.sched.test_state_machine import NIGHTLY, SchedulerMachine

SEEN: Counter[str] = Counter()
"""What happened over all histories, so that a test can see that everything did."""


class EventMachine(SchedulerMachine):
    """The scheduler's machine with a reader at the other end of the wire."""

    def observer(self, groups):
        self.groups = groups
        self.index = Index()
        self.recorder = EventRecorder(lambda adapter_id: f"name of {adapter_id}")
        return self.recorder

    @invariant()
    def reader_knows_the_cache(self):
        if not hasattr(self, "harness"):
            return
        payload = msgspec.msgpack.encode(EventBatch(1.0, self.recorder.take(), 0))
        for event in parse_payload(payload):
            SEEN[type(event).__name__] += 1
            self.index.apply(event)
        pool = self.harness.blocks._pool
        cached = {(group.group_id, content) for group in self.groups for content in pool.index_of(group.group_id)}
        assert self.index.cached == cached
        SEEN["preemption"] += self.harness.scheduler.stats().preemptions > 0
        SEEN["groups"] += len(self.groups) > 1 and bool(cached)


EventMachine.TestCase.settings = settings(
    max_examples=3000 if NIGHTLY else 150,
    stateful_step_count=40,
    derandomize=not NIGHTLY,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRandomHistories = pytest.mark.timeout(3600 if NIGHTLY else 120)(EventMachine.TestCase)


def test_the_histories_had_everything_in_them() -> None:
    if not SEEN:
        pytest.skip("runs after TestRandomHistories only")
    assert min(SEEN[name] for name in ("Stored", "Removed", "Cleared", "preemption", "groups")) > 50, SEEN
