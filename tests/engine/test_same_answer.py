"""On the CPU backend a request's tokens and log probabilities are bit for bit the same, whatever shares its batch,
however its prompt is cut, whether its prefix was cached, and whether it was preempted.

The oracle is the same request alone: cache off, prompt in one chunk. Log probabilities are compared exactly: they are
a function of all logits, so one bit of difference anywhere shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.engine.outputs import CompletionOutput
from tests.engine.worlds import TinyModels
from tests.fakes import tiny_models

FAMILIES = ("llama", "gemma3")
NUM_REQUESTS = 32
TIGHT = 70
"""KV blocks: two or three requests at once."""
WEIGHTS = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
}


def prompts(vocab_size: int) -> list[list[int]]:
    """32 prompts of 1 to 90 tokens; every third begins like another one."""
    shared = tiny_models.random_prompt(vocab_size, 40)
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 23, 31, 32, 33, 40, 41, 48, 63, 64, 65, 90]
    made = []
    for i in range(NUM_REQUESTS):
        own = tiny_models.random_prompt(vocab_size, lengths[i % len(lengths)], seed=i)
        made.append(shared[: 8 + i] + own if i % 3 == 0 else own)
    return made


def params(i: int) -> SamplingParams:
    """Of the i-th request: half of them greedy, half sampled in various ways."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 2.0, "seed": i},
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": i, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {"temperature": 1.3, "seed": i, "top_p": 0.5, "presence_penalty": 0.4},
    )
    return SamplingParams(max_tokens=4 + i * 7 % 37, logprobs=3, prompt_logprobs=i % 4 or None, **kinds[i % len(kinds)])


def answers(llm: LLM, order: Sequence[int], **changes: Any) -> dict[int, Any]:
    """The requests named, in one batch: request -> choice and prompt logprobs."""
    vocab_size = llm._model.vocab_size
    every = prompts(vocab_size)
    outputs = llm.generate([every[i] for i in order], [params(i).with_(**changes) for i in order])
    return {i: (output.outputs, output.prompt_logprobs) for i, output in zip(order, outputs, strict=True)}


@pytest.fixture(
    scope="module", params=[("llama", "fp32"), ("gemma3", "fp32"), ("gemma3", "bf16")], ids=lambda p: "-".join(p)
)
def case(request: pytest.FixtureRequest, tiny: TinyModels) -> tuple[Callable[..., LLM], dict[int, Any]]:
    """Makes LLMs of one model, and what each request answers alone."""
    family, weights = request.param

    def make(**options: Any) -> LLM:
        return tiny.llm(family, **(WEIGHTS[weights] | options))

    with make(enable_prefix_caching=False) as llm:
        alone = {i: answers(llm, [i])[i] for i in range(NUM_REQUESTS)}
    return make, alone


def test_in_a_batch_of_32(case: Any) -> None:
    make, alone = case
    with make() as llm:
        assert answers(llm, range(NUM_REQUESTS)) == alone
        assert answers(llm, range(NUM_REQUESTS)[::-1]) == alone  # with a hot cache, in another order


@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_in_chunks(case: Any, chunk: int) -> None:
    make, alone = case
    with make(long_prefill_threshold=chunk) as llm:
        assert answers(llm, range(NUM_REQUESTS)) == alone
    with make(max_num_batched_tokens=chunk, max_num_seqs=chunk, enable_prefix_caching=False) as llm:
        assert answers(llm, range(NUM_REQUESTS)) == alone


def test_with_a_cold_and_a_hot_prefix_cache(case: Any) -> None:
    make, alone = case
    with make() as llm:
        for _ in range(2):
            for i in range(NUM_REQUESTS):
                assert answers(llm, [i])[i] == alone[i]
        before = llm.stats().prefix_hit_tokens
        hot = answers(llm, range(NUM_REQUESTS), prompt_logprobs=None)
        assert {i: found for i, (found, _) in hot.items()} == {i: choices for i, (choices, _) in alone.items()}
        assert llm.stats().prefix_hit_tokens > before
        llm.reset_prefix_cache()
        assert answers(llm, range(NUM_REQUESTS)) == alone


def test_under_forced_preemption(case: Any) -> None:
    make, alone = case
    with make(num_kv_blocks=TIGHT, max_model_len=160) as llm:
        assert answers(llm, range(NUM_REQUESTS)) == alone
        assert llm.stats().preemptions > 0
    with make(num_kv_blocks=TIGHT, max_model_len=160, enable_prefix_caching=False, max_num_batched_tokens=32,
              max_num_seqs=32) as llm:  # fmt: skip
        assert answers(llm, range(NUM_REQUESTS)) == alone
        assert llm.stats().preemptions > 0


def test_with_tokens_guessed_ahead(case: Any) -> None:
    """Guesses that hold and guesses that don't, in steps of many requests and of one, with and without preemption."""
    make, alone = case
    with make(num_speculative_tokens=5, num_kv_blocks=TIGHT, max_model_len=160) as llm:
        assert answers(llm, range(NUM_REQUESTS)) == alone
        for i in range(NUM_REQUESTS):
            assert answers(llm, [i])[i] == alone[i]
        assert 0 < llm.stats().accepted_tokens < llm.stats().drafted_tokens
    with make(num_speculative_tokens=3, max_num_seqs=1) as llm:
        assert answers(llm, range(NUM_REQUESTS)) == alone
        assert llm.stats().accepted_tokens > 0


def test_with_four_choices(case: Any) -> None:
    """Each greedy choice is the lone one; sampled choices differ from each other and are those of any other run."""
    make, alone = case
    with make() as llm:
        together = answers(llm, range(NUM_REQUESTS), n=4)
        lone = {i: answers(llm, [i], n=4)[i] for i in range(NUM_REQUESTS)}
    with make(num_kv_blocks=TIGHT, max_model_len=160) as llm:
        tight = answers(llm, range(NUM_REQUESTS), n=4)
        assert llm.stats().preemptions > 0
    assert together == lone == tight
    for i, (choices, prompt_logprobs) in together.items():
        (first,), expected_prompt_logprobs = alone[i]
        assert [choice.index for choice in choices] == [0, 1, 2, 3]
        assert (choices[0], prompt_logprobs) == (first, expected_prompt_logprobs)
        if params(i).greedy:
            assert [contents(choice) for choice in choices] == [contents(first)] * 4
        elif params(i).temperature == 2.0 and len(first.token_ids) > 8:
            assert len({tuple(choice.token_ids) for choice in choices}) == 4


def test_on_any_number_of_threads(case: Any) -> None:
    make, alone = case
    with make(num_threads=1, deterministic=True) as llm:
        assert answers(llm, range(NUM_REQUESTS)) == alone


def contents(choice: CompletionOutput) -> tuple[Any, ...]:
    """A choice but for its index."""
    return choice.token_ids, choice.logprobs, choice.finish_reason


@pytest.mark.parametrize("family", FAMILIES)
def test_two_models_in_one_process(tiny: TinyModels, family: str) -> None:
    """Two engines take turns, and one is closed while the other goes on."""
    other = FAMILIES[1 - FAMILIES.index(family)]
    with tiny.llm(family) as llm:
        expected = [answers(llm, [i])[i] for i in (3, 16)]
        neighbour = tiny.llm(other)
        streams = [m.generate_stream([5, 6, 7], SamplingParams(max_tokens=9, seed=1)) for m in (llm, neighbour)]
        for _ in range(4):
            for stream in streams:
                next(stream)
        assert answers(llm, [3])[3] == expected[0]
        neighbour.close()
        assert answers(llm, [16])[16] == expected[1]
        assert list(streams[0])[-1].finished


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [4, 8, 9, 16, 40])
def test_greedy_tokens_and_logprobs_are_hugging_faces(tiny: TinyModels, family: str, chunk: int) -> None:
    """executorch#20346, sglang#4823: gemma3's window of 8, and chunks smaller and larger than it."""
    reference = tiny.reference(family)
    prompt = tiny_models.random_prompt(reference.config.vocab_size, 40)
    logits = tiny_models.logits_of(reference, prompt).log_softmax(-1)
    with tiny.llm(family, max_num_batched_tokens=chunk, max_num_seqs=4) as llm:
        (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=0))
    assert output.outputs[0].token_ids == tiny_models.greedy(reference, prompt, 20)
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        found = entry[prompt[position + 1]].logprob
        assert found == pytest.approx(logits[position, prompt[position + 1]].item(), abs=1e-3)
