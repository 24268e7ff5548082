"""Steps, chunks, order, ends and aborts."""

from __future__ import annotations

import pytest

from octavo.core.base.params import FinishReason
from octavo.core.sched.output import ModelRunnerOutput, SampledTokens
from tests.sched.build import harness_of, request_of
from tests.sched.simulator import EOS


def answer(harness, scheduled, **tokens):
    """The result of a step in which each named request draws the given ids."""
    sampled = {request_id: SampledTokens(tuple(ids), f"logprobs of {ids}") for request_id, ids in tokens.items()}
    return harness.scheduler.update(scheduled, ModelRunnerOutput(sampled=sampled))


def first_delta(request, *token_ids):
    """What one request's deltas say when it draws these ids, one a step."""
    harness = harness_of()
    harness.scheduler.add(request)
    deltas = []
    for token_id in token_ids:
        deltas += answer(harness, harness.scheduler.schedule(), **{request.request_id: [token_id]})
        if deltas[-1].finish_reason is not None:
            break
    return deltas


# ---------------------------------------------------------------------------------------------- steps


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests():
    harness = harness_of(max_num_batched_tokens=16)
    harness.add(request_of("decoding", 4, 20))
    harness.step()
    harness.add(request_of("long", 40, 4))
    chunks = [harness.step().num_scheduled_tokens for _ in range(4)]
    assert chunks == [{"decoding": 1, "long": 15}, {"decoding": 1, "long": 15}, {"decoding": 1, "long": 10},
                      {"decoding": 1, "long": 1}]  # fmt: skip


@pytest.mark.parametrize("budget", [8, 9, 16, 17, 64])
def test_replies_do_not_depend_on_the_chunk_size(budget):
    harness = harness_of(max_num_batched_tokens=budget)
    for i in range(8):
        harness.add(request_of(f"r{i}", 3 + 11 * i, 12))
    harness.drain()
    harness.check_replies()


def test_every_running_request_gets_a_token_in_every_step():
    # A long prompt that comes back to the front after a preemption must not starve those that decode.
    harness = harness_of(num_blocks=12, max_num_batched_tokens=8, max_num_seqs=4)
    for i in range(4):
        harness.add(request_of(f"r{i}", 40, 20))
    while harness.scheduler.has_unfinished():
        scheduled = harness.step()
        running = {running.request_id for running in scheduled.running}
        assert len(scheduled.num_scheduled_tokens) == len(running) + len(scheduled.new_requests)
        assert scheduled.total_num_scheduled_tokens <= 8
        assert harness.scheduler.num_running <= len(scheduled.num_scheduled_tokens)
    harness.check_replies()


def test_long_prefill_threshold_leaves_room_for_others():
    harness = harness_of(max_num_batched_tokens=64, long_prefill_threshold=10)
    harness.add(request_of("long", 100, 1))
    harness.add(request_of("short", 8, 1))
    assert harness.step().num_scheduled_tokens == {"long": 10, "short": 8}


def test_no_more_than_max_num_seqs_run_and_the_rest_wait_in_order():
    harness = harness_of(max_num_seqs=2)
    for i in range(5):
        harness.add(request_of(f"r{i}", 4, 3))
    assert list(harness.step().num_scheduled_tokens) == ["r0", "r1"]
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (2, 3)
    harness.drain()
    assert list(harness.ended) == ["r0", "r1", "r2", "r3", "r4"]


def test_the_first_in_line_is_not_passed_by_smaller_ones():
    harness = harness_of(num_blocks=9)
    harness.add(request_of("running", 60, 40))
    harness.step()
    harness.add(request_of("large", 80, 4))
    harness.add(request_of("small", 4, 4))
    assert list(harness.step().num_scheduled_tokens) == ["running"]
    harness.drain()
    assert list(harness.ended) == ["running", "large", "small"]


def test_starting_leaves_headroom_while_others_run():
    harness = harness_of(num_blocks=11, admission_headroom=0.2)
    harness.add(request_of("first", 160 - 1, 2))
    assert list(harness.step().num_scheduled_tokens) == ["first"]  # alone it may take all
    harness.drain()
    harness.add(request_of("a", 64, 8))
    harness.add(request_of("b", 64, 8))  # 4 + 4 blocks leave 2
    harness.add(request_of("c", 16, 8))
    assert list(harness.step().num_scheduled_tokens) == ["a"]  # only the budget stopped b
    assert list(harness.step().num_scheduled_tokens) == ["a"]  # a's next block is gone: b would leave 1


def test_a_step_in_flight_must_come_back_first():
    harness = harness_of()
    harness.add(request_of("r"))
    scheduled = harness.scheduler.schedule()
    with pytest.raises(RuntimeError, match="result came back"):
        harness.scheduler.schedule()
    answer(harness, scheduled, r=[1])
    with pytest.raises(RuntimeError, match="not in flight"):
        answer(harness, scheduled, r=[1])


def test_a_missing_token_is_the_runners_fault_not_a_hang():
    harness = harness_of()
    harness.add(request_of("r"))
    with pytest.raises(RuntimeError, match="drew no token for r"):
        harness.scheduler.update(harness.scheduler.schedule(), ModelRunnerOutput())


def test_token_limits_cap_and_skip():
    class NothingForOdd:
        def cap(self, request, n, budget):
            return 0 if request.request_id == "odd" else min(n, 3)

    harness = harness_of()
    scheduler = type(harness.scheduler)(harness.scheduler._limits, harness.blocks, token_limits=(NothingForOdd(),))
    scheduler.add(request_of("even", 5))
    scheduler.add(request_of("odd", 5))
    assert scheduler.schedule().num_scheduled_tokens == {"even": 3}


# ----------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("sampling", "drawn", "kept", "reason", "stop_reason"),
    [
        ({}, [5, EOS], 2, FinishReason.STOP, None),
        ({"ignore_eos": True}, [EOS, EOS, 5, 5], 4, FinishReason.LENGTH, None),
        ({"stop_token_ids": (9,)}, [5, 9], 2, FinishReason.STOP, 9),
        ({"stop_token_ids": (9,), "ignore_eos": True}, [EOS, 9], 2, FinishReason.STOP, 9),
        ({}, [5, 5, 5, 5], 4, FinishReason.LENGTH, None),
        ({}, [5, 5, 5, EOS], 4, FinishReason.STOP, None),
        ({"min_tokens": 2}, [EOS, EOS, EOS], 3, FinishReason.STOP, None),
        ({"min_tokens": 2, "stop_token_ids": (9,)}, [9, EOS, 9], 3, FinishReason.STOP, 9),
    ],
)
def test_what_ends_a_request(sampling, drawn, kept, reason, stop_reason):
    deltas = first_delta(request_of("r", 5, 4, sampling={"ignore_eos": False, **sampling}), *drawn)
    assert [token_id for delta in deltas for token_id in delta.new_token_ids] == drawn[:kept]
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (kept - 1)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (reason, stop_reason)


def test_several_tokens_of_one_step_are_cut_at_the_end():
    harness = harness_of()
    request = request_of("r", 5, 10, sampling={"stop_token_ids": (9,)})
    harness.scheduler.add(request)
    (delta,) = answer(harness, harness.scheduler.schedule(), r=[1, 2, 3])
    assert (delta.new_token_ids, delta.finish_reason) == ((1, 2, 3), None)
    scheduled = harness.scheduler.schedule()
    assert scheduled.num_scheduled_tokens == {"r": 3}
    (delta,) = answer(harness, scheduled, r=[4, 9, 5])
    assert (delta.new_token_ids, delta.finish_reason, delta.stop_reason) == ((4, 9), FinishReason.STOP, 9)
    assert request.output_token_ids == [1, 2, 3, 4, 9]


def test_max_tokens_zero_scores_the_prompt_and_draws_nothing():
    harness = harness_of(max_num_batched_tokens=8)
    harness.add(request_of("r", 20, 0, sampling={"prompt_logprobs": 1}))
    assert harness.drain() == 3
    assert harness.replies["r"] == []
    assert harness.ended["r"].finish_reason is FinishReason.LENGTH
    assert harness.prompt_logprobs == {"r": 20}


def test_logprobs_and_cached_tokens_travel_with_the_delta():
    (delta,) = first_delta(request_of("r", 5, 1), 3)
    assert delta.logprobs == "logprobs of [3]"
    assert delta.num_cached_tokens == 0


def test_one_failed_request_ends_alone():
    harness = harness_of()
    for name in ("bad", "good"):
        harness.add(request_of(name, 5, 6))
    harness.step()
    harness.runner.fail_next.add("bad")
    scheduled = harness.step()
    assert harness.ended["bad"].finish_reason is FinishReason.ERROR
    assert "bad" in scheduled.num_scheduled_tokens
    assert harness.step().finished_request_ids == ("bad",)
    harness.drain()
    harness.check_replies()
    assert len(harness.replies["good"]) == 6


# --------------------------------------------------------------------------------------------- aborts


def test_abort_while_waiting_running_and_in_flight():
    harness = harness_of(max_num_seqs=2)
    for name in ("a", "b", "waiting"):
        harness.add(request_of(name, 20, 10))
    harness.step()
    scheduled = harness.scheduler.schedule()
    deltas = harness.scheduler.abort(["b", "waiting", "unknown"])
    assert [(delta.request_id, delta.finish_reason) for delta in deltas] == [
        ("b", FinishReason.ABORT),
        ("waiting", FinishReason.ABORT),
    ]
    later = harness.scheduler.update(scheduled, harness.runner.run(scheduled))
    assert [delta.request_id for delta in later] == ["a"]
    # The runner never met the one that waited.
    assert harness.scheduler.schedule().finished_request_ids == ("b",)


def test_abort_frees_the_blocks_at_once():
    harness = harness_of()
    harness.add(request_of("r", 40))
    harness.step()
    harness.scheduler.abort(["r"])
    assert harness.blocks.num_used_blocks == 0
    assert not harness.scheduler.has_unfinished()
    assert harness.scheduler.abort(["r"]) == []


def test_an_id_reused_during_the_step_gets_nothing_of_its_predecessor():
    harness = harness_of()
    harness.scheduler.add(request_of("same", 20))
    scheduled = harness.scheduler.schedule()
    harness.scheduler.abort(["same"])
    harness.scheduler.add(successor := request_of("same", 6))
    assert answer(harness, scheduled, same=[1]) == []
    assert successor.output_token_ids == []
    following = harness.scheduler.schedule()
    assert following.finished_request_ids == ("same",)
    assert [new.request_id for new in following.new_requests] == ["same"]


def test_an_abort_can_carry_the_stop_string_that_was_found():
    harness = harness_of()
    harness.add(request_of("r"))
    harness.step()
    (delta,) = harness.scheduler.abort(["r"], FinishReason.STOP, "\n\n")
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "\n\n")
    assert harness.scheduler.stats().finished[FinishReason.STOP] == 1


# -------------------------------------------------------------------------------------------- figures


def test_stats_count_tokens_once_and_add_up():
    harness = harness_of(max_num_batched_tokens=64)
    harness.add(request_of("a", list(range(40)), 4))
    harness.drain()
    harness.add(request_of("b", list(range(40)), 4))
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_total, stats.kv_blocks_used) == (1, 0, 64, 3)
    assert stats.kv_usage == 3 / 64
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (80, 32)
    harness.drain()
    stats = harness.scheduler.stats()
    assert stats.generated_tokens == 8
    assert stats.scheduled_tokens == 43 + 11
    assert stats.finished[FinishReason.LENGTH] == 2
    assert stats.kv_usage == 0.0
