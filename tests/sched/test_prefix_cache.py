"""What a prefix hit may and may not reuse."""

from __future__ import annotations

import pytest

from octavo.core.base.errors import ConfigError
from octavo.core.sched.block_manager import BlockManager
from tests.sched.build import groups_of, harness_of, request_of


def serve(harness, request):
    """Run one request to its end; returns (reply, cached tokens)."""
    harness.add(request)
    harness.drain()
    harness.check_replies()
    return harness.replies[request.request_id], harness.ended[request.request_id].num_cached_tokens


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16)])
def test_whole_prompt_cached_leaves_a_token_to_compute(length, cached, max_tokens):
    harness = harness_of()
    prompt = list(range(100, 100 + length))
    first = serve(harness, request_of("first", prompt, max_tokens))
    second = serve(harness, request_of("second", prompt, max_tokens))
    assert first[1] == 0
    assert second == (first[0], cached)


def test_next_turn_hits_prompt_and_reply_of_the_last_one():
    harness = harness_of()
    prompt = list(range(100, 116))
    reply, _ = serve(harness, request_of("turn 1", prompt, 33))
    _, cached = serve(harness, request_of("turn 2", prompt + reply + [7, 8, 9], 1))
    assert cached == 48  # the reply's last token was never computed, all 48 before it were


@pytest.mark.parametrize("key", ["cache_salt", "adapter_id"])
def test_salt_and_adapter_keep_content_apart(key):
    harness = harness_of()
    prompt = list(range(40))
    assert serve(harness, request_of("plain", prompt))[1] == 0
    assert serve(harness, request_of("x", prompt, **{key: "x"}))[1] == 0
    assert serve(harness, request_of("y", prompt, **{key: "y"}))[1] == 0
    assert serve(harness, request_of("x again", prompt, **{key: "x"}))[1] == 32


def test_adapter_and_salt_of_one_name_are_not_one():
    harness = harness_of()
    prompt = list(range(40))
    serve(harness, request_of("adapter v1", prompt, adapter_id="x"))
    assert serve(harness, request_of("adapter v2", prompt, adapter_id="x, reloaded"))[1] == 0
    assert serve(harness, request_of("base", prompt, cache_salt="x"))[1] == 0
    assert serve(harness, request_of("both", prompt, adapter_id="x", cache_salt="x"))[1] == 0
    assert serve(harness, request_of("both again", prompt, adapter_id="x", cache_salt="x"))[1] == 32
    assert serve(harness, request_of("empty salt", prompt, cache_salt=""))[1] == 0


def test_requests_with_other_rotary_positions_share_nothing():
    harness = harness_of(rotary_switch_tokens=48)
    prompt = list(range(40))
    assert serve(harness, request_of("short", prompt, 4))[1] == 0
    assert serve(harness, request_of("long", prompt, 40))[1] == 0
    assert serve(harness, request_of("short again", prompt, 9))[1] == 32
    assert serve(harness, request_of("long again", prompt, 10))[1] == 32
    assert serve(harness, request_of("longer prompt", [*prompt, *range(300, 320)], 4))[1] == 32


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
def test_hashes_cover_everything_before_and_are_equal_everywhere(algorithm):
    def chain(tokens, kv_dtype="float32", **fields):
        manager = BlockManager(9, groups_of((4, None)), kv_dtype=kv_dtype, prefix_hash=algorithm)
        request = request_of("r", tokens, **fields)
        manager.find_prefix(request)
        return request.block_hashes[4]

    base = chain([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert base == chain([1, 2, 3, 4, 5, 6, 7, 8, 200])
    assert len(base) == 2
    others = [
        chain([1, 2, 3, 4, 5, 6, 7, 300, 9]),  # 300 and 44 share their low byte
        chain([1, 2, 3, 4, 5, 6, 7, 44, 9]),
        chain([9, 2, 3, 4, 5, 6, 7, 8, 9]),
        chain([1, 2, 3, 4, 5, 6, 7, 8, 9], kv_dtype="bfloat16"),
        chain([1, 2, 3, 4, 5, 6, 7, 8, 9], adapter_id="a"),
        chain([1, 2, 3, 4, 5, 6, 7, 8, 9], cache_salt="a"),
    ]
    last = [base[1], *(other[1] for other in others)]
    assert len(set(last)) == len(last)


def test_an_unknown_hash_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"md5.*sha256, xxh3_128"):
        BlockManager(9, groups_of((4, None)), kv_dtype="float32", prefix_hash="md5")


def test_caching_off_never_hits():
    harness = harness_of(caching=False)
    prompt = list(range(40))
    serve(harness, request_of("a", prompt))
    assert serve(harness, request_of("b", prompt))[1] == 0
    assert harness.blocks.num_cached_blocks == 0


def test_prompt_logprobs_compute_every_position():
    harness = harness_of()
    prompt = list(range(40))
    serve(harness, request_of("a", prompt))
    assert serve(harness, request_of("b", prompt, sampling={"prompt_logprobs": 1}))[1] == 0
    assert harness.prompt_logprobs == {"b": 40}


def test_reset_forgets_finished_and_running_requests():
    harness = harness_of()
    prompt = list(range(40))
    serve(harness, request_of("ended", prompt))
    harness.add(request_of("running", [*range(200, 240)], 30))
    harness.step()
    harness.blocks.reset_prefix_cache()
    harness.drain()
    assert harness.blocks.num_cached_blocks == 0
    assert serve(harness, request_of("again", prompt))[1] == 0
    assert serve(harness, request_of("and again", prompt))[1] == 32


def test_equal_content_computed_twice_is_kept_once():
    harness = harness_of(policy="priority", max_num_batched_tokens=16)
    prompt = list(range(40))
    harness.add(request_of("a", prompt, priority=1))
    harness.step()
    harness.add(urgent := request_of("b", prompt, priority=0))  # waits for no less urgent one's prefix
    harness.drain()
    harness.check_replies()
    assert urgent.num_cached_tokens == 16
    assert harness.blocks.num_cached_blocks == 2


def test_the_beginning_of_a_prompt_survives_longest():
    harness = harness_of(num_blocks=9)
    prompt = list(range(100))  # 7 blocks, 6 of them full, in a pool of 8
    serve(harness, request_of("long", prompt, 1))
    serve(harness, request_of("other", 40, 1))  # takes the two unused ones and the last of the long prompt
    assert serve(harness, request_of("again", prompt, 1))[1] == 80


def test_least_recently_used_content_goes_first():
    harness = harness_of(num_blocks=7)
    old, recent = list(range(100, 133)), list(range(200, 233))  # 2 full blocks and a part each
    serve(harness, request_of("old", old, 1))
    serve(harness, request_of("recent", recent, 1))
    serve(harness, request_of("old again", old, 1))
    serve(harness, request_of("newcomer", 60, 1))  # needs 4 of 6 blocks: 2 without content, 2 of the least recent
    assert serve(harness, request_of("old once more", old, 1))[1] == 32
    assert serve(harness, request_of("recent again", recent, 1))[1] == 0


def test_a_failed_request_leaves_nothing_to_hit():
    harness = harness_of(max_num_batched_tokens=16)
    prompt = list(range(40))
    harness.add(request_of("a", prompt))
    harness.step()
    harness.runner.fail_next.add("a")
    harness.step()
    assert harness.ended["a"].error == "made to fail"
    assert harness.blocks.num_cached_blocks == 0
    assert serve(harness, request_of("b", prompt))[1] == 0


def test_finding_a_prefix_changes_nothing():
    harness = harness_of()
    prompt = list(range(40))
    serve(harness, request_of("a", prompt))
    before = [block.block_id for block in harness.blocks._pool.free_blocks()]
    assert harness.blocks.find_prefix(request_of("b", prompt)).num_tokens == 32
    assert [block.block_id for block in harness.blocks._pool.free_blocks()] == before
