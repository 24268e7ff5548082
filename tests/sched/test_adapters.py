"""How many adapters run at once, and that each one's turn comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.base.errors import ConfigError
from tests.sched.build import harness_of, limits_of, request_of


def adapters_of(harness, scheduled):
    return {harness.requests[request_id].adapter_id for request_id in scheduled.num_scheduled_tokens} - {None}


def test_as_many_adapters_run_as_there_are_slots_and_the_base_model_beside_them():
    harness = harness_of(num_blocks=200, max_adapters=2)
    for i, adapter in enumerate(("a", "b", "c", None, "a")):
        harness.add(request_of(f"r{i}", 4, 6, adapter_id=adapter))
    assert list(harness.step().num_scheduled_tokens) == ["r0", "r1", "r3", "r4"]
    assert harness.scheduler.stats().num_gated == 1
    harness.drain()
    harness.check_replies()
    assert len(harness.ended) == 5


def test_without_a_limit_all_run():
    harness = harness_of(num_blocks=200)
    for i in range(6):
        harness.add(request_of(f"r{i}", 4, adapter_id=f"a{i}"))
    assert len(harness.step().num_scheduled_tokens) == 6


def test_an_adapter_in_constant_demand_lets_another_in_after_its_turn():
    harness = harness_of(num_blocks=400, max_adapters=1, max_num_seqs=2)
    harness.add(request_of("first", 4, 8, adapter_id="a"))
    harness.add(request_of("other", 4, 8, adapter_id="b"))
    for i in range(40):  # one more of "a" each step: without turns "b" would wait for all of them
        harness.add(request_of(f"a{i}", 4, 8, adapter_id="a"))
        if "other" in harness.step().num_scheduled_tokens:
            break
    else:
        pytest.fail("the other adapter never ran")
    assert i < 20
    harness.drain()
    harness.check_replies()


def test_a_turn_goes_round_all_adapters():
    harness = harness_of(num_blocks=400, max_adapters=1, max_num_seqs=2)
    for i in range(30):
        harness.add(request_of(f"r{i}", 4, 3, adapter_id="abc"[i % 3]))
    seen = []
    while harness.scheduler.has_unfinished():
        (adapter,) = adapters_of(harness, harness.step()) or {seen[-1]}
        if not seen or seen[-1] != adapter:
            seen.append(adapter)
    assert "".join(seen) == ("abc" * 5)[: len(seen)]
    assert len(seen) == 15  # ten requests each, two to a turn
    harness.check_replies()


def test_a_waiting_request_that_is_aborted_gives_up_its_turn():
    harness = harness_of(num_blocks=400, max_adapters=1, max_num_seqs=2)
    harness.add(request_of("a", 4, 8, adapter_id="a"))
    harness.add(request_of("b", 4, 8, adapter_id="b"))
    harness.add(request_of("c", 4, 8, adapter_id="c"))
    harness.step()
    harness.note(harness.scheduler.abort(["b"]))
    harness.note(harness.scheduler.abort(["a"]))
    assert list(harness.step().num_scheduled_tokens) == ["c"]


def test_preempted_requests_keep_no_slot():
    """A pool for two of four requests that grow; their adapters come and go with them."""
    harness = harness_of(num_blocks=8, max_adapters=2, max_num_seqs=4)
    for i in range(4):
        harness.add(request_of(f"r{i}", 20, 40, adapter_id="ab"[i % 2] if i < 2 else "c"))
    while harness.scheduler.has_unfinished():
        assert len(adapters_of(harness, harness.step())) <= 2
    harness.check_replies()
    assert len(harness.ended) == 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.integers(1, 40), st.integers(1, 12)), max_size=40
    ),
    st.integers(1, 3),
    st.sampled_from(["fcfs", "priority"]),
)
def test_whatever_comes_is_served_within_the_limit(wanted, max_adapters, policy):
    harness = harness_of(num_blocks=12, max_adapters=max_adapters, max_num_seqs=3, policy=policy)
    for i, (adapter, prompt, max_tokens) in enumerate(wanted):
        request = request_of(f"r{i}", prompt, max_tokens, adapter_id=adapter, priority=i % 3, arrival_time=float(i))
        harness.add(request)
        if i % 2:
            assert len(adapters_of(harness, harness.step())) <= max_adapters
    for _ in range(2000):
        if not harness.scheduler.has_unfinished():
            break
        assert len(adapters_of(harness, harness.step())) <= max_adapters
    assert len(harness.ended) == len(wanted)
    harness.check_replies()


def test_equal_prompts_share_blocks_within_an_adapter_alone():
    harness = harness_of(num_blocks=200, max_adapters=3)
    prompt = list(range(100, 148))
    for name, adapter, salt in (
        ("cold", "digest 1", None),
        ("other content", "digest 2", None),
        ("base", None, None),
        ("salted like it", None, "digest 1"),
        ("again", "digest 1", None),
    ):
        harness.add(request_of(name, prompt, 4, adapter_id=adapter, cache_salt=salt))
        harness.drain()
    assert {name: delta.num_cached_tokens for name, delta in harness.ended.items()} == {
        "cold": 0, "other content": 0, "base": 0, "salted like it": 0, "again": 32,
    }  # fmt: skip
    harness.check_replies()


def test_no_slots_is_no_limit():
    with pytest.raises(ConfigError, match="max_adapters is 0"):
        limits_of(max_adapters=0)
