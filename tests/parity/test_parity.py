"""The two real models say what Hugging Face says in fp32 on the same weights, however their requests are scheduled.

`make parity` compares all 40 prompts of each model, 64 tokens each; `make test` a few of them. That other schedules
change nothing is compared bit by bit with the same requests alone.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.load.demos import locate_demo
from tests.parity.reference import MAX_EXCUSED_SHARE, Comparison, Reference, compare, greedy, load, tokens_of

MODELS = ("smollm2", "gemma3-270m")
NUM_PROMPTS, NUM_TOKENS = 40, 64
A_FEW = {"smollm2": (3, 8, 13, 28), "gemma3-270m": (2, 13, 28)}
A_FEW_TOKENS = 16

pytestmark = pytest.mark.timeout(600)


def llm_of(model: str, **options: Any) -> LLM:
    return LLM(model, **({"backend": "cpu", "dtype": "float32", "progress": False, "max_model_len": 2048} | options))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(model: str) -> Reference:
    return load(model)


@pytest.fixture(scope="module")
def chunked(model: str) -> Iterator[LLM]:
    """The model as every run of the tests loads it: prompts in chunks of 7, with the prefix cache."""
    with llm_of(model, long_prefill_threshold=7, max_model_len=256) as made:
        yield made


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    """The model with no cache, for requests alone."""
    with llm_of(model, enable_prefix_caching=False) as made:
        yield made


def check(comparison: Comparison) -> None:
    assert comparison.wrong == []
    assert len(comparison.excused) <= MAX_EXCUSED_SHARE * comparison.num_tokens


def test_the_reference_is_of_this_file_and_these_prompts(model: str, reference: Reference, chunked: LLM) -> None:
    assert hashlib.sha256(Path(locate_demo(model)).read_bytes()).hexdigest() == reference.sha256
    assert len(reference.prompts) == len(set(reference.prompts)) == len(reference.records) == NUM_PROMPTS
    for prompt, record in zip(reference.prompts, reference.records, strict=True):
        assert chunked.tokenizer.encode(prompt) == record.prompt_token_ids
        assert 5 <= len(record.prompt_token_ids) <= 210
        assert len(record.token_ids) == len(record.gaps) == NUM_TOKENS


def test_a_few_prompts(model: str, reference: Reference, chunked: LLM) -> None:
    """The part of parity that every run checks: alone with a cold cache, then in one batch with a hot one."""
    records = [reference.records[i] for i in A_FEW[model]]
    alone = compare(chunked, records, num_tokens=A_FEW_TOKENS)
    assert alone.wrong == []
    assert len(alone.excused) <= 1
    together = greedy(chunked, [record.prompt_token_ids for record in records], [A_FEW_TOKENS] * len(records))
    assert [tokens_of(output) for output in together] == alone.found
    assert sum(output.num_cached_tokens for output in together) > 0


def test_tiny_temperatures_are_greedy(model: str, reference: Reference, chunked: LLM) -> None:
    """vllm#3063, #2937: logits overflow at temperatures from 1e-4 to 1e-5."""
    record = reference.records[A_FEW[model][0]]
    params = [
        SamplingParams(temperature=temperature, seed=1, max_tokens=A_FEW_TOKENS, ignore_eos=True)
        for temperature in (0, 1e-7, 1e-5, 1e-4)
    ]
    outputs = chunked.generate([record.prompt_token_ids] * len(params), params)
    assert [tokens_of(output) for output in outputs] == [record.token_ids[:A_FEW_TOKENS]] * len(params)


@pytest.mark.parity
class TestEveryPrompt:
    """All prompts, all tokens."""

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, model: str, reference: Reference, llm: LLM) -> Comparison:
        comparison = compare(llm, reference.records)
        sys.stdout.write(f"{model}: {comparison}\n")
        return comparison

    def check_same(self, llm: LLM, reference: Reference, alone: Comparison) -> list[Any]:
        """All prompts in one batch give the tokens they give alone."""
        prompts = [record.prompt_token_ids for record in reference.records]
        outputs = greedy(llm, prompts, [NUM_TOKENS] * len(prompts))
        assert [tokens_of(output) for output in outputs] == alone.found
        return outputs

    def test_alone(self, alone: Comparison) -> None:
        check(alone)

    def test_in_a_batch_of_32(self, model: str, reference: Reference, alone: Comparison) -> None:
        with llm_of(model, max_num_seqs=32) as llm:
            self.check_same(llm, reference, alone)

    @pytest.mark.parametrize("chunk", [7, 16, 64])
    def test_in_chunks(self, model: str, reference: Reference, alone: Comparison, chunk: int) -> None:
        with llm_of(model, long_prefill_threshold=chunk) as llm:
            self.check_same(llm, reference, alone)

    def test_with_a_cold_and_a_hot_prefix_cache(self, model: str, reference: Reference, alone: Comparison) -> None:
        with llm_of(model, max_num_seqs=32) as llm:
            cold = self.check_same(llm, reference, alone)
            hot = self.check_same(llm, reference, alone)
            assert [output.num_cached_tokens for output in cold] == [0] * NUM_PROMPTS
            expected = [(len(record.prompt_token_ids) - 1) // 16 * 16 for record in reference.records]
            assert [output.num_cached_tokens for output in hot] == expected

    def test_under_forced_preemption(self, model: str, reference: Reference, alone: Comparison) -> None:
        num_groups = {"smollm2": 1, "gemma3-270m": 6}[model]
        with llm_of(model, max_model_len=300, num_kv_blocks=60 * num_groups) as llm:
            self.check_same(llm, reference, alone)
            assert llm.stats().preemptions > 0

    def test_with_four_choices(self, model: str, reference: Reference, alone: Comparison) -> None:
        with llm_of(model, max_num_seqs=64) as llm:
            prompts = [record.prompt_token_ids for record in reference.records]
            outputs = greedy(llm, prompts, [NUM_TOKENS] * len(prompts), n=4)
        for output, tokens in zip(outputs, alone.found, strict=True):
            assert [choice.token_ids for choice in output.outputs] == [tokens] * 4

    def test_a_document_longer_than_the_window(self, model: str, reference: Reference, llm: LLM) -> None:
        """executorch#20346: 1,500 tokens of prompt, for Gemma's window of 512, whole and in chunks."""
        whole = compare(llm, [reference.long])
        check(whole)
        sys.stdout.write(f"{model}, 1500 tokens of prompt: {whole}\n")
        for chunk in (64, 500):
            with llm_of(model, long_prefill_threshold=chunk) as chunked:
                (output,) = greedy(chunked, [reference.long.prompt_token_ids], [NUM_TOKENS])
                assert tokens_of(output) == whole.found[0]
