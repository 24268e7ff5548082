"""`LLM` as its callers see it: shapes like vLLM's, one answer per prompt in order, streams that add up to the whole."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.base.errors import ConfigError, EngineDead, InvalidRequest
from octavo.core.base.params import FinishReason
from octavo.core.engine.outputs import CompletionOutput, RequestOutput
from tests.engine.worlds import NullWorld, script
from tests.fakes.null_model import continuation

ABC, DEF, GH = 35542, 33203, 23960
VOCAB = 49152
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def check_is_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


def test_outputs_come_in_the_order_of_the_prompts(scripted: LLM) -> None:
    prompts = [[7] * length for length in (30, 1, 12, 3, 25)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 9, 3, 20, 2)]
    outputs = scripted.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for output, prompt, wanted in zip(outputs, prompts, params, strict=True):
        assert output.outputs[0].token_ids == continuation(prompt, wanted.max_tokens or 0, VOCAB)
        assert output.finished
    assert len({output.request_id for output in outputs}) == len(prompts)


def test_one_prompt_or_several_strings_or_ids(scripted: LLM) -> None:
    hello = scripted.tokenizer.encode("Hello there")
    by_text, by_ids = scripted.generate("Hello there", GREEDY), scripted.generate(hello, GREEDY)
    assert len(by_text) == len(by_ids) == 1
    assert (by_text[0].prompt, by_ids[0].prompt) == ("Hello there", None)
    assert by_text[0].prompt_token_ids == by_ids[0].prompt_token_ids == hello
    assert by_text[0].outputs[0].token_ids == by_ids[0].outputs[0].token_ids
    mixed = scripted.generate(("Hello there", hello), GREEDY)
    assert [output.outputs for output in mixed] == [by_text[0].outputs, by_ids[0].outputs]
    assert scripted.generate([], GREEDY) == []


def test_no_parameters_mean_the_defaults(scripted: LLM) -> None:
    (output,) = scripted.generate([[3]], None)
    assert len(output.outputs[0].token_ids) <= SamplingParams().max_tokens


def test_signatures_are_those_of_vllm() -> None:
    """A script that passes `sampling_params` by name changes one import."""
    assert list(inspect.signature(LLM.generate).parameters)[1:] == ["prompts", "sampling_params", "lora_request"]
    assert list(inspect.signature(LLM.chat).parameters)[1:3] == ["messages", "sampling_params"]
    for name in ("request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished"):
        assert name in RequestOutput.__dataclass_fields__
    for name in ("index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason"):
        assert name in CompletionOutput.__dataclass_fields__


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        ([[1], [2]], [GREEDY], "sampling_params"),
        ([[1]], {"max_tokens": 3}, "sampling_params"),
        ([[1], []], GREEDY, "prompt"),
        ("", GREEDY, "prompt"),
        ([[1], [VOCAB]], GREEDY, "prompt"),
        ([[-1]], GREEDY, "prompt"),
        ([["a"]], GREEDY, "prompt"),
        ([[1.0]], GREEDY, "prompt"),
        ([[True]], GREEDY, "prompt"),
        ([3.5], GREEDY, "prompt"),
        (7, GREEDY, "prompt"),
        ([b"abc"], GREEDY, "prompt"),
        ({"prompt": "Hi"}, GREEDY, "prompt"),
        ("\ud800", GREEDY, "prompt"),
        ("word " * 100_000, GREEDY, "prompt"),
        ([[1] * 4097], GREEDY, "prompt"),
        ([[1] * 4000], SamplingParams(max_tokens=97), "max_tokens"),
        ([[1] * 4000], SamplingParams(max_tokens=None, min_tokens=97), "min_tokens"),
        ([[1]], SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids"),
        ([[1]], SamplingParams(allowed_token_ids=[-1]), "allowed_token_ids"),
        ([[1]], SamplingParams(logit_bias={VOCAB: 5}), "logit_bias"),
        ([[1]], SamplingParams(bad_words_token_ids=[[1, VOCAB]]), "bad_words_token_ids"),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_of_it_runs(scripted: LLM, prompts: Any, params: Any, field: str) -> None:
    """vllm#16529, #6866, #35231; vllm#33418 (the limit and both counts)."""
    steps = scripted.stats().steps
    with pytest.raises(InvalidRequest) as caught:
        scripted.generate(prompts, params)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert scripted.stats().steps == steps
    check_is_idle(scripted)


def test_the_limits_are_exact(scripted: LLM) -> None:
    """vllm#33418: exactly max_model_len is allowed, and max_tokens None fills what is left."""
    (exact,) = scripted.generate([[1] * 4090], SamplingParams(max_tokens=6, ignore_eos=True))
    (filled,) = scripted.generate([[1] * 4090], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(exact.outputs[0].token_ids) == len(filled.outputs[0].token_ids) == 6
    assert filled.outputs[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(InvalidRequest, match=r"4090 tokens and max_tokens is 7.*4096.*at most 6"):
        scripted.generate([[1] * 4090], SamplingParams(max_tokens=7))


def test_a_refused_prompt_takes_its_neighbours_along(null: NullWorld) -> None:
    with null.llm(num_kv_blocks=11, max_model_len=160) as llm:
        with pytest.raises(InvalidRequest):
            llm.generate([[1] * 10, [1] * 161], SamplingParams(max_tokens=1))
        check_is_idle(llm)
        assert llm.stats().steps == 0


def test_pieces_of_a_stream_add_up_to_the_whole(scripted: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20, logprobs=2, prompt_logprobs=1)
    (whole,) = scripted.generate("Some words to begin with", params)
    pieces = list(scripted.generate_stream("Some words to begin with", params))
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[0].prompt_logprobs == whole.prompt_logprobs
    for index, choice in enumerate(whole.outputs):
        gained = [part for piece in pieces for part in piece.outputs if part.index == index]
        assert "".join(part.text for part in gained) == choice.text
        assert [token for part in gained for token in part.token_ids] == choice.token_ids
        assert [position for part in gained for position in part.logprobs or []] == choice.logprobs
        assert gained[-1].cumulative_logprob == choice.cumulative_logprob
        assert [part.finish_reason for part in gained[:-1]] == [None] * (len(gained) - 1)
        assert gained[-1].finish_reason is choice.finish_reason
    check_is_idle(scripted)


def test_streams_and_calls_may_alternate(scripted: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (12, 5, 30)]
    prompts = [[1, 2], [3], [4, 5, 6]]
    streams = [scripted.generate_stream(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    found: list[list[int]] = [[], [], []]
    for _ in range(4):
        for tokens, stream in zip(found, streams, strict=True):
            tokens += next(stream).outputs[0].token_ids
    (output,) = scripted.generate([[9]], GREEDY)
    assert output.outputs[0].token_ids == continuation([9], 6, VOCAB)
    for tokens, stream in zip(found, streams, strict=True):
        tokens += [token for piece in stream for token in piece.outputs[0].token_ids]
    assert found == [continuation(p, each.max_tokens or 0, VOCAB) for p, each in zip(prompts, params, strict=True)]
    check_is_idle(scripted)


def test_closing_a_stream_frees_its_blocks(scripted: LLM) -> None:
    stream = scripted.generate_stream([1] * 100, SamplingParams(n=2, max_tokens=50, ignore_eos=True))
    next(stream)
    next(stream)
    assert scripted.stats().kv_blocks_used > 0
    stream.close()
    check_is_idle(scripted)


def test_a_stream_that_nobody_reads_holds_nothing(scripted: LLM) -> None:
    scripted.generate_stream([1] * 100, SamplingParams(max_tokens=50))
    check_is_idle(scripted)
    with pytest.raises(InvalidRequest):  # what can be known without the engine is refused at once
        scripted.generate_stream([VOCAB])


def test_what_is_used_after_the_end_says_so(null: NullWorld) -> None:
    with null.llm(num_kv_blocks=20) as llm:
        stream = llm.generate_stream([1], SamplingParams(max_tokens=9))
        next(stream)
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([[1]])
    with pytest.raises(EngineDead, match="closed"):
        next(stream)
    with pytest.raises(EngineDead, match="closed"):
        next(llm.generate_stream([1]))


def test_an_interrupt_in_a_step_leaves_one_clear_error(null: NullWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = null.llm(num_kv_blocks=20)

    def interrupt(*_args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("octavo.core.engine.runner.ModelRunner.execute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1]])
    with pytest.raises(EngineDead, match="KeyboardInterrupt"):
        llm.generate([[1]])
    llm.close()


def test_without_a_tokenizer_token_ids_are_served(null: NullWorld) -> None:
    with null.llm(num_kv_blocks=20) as llm:
        assert llm.tokenizer is None
        (output,) = llm.generate([[1, 2]], SamplingParams(temperature=0.0, max_tokens=4, logprobs=1))
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", continuation([1, 2], 4, 97))
        assert all(entry.decoded_token is None for entry in output.outputs[0].logprobs[0].values())
        for prompt, params in (
            ("Hi", GREEDY),
            ([1], SamplingParams(stop="x")),
            ([1], SamplingParams(bad_words=["x"])),
        ):
            with pytest.raises(InvalidRequest, match="needs a tokenizer, and this model has none; give token ids"):
                llm.generate([prompt], params)
        with pytest.raises(InvalidRequest, match="messages needs a tokenizer"):
            llm.chat([{"role": "user", "content": "Hi"}])


def test_chat_renders_the_models_template(scripted: LLM) -> None:
    talk = [{"role": "user", "content": "What is a heron?"}]
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is a heron?<|im_end|>\n<|im_start|>assistant\n"
    )
    (one,) = scripted.chat(talk, script([ABC, DEF]))
    assert one.prompt_token_ids == scripted.tokenizer.encode(text)
    assert one.outputs[0].text == "ABCDEF"
    two = scripted.chat([talk, [*talk, {"role": "assistant", "content": "A bird."}, talk[0]]], script([GH]))
    assert len(two) == 2
    assert two[0].prompt_token_ids == one.prompt_token_ids != two[1].prompt_token_ids
    streamed = list(scripted.chat_stream(talk, script([ABC, DEF])))
    assert "".join(piece.outputs[0].text for piece in streamed) == "ABCDEF"
    with pytest.raises(InvalidRequest):
        scripted.chat([])


def test_chat_without_a_template_is_one_error(scripted_gemma: LLM) -> None:
    """sglang#892: Gemma's GGUF has no chat template."""
    with pytest.raises(InvalidRequest, match="no chat template"):
        scripted_gemma.chat([{"role": "user", "content": "Hi"}])
    (output,) = scripted_gemma.generate("Hi", script([107], then=1))
    assert output.prompt_token_ids[0] == 2  # BOS, once
    assert output.prompt_token_ids.count(2) == 1


def test_threads_that_share_an_llm_take_turns(scripted: LLM) -> None:
    prompts = [[3, 4, 5 + i] for i in range(4)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    alone = [scripted.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]

    def stream(prompt: list[int]) -> list[int]:
        return [
            token_id for piece in scripted.generate_stream(prompt, params) for token_id in piece.outputs[0].token_ids
        ]

    with ThreadPoolExecutor(8) as pool:
        whole = [
            pool.submit(lambda p=prompt: scripted.generate(p, params)[0].outputs[0].token_ids) for prompt in prompts
        ]
        streamed = [pool.submit(stream, prompt) for prompt in prompts]
        assert [each.result() for each in whole] == alone
        assert [each.result() for each in streamed] == alone


def test_a_mistyped_option_offers_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"max_modellen.*did you mean 'max_model_len'"):
        LLM("smollm2", max_modellen=3)
