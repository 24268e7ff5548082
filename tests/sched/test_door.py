"""What is refused before it waits, and what max_tokens becomes."""

from __future__ import annotations

import pytest

from octavo.core.base.errors import ConfigError, InvalidRequest, NeverFits
from octavo.core.base.params import FinishReason
from tests.sched.build import groups_of, harness_of, limits_of, request_of


def test_requests_larger_than_the_pool_fail_at_once_and_block_nobody():
    harness = harness_of(num_blocks=51, max_model_len=4096)
    harness.add(request_of("short", 20))
    harness.drain()
    for i in range(5):
        with pytest.raises(NeverFits, match=r"1002 prompt tokens .* need 63 KV blocks, but the pool has 50"):
            harness.add(request_of(f"big {i}", 1002))
    harness.add(request_of("another short one", 20))
    harness.drain()
    assert harness.ended.keys() == {"short", "another short one"}


def test_growth_counts_when_max_tokens_is_given():
    harness = harness_of(num_blocks=5)  # 4 blocks of 16: KV of 64 tokens
    harness.add(request_of("fits", 40, 25))  # the last token's KV is never computed
    with pytest.raises(NeverFits, match=r"at most 64 tokens fit") as refusal:
        harness.add(request_of("grows out", 40, 26))
    assert refusal.value.field == "max_tokens"
    harness.drain()
    assert len(harness.replies["fits"]) == 25


@pytest.mark.parametrize(("num_blocks", "max_model_len", "room"), [(5, 256, 25), (65, 256, 216), (65, 50, 10)])
def test_open_max_tokens_takes_what_context_and_pool_leave(num_blocks, max_model_len, room):
    harness = harness_of(num_blocks=num_blocks, max_model_len=max_model_len)
    harness.add(request := request_of("r", 40, None))
    harness.drain()
    assert request.max_tokens == len(harness.replies["r"]) == room
    assert harness.ended["r"].finish_reason is FinishReason.LENGTH


def test_prompt_and_max_tokens_beyond_the_context_name_all_three_numbers():
    harness = harness_of(num_blocks=200, max_model_len=2048)
    with pytest.raises(InvalidRequest, match=r"8 tokens and max_tokens is 2045, .* 2048; give .* at most 2040"):
        harness.add(request_of("reply too long", 8, 2045))
    with pytest.raises(InvalidRequest, match="2049 tokens, above max_model_len 2048"):
        harness.add(request_of("prompt too long", 2049, None))
    harness.add(request_of("exact", 8, 2040))
    harness.add(full := request_of("whole context", 2048, None))
    assert full.max_tokens == 0


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="no tokens"):
        harness_of().add(request_of("r", []))


def test_an_id_in_use_is_refused_and_free_again_after_the_end():
    harness = harness_of()
    harness.add(request_of("same"))
    with pytest.raises(InvalidRequest, match="'same' is still in use"):
        harness.scheduler.add(request_of("same"))
    harness.drain()
    harness.scheduler.add(request_of("same"))


def test_min_tokens_that_the_context_cannot_hold_is_refused():
    with pytest.raises(InvalidRequest, match="min_tokens is 100, but 200 prompt tokens leave room for 56"):
        harness_of().add(request_of("r", 200, None, sampling={"min_tokens": 100}))


def test_the_longest_request_counts_windows():
    full = harness_of(num_blocks=11, groups=groups_of((4, None)))
    mixed = harness_of(num_blocks=11, groups=groups_of((4, None), (4, 8)))
    windowed = harness_of(num_blocks=11, groups=groups_of((4, 8)))
    assert full.blocks.longest_request(256) == 40
    assert mixed.blocks.longest_request(256) == 28  # 7 blocks, and the window's 3
    assert windowed.blocks.longest_request(256) == 256


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 7}, "below max_num_seqs 8"),
        ({"policy": "lifo"}, "fcfs or priority"),
        ({"priority_ageing_s": 0.0}, "priority_ageing_s"),
        ({"admission_headroom": 1.0}, "admission_headroom"),
        ({"long_prefill_threshold": 0}, "long_prefill_threshold"),
    ],
)
def test_limits_out_of_range_are_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        limits_of(**changes)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "offset"),
    [
        (20, 1, 0),
        (20, 13, 0),
        (20, 14, 32),
        (32, 1, 0),
        (32, 0, 0),
        (33, 0, 32),
        (40, 1, 32),
        (30, 10, 32),
        (5, None, 32),
    ],
)
def test_requests_that_may_compute_more_than_the_switch_have_positions_of_their_own(num_prompt, max_tokens, offset):
    harness = harness_of(rotary_switch_tokens=32)
    harness.add(request := request_of("r", num_prompt, max_tokens))
    assert request.rotary_offset == offset
    harness.drain()
    assert request.rotary_offset == offset


def test_without_a_switch_or_a_longer_context_there_is_one_kind_of_positions():
    for limits in ({}, {"rotary_switch_tokens": 64, "max_model_len": 64}):
        harness = harness_of(**limits)
        harness.add(request := request_of("r", 40, None))
        assert request.rotary_offset == 0
