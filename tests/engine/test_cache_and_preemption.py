"""Prefix cache, salts, preemption and full pools through the whole engine, with the content of the cache real."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, FinishReason, SamplingParams
from octavo.core.base.errors import InvalidRequest
from octavo.core.engine.outputs import RequestOutput
from octavo.core.engine.wire import EngineRequest
from tests.engine.worlds import NullWorld, TinyModels, check_all_is_free, drive, engine_of
from tests.fakes.null_model import continuation
from tests.fakes.tiny_models import random_prompt

VOCAB = 199


def run(llm: LLM, prompt: list[int], **changes: Any) -> RequestOutput:
    return llm.generate([prompt], SamplingParams(temperature=0.0, logprobs=2, **changes))[0]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_prompt_wholly_in_the_cache(tiny: TinyModels, family: str, length: int, cached: int, max_tokens: int) -> None:
    """vllm#3239, #9972, #11186: nothing was left to compute when the length was a multiple of the block."""
    prompt = random_prompt(VOCAB, length)
    with tiny.llm(family, block_size=16, num_kv_blocks=100) as llm:
        first, second = (run(llm, prompt, max_tokens=max_tokens) for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
        assert second.outputs == first.outputs
        # The next turn finds the whole conversation but for what was never computed.
        turn = prompt + first.outputs[0].token_ids + random_prompt(VOCAB, 5)
        third = run(llm, turn, max_tokens=4)
        assert third.num_cached_tokens == (length + max_tokens - 1) // 16 * 16
    with tiny.llm(family, block_size=16, num_kv_blocks=100, enable_prefix_caching=False) as llm:
        assert run(llm, turn, max_tokens=4).outputs == third.outputs
        assert run(llm, turn, max_tokens=4).num_cached_tokens == 0


def test_requests_share_the_cache_only_within_one_salt(tiny: TinyModels) -> None:
    """vllm#30931, #44701: a hit must not cross what tells the content's owners apart."""
    prompt = random_prompt(VOCAB, 40)
    with tiny.llm("llama") as llm:
        engine = llm._engine

        def cached(salt: str | None, name: str) -> tuple[int, list[int]]:
            params = SamplingParams(temperature=0.0, max_tokens=5)
            request = EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, cache_salt=salt)
            reply = drive(engine, [request])[name, 0]
            return reply.num_cached_tokens, reply.token_ids

        cold = [cached(salt, str(salt)) for salt in (None, "x", "", "None")]
        hot = [cached(salt, str(salt)) for salt in (None, "x", "", "None")]
    assert [count for count, _ in cold] == [0, 0, 0, 0]
    assert [count for count, _ in hot] == [36, 36, 36, 36]
    assert len({tuple(tokens) for _, tokens in cold + hot}) == 1


def test_prompt_logprobs_are_computed_though_the_prompt_is_cached(tiny: TinyModels) -> None:
    prompt = random_prompt(VOCAB, 40)
    with tiny.llm("llama") as llm:
        first = run(llm, prompt, max_tokens=2, prompt_logprobs=1)
        run(llm, prompt, max_tokens=2)
        second = run(llm, prompt, max_tokens=2, prompt_logprobs=1)
    assert second.num_cached_tokens == 0
    assert (second.prompt_logprobs, second.outputs) == (first.prompt_logprobs, first.outputs)


def test_a_reset_cache_is_cold(tiny: TinyModels) -> None:
    prompt = random_prompt(VOCAB, 40)
    with tiny.llm("llama") as llm:
        first = run(llm, prompt, max_tokens=2)
        assert run(llm, prompt, max_tokens=2).num_cached_tokens == 36
        llm.reset_prefix_cache()
        again = run(llm, prompt, max_tokens=2)
        assert (again.num_cached_tokens, again.outputs) == (0, first.outputs)


def test_cached_blocks_make_room_for_new_requests(tiny: TinyModels) -> None:
    """A pool full of cached content evicts it, oldest first, and never answers from a block that was reused."""
    prompts = [random_prompt(VOCAB, 40, seed=seed) for seed in range(6)]
    with tiny.llm("llama", num_kv_blocks=30, max_model_len=60) as llm:
        first = [run(llm, prompt, max_tokens=8) for prompt in prompts]
        assert [run(llm, prompt, max_tokens=8).outputs for prompt in prompts] == [o.outputs for o in first]
        last = run(llm, prompts[-1], max_tokens=8)
        assert last.num_cached_tokens == 36


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_requests_go_on_where_they_were(tiny: TinyModels, family: str, enable_prefix_caching: bool) -> None:
    """vllm-gaudi#524, vllm#8844: after a preemption tokens came twice, or only the prompt was recomputed.

    vllm#25780: tokens recomputed after a preemption are no prefix hits.
    """
    lengths = (3, 3, 5, 17, 3, 9)
    prompts = [random_prompt(VOCAB, length) for length in lengths]
    params = [
        SamplingParams(
            n=1 + 2 * (i % 2),
            temperature=i % 3,
            seed=i,
            max_tokens=30,
            logprobs=1,
            prompt_logprobs=1 if i == 3 else None,
        )
        for i in range(6)
    ]
    with tiny.llm(family, enable_prefix_caching=enable_prefix_caching) as llm:
        ample = llm.generate(prompts, params)
        assert llm.stats().preemptions == 0
    tight = {"num_kv_blocks": 34 if family == "gemma3" else 28, "max_model_len": 48}
    with tiny.llm(family, **tight, enable_prefix_caching=enable_prefix_caching) as llm:
        found = llm.generate(prompts, params)
        stats = llm.stats()
    assert stats.preemptions > 0
    assert [output.outputs for output in found] == [output.outputs for output in ample]
    assert [output.prompt_logprobs for output in found] == [output.prompt_logprobs for output in ample]
    assert [output.num_cached_tokens for output in found] == [0] * 6
    assert stats.generated_tokens == sum(len(c.token_ids) for output in found for c in output.outputs)
    assert stats.finished[FinishReason.LENGTH] == sum(each.n for each in params)
    assert stats.prefix_hit_tokens == 0 or enable_prefix_caching


def test_streams_go_on_through_preemptions(null: NullWorld) -> None:
    with null.llm(num_kv_blocks=15, max_model_len=64, block_size=8, max_num_seqs=8) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        streams = [llm.generate_stream([seed, 1, 2], params) for seed in range(6)]
        found: list[list[int]] = [[] for _ in streams]
        for _ in range(40):
            for tokens, stream in zip(found, streams, strict=True):
                tokens += next(stream).outputs[0].token_ids
        assert found == [continuation([seed, 1, 2], 40, 97) for seed in range(6)]
        assert llm.stats().preemptions > 0


def test_a_request_larger_than_the_pool_blocks_nobody(null: NullWorld) -> None:
    """vllm#35541, #2163, #1607: it waited for ever, and everything behind it."""
    engine = engine_of(null.config(num_kv_blocks=51))
    params = SamplingParams(temperature=0.0, max_tokens=8)

    def short(name: str) -> EngineRequest:
        return EngineRequest(request_id=name, prompt_token_ids=[1, 2, 3], params=params)

    drive(engine, [short(f"first{i}") for i in range(3)])
    for i in range(5):
        big = EngineRequest(request_id=f"big{i}", prompt_token_ids=[1] * 1002, params=params)
        with pytest.raises(InvalidRequest, match="1002 tokens, above max_model_len 800"):
            engine.add_request(big)
    replies = drive(engine, [short("last")])
    assert replies["last", 0].token_ids == continuation([1, 2, 3], 8, 97)
    check_all_is_free(engine)
    engine.close()


def test_the_largest_request_that_fits_runs_alone_and_beside_others(null: NullWorld) -> None:
    with null.llm({"windows": [None, 8]}, num_kv_blocks=51, max_num_seqs=8, max_num_batched_tokens=64) as llm:
        longest = llm.max_model_len
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        prompts = [[1] * (longest - 8), [2], [3] * 40, [1] * (longest - 8), [4]]
        for output, prompt in zip(llm.generate(prompts, params), prompts, strict=True):
            assert output.outputs[0].token_ids == continuation(prompt, 8, 97)
        with pytest.raises(InvalidRequest, match=f"above max_model_len {longest}"):
            llm.generate([[1] * (longest - 7)], params)
