"""Sampling, log probabilities and failures of single requests, through the whole engine."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, FinishReason, SamplingParams
from octavo.core.base.errors import InvalidRequest
from tests.engine.worlds import NullWorld, TinyModels
from tests.fakes import tiny_models

VOCAB = 199
RARE = 42
"""Its embedding is NaN in the model `poisoned`."""
PROMPT = tiny_models.random_prompt(VOCAB, 20)


@pytest.fixture(scope="module")
def llama(tiny: TinyModels) -> Iterator[LLM]:
    with tiny.llm("llama") as llm:
        yield llm


@pytest.fixture(scope="module")
def poisoned(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The same llama with one embedding that is NaN."""
    directory = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(tiny.directory("llama"), directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][RARE] = math.nan
    save_file(weights, directory / "model.safetensors")
    with LLM(str(directory), backend="cpu", progress=False, block_size=4, num_kv_blocks=500) as llm:
        yield llm


def only(logits_V: torch.Tensor, token_id: int) -> torch.Tensor:
    """Logits that leave one token."""
    logits_V.fill_(-math.inf)[token_id] = 0.0
    return logits_V


def tokens(llm: LLM, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[int]:
    return llm.generate([prompt], params)[0].outputs[0].token_ids


def raw_logits(llm: LLM, prompt: Sequence[int] = PROMPT) -> torch.Tensor:
    """The logits after a prompt."""
    seen: list[torch.Tensor] = []

    def look(_prompt: Sequence[int], _output: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
        seen.append(logits_V.clone())
        return logits_V

    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, logits_processors=[look]))
    return seen[0]


class TestLogprobs:
    @pytest.mark.parametrize(
        "changes",
        [
            {"temperature": 1.0, "top_k": 1},
            {"temperature": 1.0, "allowed_token_ids": [3, 5]},
            {"temperature": 1.0, "top_p": 0.01},
            {"logits_processors": [lambda _prompt, _output, logits_V: only(logits_V, 9)]},
            {"logit_bias": {7: -100}, "temperature": 0.0},
        ],
    )
    def test_every_one_is_finite_and_json(self, llama: LLM, changes: dict[str, Any]) -> None:
        """vllm#10234, sglang#5984: minus infinity can't be put in JSON. Values are the model's own, before any mask."""
        params = SamplingParams(max_tokens=6, logprobs=5, prompt_logprobs=5, seed=1, **changes)
        (output,) = llama.generate([PROMPT], params)
        choice = output.outputs[0]
        for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
            assert next(iter(position)) == token_id
            assert 5 <= len(position) <= 6
            values = [entry.logprob for entry in position.values()]
            assert json.loads(json.dumps(values, allow_nan=False)) == values
        assert choice.cumulative_logprob == sum(
            position[token].logprob for token, position in zip(choice.token_ids, choice.logprobs, strict=True)
        )

    def test_they_are_of_the_raw_distribution(self, llama: LLM) -> None:
        """vllm#9453: logprobs changed with temperature and top_k."""
        expected = raw_logits(llama).log_softmax(-1)
        for changes in ({"temperature": 0.0}, {"temperature": 5.0}, {"top_k": 3}, {"presence_penalty": 2.0}):
            (output,) = llama.generate([PROMPT], SamplingParams(max_tokens=1, logprobs=4, seed=2, **changes))
            position = output.outputs[0].logprobs[0]
            best = expected.topk(4)
            assert set(best.indices.tolist()) <= set(position)
            for token_id, entry in position.items():
                assert entry.logprob == pytest.approx(expected[token_id].item(), abs=1e-5)
                assert entry.rank == 1 + int((expected > expected[token_id]).sum())

    @pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 128, 129, 130, 200])
    @pytest.mark.parametrize("max_tokens", [0, 3])
    def test_of_the_prompt_at_every_length(self, llama: LLM, length: int, max_tokens: int) -> None:
        """vllm#6521, #2706, #2995, lm-eval#1411: scoring a prompt with max_tokens 0."""
        prompt = tiny_models.random_prompt(VOCAB, length)
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=2, temperature=0.0)
        first, second = (llama.generate([prompt], params)[0] for _ in range(2))
        assert len(first.prompt_logprobs) == length
        assert first.prompt_logprobs[0] is None
        for token_id, position in zip(prompt[1:], first.prompt_logprobs[1:], strict=True):
            assert next(iter(position)) == token_id
            assert 2 <= len(position) <= 3
        assert len(first.outputs[0].token_ids) == max_tokens
        assert first.outputs[0].finish_reason is FinishReason.LENGTH
        assert (second.prompt_logprobs, second.outputs) == (first.prompt_logprobs, first.outputs)

    def test_max_tokens_0_without_them_is_an_empty_reply(self, llama: LLM) -> None:
        (output,) = llama.generate([PROMPT], SamplingParams(max_tokens=0, logprobs=1))
        assert (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) == ([], [], None)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH

    def test_of_the_prompt_belong_to_the_request_not_to_a_choice(self, llama: LLM) -> None:
        (one,) = llama.generate([PROMPT], SamplingParams(prompt_logprobs=1, max_tokens=1))
        (four,) = llama.generate([PROMPT], SamplingParams(prompt_logprobs=1, max_tokens=1, n=4))
        assert four.prompt_logprobs == one.prompt_logprobs


class TestSeeds:
    def test_a_seed_repeats_the_whole_set_of_choices(self, llama: LLM) -> None:
        """vllm#11898, #16863: n > 1 with a seed gave n equal replies."""
        params = SamplingParams(n=3, seed=7, temperature=2.0, max_tokens=12)
        first, second = (llama.generate([PROMPT], params)[0] for _ in range(2))
        assert first.outputs == second.outputs
        assert len({tuple(choice.token_ids) for choice in first.outputs}) == 3
        other = llama.generate([PROMPT], params.with_(seed=8))[0]
        assert other.outputs != first.outputs

    def test_a_choice_that_ends_early_ends_nothing_else(self, llama: LLM) -> None:
        """vllm#11898: once choice 0 ended, the others got no more chunks."""
        params = SamplingParams(n=3, seed=7, temperature=2.0, max_tokens=12)
        free = llama.generate([PROMPT], params)[0].outputs
        later = {token for choice in free[1:] for token in choice.token_ids}
        end = next(token for token in free[0].token_ids if token not in later)
        pieces = list(llama.generate_stream(PROMPT, params.with_(stop_token_ids=[end])))
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        reasons = {}
        for piece in pieces:
            for part in piece.outputs:
                found[part.index] += part.token_ids
                if part.finish_reason is not None:
                    reasons[part.index] = (part.finish_reason, part.stop_reason)
        assert found[0] == free[0].token_ids[: free[0].token_ids.index(end) + 1]
        assert [found[1], found[2]] == [free[1].token_ids, free[2].token_ids]
        assert reasons == {0: ("stop", end), 1: ("length", None), 2: ("length", None)}
        assert pieces[-1].finished

    def test_without_a_seed_requests_differ_and_an_engine_repeats_itself(self, tiny: TinyModels) -> None:
        params = SamplingParams(temperature=2.0, max_tokens=12)
        runs = []
        for seed in (1, 1, 2):
            with tiny.llm("llama", seed=seed) as llm:
                runs.append([output.outputs[0].token_ids for output in llm.generate([PROMPT] * 2, params)])
        assert runs[0][0] != runs[0][1]
        assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny_temperatures_are_greedy(tiny: TinyModels, dtype: str) -> None:
    """vllm#3063, #2937: logits overflow at temperatures from 1e-4 to 1e-5."""
    with tiny.llm("llama", dtype=dtype) as llm:
        greedy = tokens(llm, SamplingParams(temperature=0.0))
        for temperature in (1e-7, 1e-5, 1e-4, 1e-3):
            assert tokens(llm, SamplingParams(temperature=temperature, seed=3)) == greedy


def test_top_k_beyond_the_vocabulary_and_greedy_neighbours(llama: LLM) -> None:
    """sendnn-inference#543, vllm#14234."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, seed=1, top_k=VOCAB),
        SamplingParams(temperature=1.0, seed=1, top_k=10 * VOCAB),
        SamplingParams(temperature=1.0, seed=1, top_k=-1),
        SamplingParams(temperature=1.0, seed=1, top_k=1),
    ]
    found = [output.outputs[0].token_ids for output in llama.generate([PROMPT] * len(kinds), kinds)]
    assert found == [tokens(llama, kind) for kind in kinds]
    assert found[1] == found[2] == found[3] == found[4]
    assert found[0] == found[5]


class TestPenalties:
    """vllm-metal#69, vllm#1424: what the first step is penalised for."""

    word = [11] * 6

    def test_repetition_counts_the_prompt(self, llama: LLM) -> None:
        from transformers import RepetitionPenaltyLogitsProcessor

        logits = raw_logits(llama, self.word)
        for penalty in (0.5, 1.5, 30.0):
            hf = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([self.word]), logits[None].clone())[0]
            params = SamplingParams(temperature=0.0, max_tokens=1, repetition_penalty=penalty)
            assert tokens(llama, params, self.word) == [int(hf.argmax())]

    def test_presence_and_frequency_do_not(self, llama: LLM) -> None:
        first = tokens(llama, SamplingParams(temperature=0.0, max_tokens=1), self.word)
        for changes in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
            for prompt_end in ([], first):
                params = SamplingParams(temperature=0.0, max_tokens=1, **changes)
                prompt = self.word + prompt_end
                assert tokens(llama, params, prompt) == [int(raw_logits(llama, prompt).argmax())]


def test_bad_words_in_every_spelling(scripted: LLM) -> None:
    """vllm#32557, #23886, TensorRT-LLM#15706: one token with a space, three without."""
    spaced, bare = 24098, [888, 12895, 483]
    encode = scripted.tokenizer.encode
    assert (encode(" exaggerated"), encode("exaggerated")) == ([spaced], bare)
    bias = {spaced: 100} | dict.fromkeys(bare, 50)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, logit_bias=bias, ignore_eos=True)
    assert spaced in tokens(scripted, params)
    clean = params.with_(bad_words=["exaggerated", "described"])
    (output,) = scripted.generate("It was", clean)
    text = output.outputs[0].text
    assert "exaggerated" not in text
    assert {888, 12895, 483} & set(output.outputs[0].token_ids)  # parts of it stay possible
    alone = scripted.generate("It was", clean.with_(bad_words=["described"]))[0].outputs[0].text
    assert "exaggerated" in alone


def test_ids_out_of_range_are_refused_while_a_neighbour_runs(llama: LLM) -> None:
    """vllm#16529, #6866, #35231: such an id reached the worker and ended the engine."""
    good = SamplingParams(temperature=0.0, max_tokens=12)
    expected = tokens(llama, good)
    stream = llama.generate_stream(PROMPT, good)
    found = next(stream).outputs[0].token_ids
    for prompt, changes, field in (
        ([1], {"logit_bias": {VOCAB: 5}}, "logit_bias"),
        ([-1], {}, "prompt"),
        ([999_999], {}, "prompt"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([1], {"allowed_token_ids": [5, -2]}, "allowed_token_ids"),
    ):
        with pytest.raises(InvalidRequest, match=rf"outside the vocabulary 0\.\.{VOCAB - 1}") as caught:
            llama.generate([prompt], SamplingParams(**changes))
        assert caught.value.field == field
        found += next(stream).outputs[0].token_ids
    assert found + [token for piece in stream for token in piece.outputs[0].token_ids] == expected


class TestFailures:
    """What is wrong with one request ends that one alone."""

    def test_nan_logits_end_one_request(self, poisoned: LLM, llama: LLM) -> None:
        """mlx-vlm#1163, vllm#47346: an endless '!' with 200, or a flood of traces."""
        clean = [token if token != RARE else 1 for token in PROMPT]
        params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
        (expected,) = llama.generate([clean], params)
        errors = poisoned.stats().finished[FinishReason.ERROR]
        for _ in range(2):  # the second time nothing of the first may be found in the cache
            prompts = [[*clean, RARE, 3], clean, [RARE]]
            failed, good, alone = poisoned.generate(prompts, params)
            for output in (failed, alone):
                choice = output.outputs[0]
                assert (choice.finish_reason, choice.token_ids) == (FinishReason.ERROR, [])
                assert choice.error == "logits are NaN"
                assert output.finished
            assert good.outputs == expected.outputs
        assert poisoned.stats().finished[FinishReason.ERROR] == errors + 4
        assert poisoned.stats().kv_blocks_used == 0

    def test_nan_in_a_scored_prompt_ends_it_too(self, poisoned: LLM) -> None:
        for max_tokens in (0, 4):
            params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1)
            failed, good = poisoned.generate([[*PROMPT[:5], RARE, 1, 2], [1, 2, 3]], params)
            assert failed.outputs[0].finish_reason is FinishReason.ERROR
            assert "NaN" in failed.outputs[0].error
            assert failed.prompt_logprobs is None
            assert len(good.prompt_logprobs) == 3

    def test_nan_ends_every_choice(self, poisoned: LLM) -> None:
        (output,) = poisoned.generate([[*PROMPT[:5], RARE]], SamplingParams(n=3, max_tokens=4))
        assert [choice.finish_reason for choice in output.outputs] == [FinishReason.ERROR] * 3
        assert poisoned.stats().kv_blocks_used == 0

    def test_a_logits_processor_that_raises(self, null: NullWorld) -> None:
        def broken(_prompt: Sequence[int], output: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
            if len(output) == 2:
                raise ValueError("two is enough")
            return logits_V

        with null.llm(num_kv_blocks=50) as llm:
            bad = SamplingParams(temperature=0.0, max_tokens=5, logits_processors=[broken])
            good = bad.with_(logits_processors=())
            first, second = llm.generate([[1], [1]], [bad, good])
            assert first.outputs[0].finish_reason is FinishReason.ERROR
            assert first.outputs[0].error == "a logits processor failed: ValueError: two is enough"
            assert first.outputs[0].token_ids == second.outputs[0].token_ids[:2]
            assert second.outputs[0].finish_reason is FinishReason.LENGTH

    def test_a_request_that_leaves_no_token_to_sample(self, llama: LLM) -> None:
        params = SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2, max_tokens=4)
        (output,) = llama.generate([PROMPT], params)
        assert output.outputs[0].finish_reason is FinishReason.ERROR
        assert "no token is left to sample" in output.outputs[0].error


def test_a_processor_sees_prompt_and_outputs(llama: LLM) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def look(prompt: Sequence[int], output: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
        seen.append((list(prompt), list(output)))
        return logits_V

    found = tokens(llama, SamplingParams(temperature=0.0, max_tokens=4, logits_processors=[look]))
    assert seen == [(PROMPT, found[:i]) for i in range(4)]


def test_a_scratch_directory_is_all_a_model_needs(tiny: TinyModels, tmp_path: Path) -> None:
    """The model's files may go once it is loaded."""
    shutil.copytree(tiny.directory("llama"), tmp_path / "model")
    llm = LLM(str(tmp_path / "model"), backend="cpu", progress=False, num_kv_blocks=50)
    shutil.rmtree(tmp_path / "model")
    assert len(tokens(llm, SamplingParams(max_tokens=3))) == 3
    llm.close()
