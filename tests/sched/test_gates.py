"""Waiting requests that are held back, and those behind them."""

from __future__ import annotations

from octavo.core.sched.block_manager import BlockManager
from octavo.core.sched.policy import Reason
from octavo.core.sched.queue import WaitingQueue
from octavo.core.sched.scheduler import Scheduler
from tests.sched.build import groups_of, harness_of, limits_of, request_of
from tests.sched.simulator import KVSimulator


class Hold:
    """Holds back the named requests; counts how often it is asked."""

    def __init__(self, *request_ids):
        self.held = set(request_ids)
        self.asked = 0

    def may_start(self, request):
        self.asked += 1
        return Reason("held by the test") if request.request_id in self.held else None


def scheduler_with(gate, **limits):
    groups = groups_of((16, None))
    scheduler = Scheduler(limits_of(**limits), BlockManager(400, groups, kv_dtype="float32"), gates=(gate,))
    runner = KVSimulator(groups)

    def step():
        scheduled = scheduler.schedule()
        scheduler.update(scheduled, runner.run(scheduled))
        return scheduled

    return scheduler, step


def test_a_held_request_blocks_nobody_and_starts_when_it_may():
    gate = Hold("held")
    scheduler, step = scheduler_with(gate)
    for name in ("held", "a", "b"):
        scheduler.add(request_of(name, 4, 8))
    assert list(step().num_scheduled_tokens) == ["a", "b"]
    assert scheduler.stats().num_gated == scheduler.num_waiting == 1
    gate.held.clear()
    assert list(step().num_scheduled_tokens) == ["held", "a", "b"]


def test_a_held_request_can_be_aborted():
    gate = Hold("held")
    scheduler, step = scheduler_with(gate)
    scheduler.add(request_of("held"))
    step()
    assert [delta.request_id for delta in scheduler.abort(["held"])] == ["held"]
    assert not scheduler.has_unfinished()


def test_thousands_of_held_requests_cost_a_bounded_number_of_questions():
    gate = Hold(*(f"held {i}" for i in range(3000)))
    scheduler, step = scheduler_with(gate)
    for i in range(3000):
        scheduler.add(request_of(f"held {i}", 4))
    scheduler.add(request_of("free", 4))
    steps = 0
    while "free" not in step().num_scheduled_tokens:
        steps += 1
        assert gate.asked <= 64 * steps
    assert steps <= 3000 / 32
    gate.held = {"held 0"}
    for _ in range(100):
        step()
    assert scheduler.num_running + scheduler.num_waiting < 3000


def test_a_burst_with_one_prefix_computes_it_once():
    harness = harness_of(num_blocks=200, max_num_batched_tokens=64)
    prefix = list(range(100, 180))
    for i in range(6):
        harness.add(request_of(f"r{i}", [*prefix, 10 + i, 20 + i], 4))
    assert harness.step().num_scheduled_tokens == {"r0": 64}
    # Its 4 blocks are there now, but the fifth is still being computed.
    assert harness.step().num_scheduled_tokens == {"r0": 18}
    assert harness.step().num_scheduled_tokens == {f"r{i}": 1 if i == 0 else 2 for i in range(6)}
    harness.drain()
    harness.check_replies()
    assert [harness.ended[f"r{i}"].num_cached_tokens for i in range(6)] == [0] + [80] * 5


def test_a_burst_shares_nothing_across_salts_and_waits_for_nobody():
    harness = harness_of(num_blocks=200, max_num_batched_tokens=256)
    for i in range(3):
        harness.add(request_of(f"r{i}", list(range(40)), 4, cache_salt=str(i)))
    assert len(harness.step().num_scheduled_tokens) == 3


def test_waiting_for_a_prefix_ends_with_the_one_that_computes_it():
    harness = harness_of(num_blocks=200, max_num_batched_tokens=16, max_num_seqs=4)
    for i in range(3):
        harness.add(request_of(f"r{i}", list(range(100)), 4))
    harness.step()
    harness.note(harness.scheduler.abort(["r0"]))
    harness.drain()
    harness.check_replies()


def test_a_short_prompt_waits_only_for_blocks_it_could_use():
    harness = harness_of(max_num_batched_tokens=64)
    harness.add(request_of("long", list(range(60)), 4))
    harness.add(request_of("short", list(range(16)), 4))  # its only full block must be computed anyway
    assert harness.step().num_scheduled_tokens == {"long": 60, "short": 4}


# ----------------------------------------------------------------------------------------------- queue


def with_order(name, order):
    request = request_of(name)
    request.order = (0.0, order)
    return request


def test_the_queue_keeps_order_through_removal_and_return():
    queue = WaitingQueue()
    requests = [with_order(f"r{i}", i) for i in range(6)]
    for request in reversed(requests):
        queue.push(request)
    queue.remove(requests[0])
    queue.remove(requests[3])
    queue.set_aside(queue.peek())
    assert queue.peek() is requests[2]
    assert (len(queue), queue.num_gated) == (4, 1)
    queue.recall(10)
    queue.push(requests[0])
    order = []
    while (request := queue.peek()) is not None:
        order.append(request.request_id)
        queue.remove(request)
    assert order == ["r0", "r1", "r2", "r4", "r5"]
    assert len(queue) == 0


def test_recall_takes_turns():
    queue = WaitingQueue()
    requests = [with_order(f"r{i}", i) for i in range(4)]
    for request in requests:
        queue.push(request)
        queue.set_aside(request)
    assert queue.recall(2) == requests[:2]
    for request in requests[:2]:
        queue.set_aside(request)
    assert queue.recall(2) == requests[2:]


def test_mass_removal_leaves_nothing_behind():
    queue = WaitingQueue()
    requests = [with_order(f"r{i}", i) for i in range(1000)]
    for request in requests:
        queue.push(request)
    for request in requests[1:]:
        queue.remove(request)
    assert queue.peek() is requests[0]
    assert len(queue._heap) < 100
