"""Structured output through the whole engine: batches, preemption, choices, logprobs, seeds, and what contradicts it.

The Null model and a tiny random llama know nothing of JSON, so whatever is right in a reply is the grammar's work.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM, FinishReason, SamplingParams, StructuredOutput, StructuredOutputsParams
from octavo.core.base.errors import InvalidRequest
from octavo.core.engine.engine import Engine
from octavo.core.engine.wire import EngineRequest
from octavo.core.grammar import compiler as compiler_module
from tests.engine.worlds import NullWorld, check_all_is_free, drive, script
from tests.fakes import tiny_models
from tests.grammar.schemas import is_valid, random_schema

END = 2
"""<|im_end|>"""
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}, "adult": {"type": "boolean"}},
    "required": ["age", "adult"],
    "additionalProperties": False,
}
PHONE = StructuredOutput(regex=r"[0-9]{3}-[0-9]{4}")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tiny random llama over SmolLM2's vocabulary."""
    model = tiny_models.make_llama(vocab_size=49152)
    directory = tiny_models.save(model, tmp_path_factory.mktemp("wide"))
    with LLM(
        str(directory),
        tokenizer="smollm2",
        backend="cpu",
        num_threads=1,
        progress=False,
        num_kv_blocks=400,
        block_size=4,
    ) as made:
        yield made


def reply(llm: LLM, structured: StructuredOutput | None, prompt: str = "Hello", **fields: Any) -> Any:
    (output,) = llm.generate(prompt, SamplingParams(**({"max_tokens": 80, "seed": 1} | fields), structured=structured))
    return output.outputs[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replies_have_their_forms(llm: LLM, temperature: float) -> None:
    person = reply(llm, StructuredOutput(json_schema=PERSON), temperature=temperature)
    assert is_valid(json.loads(person.text), PERSON)
    assert person.finish_reason is FinishReason.STOP
    phone = reply(llm, PHONE, temperature=temperature)
    assert re.fullmatch(r"\d{3}-\d{4}", phone.text)
    assert phone.finish_reason is FinishReason.STOP
    assert reply(llm, StructuredOutputsParams(choice=("yes", "no")), temperature=temperature).text in ("yes", "no")


def test_max_tokens_cuts_a_reply_that_is_then_the_beginning_of_a_valid_one(llm: LLM) -> None:
    cut = reply(llm, PHONE, max_tokens=3)
    assert cut.finish_reason is FinishReason.LENGTH
    assert re.match(r"^\d{1,3}(-\d{0,4})?$", cut.text)


def test_replies_do_not_depend_on_their_batch(llm: LLM) -> None:
    forms = [PHONE, None, StructuredOutput(json_schema=PERSON), None, StructuredOutput(choice=("a", "b")), PHONE]
    params = [
        SamplingParams(max_tokens=60, seed=i, temperature=1.0, structured=form, presence_penalty=0.5)
        for i, form in enumerate(forms)
    ]
    prompts = [f"Prompt {i}" for i in range(len(forms))]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, each)[0].outputs[0].token_ids for prompt, each in zip(prompts, params, strict=True)]
    assert together == alone


def test_each_choice_follows_the_grammar_by_itself(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(n=3, seed=5, max_tokens=40, structured=PHONE))
    texts = [choice.text for choice in output.outputs]
    assert all(re.fullmatch(r"\d{3}-\d{4}", text) for text in texts)
    assert len(set(texts)) == 3


def test_logprobs_stay_the_models_own(llm: LLM) -> None:
    form = StructuredOutput(choice=("yes", "no"))
    bound = reply(llm, form, logprobs=5, temperature=0.0)
    free = reply(llm, None, logprobs=5, temperature=0.0, max_tokens=1)
    top = {token_id: entry.logprob for token_id, entry in free.logprobs[0].items()}
    chosen = bound.token_ids[0]
    assert len(bound.logprobs) == len(bound.token_ids)
    assert {t: e.logprob for t, e in bound.logprobs[0].items() if t != chosen} == {
        t: top[t] for t in top if t != chosen
    }
    assert -1e9 < bound.logprobs[0][chosen].logprob < 0
    assert bound.logprobs[0][chosen].rank > 5  # the grammar chose it, not the model


def test_the_same_seed_gives_the_same_reply(llm: LLM) -> None:
    texts = [reply(llm, PHONE, seed=seed).text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("seed", range(12))
def test_every_finished_reply_to_a_random_schema_is_valid(llm: LLM, seed: int) -> None:
    schema = random_schema(random.Random(1000 + seed))
    done = reply(llm, StructuredOutput(json_schema=schema), seed=seed, max_tokens=400, temperature=1.0)
    assert done.finish_reason is FinishReason.STOP
    assert is_valid(json.loads(done.text), schema)


def test_white_space_that_the_model_loves_is_bounded(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    bias = {i: 20.0 for text in (" ", "\n", "  ", "\n\n", "    ") for i in tokenizer.encode(text, False)}
    loved = reply(llm, StructuredOutput(json_schema=PERSON), logit_bias=bias, max_tokens=256, temperature=0.0)
    assert loved.finish_reason is FinishReason.STOP
    assert is_valid(json.loads(loved.text), PERSON)
    assert sum(char in " \n\t" for char in loved.text) >= 5  # it was tempted


def test_a_number_does_not_run_for_ever(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    digits = {tokenizer.encode(str(digit), False)[0]: 80.0 for digit in range(1, 10)}
    number = reply(llm, StructuredOutput(json_schema={}), logit_bias=digits, max_tokens=200, temperature=0.0)
    assert number.finish_reason is FinishReason.STOP
    assert type(json.loads(number.text)) in (int, float)


def test_bans_hold_inside_the_grammar(llm: LLM) -> None:
    form = StructuredOutput(choice=("yes", "no"))
    for seed in range(4):
        assert reply(llm, form, bad_words=["yes", "y", "ye"], seed=seed).text == "no"


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_form_that_is_complete_ends_before_min_tokens(llm: LLM, penalty: float) -> None:
    form = StructuredOutput(choice=("yes", "no"))
    done = reply(llm, form, min_tokens=20, max_tokens=30, repetition_penalty=penalty)
    assert (done.finish_reason, done.text in ("yes", "no")) == (FinishReason.STOP, True)


@pytest.mark.parametrize(
    "fields",
    [{"allowed_token_ids": [100]}, {"bad_words": ["yes", "no", "y", "n", "ye"]}],
)
def test_a_combination_that_leaves_nothing_ends_with_an_error(llm: LLM, fields: dict[str, Any]) -> None:
    outputs = llm.generate(
        ["Hello", "Hello"],
        [
            SamplingParams(max_tokens=30, structured=StructuredOutput(choice=("yes", "no")), **fields),
            SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
        ],
    )
    stuck, neighbour = (output.outputs[0] for output in outputs)
    assert stuck.finish_reason is FinishReason.ERROR
    assert stuck.error is not None
    assert "structured output" in stuck.error
    assert neighbour.finish_reason is FinishReason.LENGTH


def test_a_stop_string_cuts_a_structured_reply(llm: LLM) -> None:
    cut = reply(llm, PHONE, stop=["-"])
    assert re.fullmatch(r"\d{3}", cut.text)
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, "-")


def test_contradictions_are_refused_at_the_door(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured=PHONE)
    with pytest.raises(InvalidRequest, match="unclosed group"):
        llm.generate("Hello", SamplingParams(structured=StructuredOutput(regex="(")))
    assert llm.stats().num_waiting == 0


def test_a_model_without_a_tokenizer_refuses(null: NullWorld) -> None:
    with null.llm() as llm, pytest.raises(InvalidRequest, match="needs a tokenizer"):
        llm.generate([1, 2], SamplingParams(structured=PHONE))


# -- the engine by itself ------------------------------------------------------------------------------------


@pytest.fixture
def engine(null: NullWorld) -> Iterator[Engine]:
    """The Null model with SmolLM2's vocabulary, and a KV cache that is too small for its requests."""
    facts = {"vocab_size": 49152, "eos_token_id": END}
    made = null.engine(facts, tokenizer="smollm2", num_kv_blocks=8, block_size=4, max_num_seqs=4)
    yield made
    made.close()


def asks(name: str, structured: StructuredOutput | None, **fields: Any) -> EngineRequest:
    params = SamplingParams(**({"max_tokens": 20, "seed": 3} | fields), structured=structured)
    return EngineRequest(request_id=name, prompt_token_ids=[5, 6, 7], params=params, eos_token_ids=(END,))


def test_a_preempted_request_goes_on_in_its_grammar(engine: Engine, llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    form = StructuredOutput(regex="[0-9]{12}")
    crowd = drive(engine, [asks(str(i), form, seed=i) for i in range(4)])
    assert engine.stats().preemptions > 0
    for i in range(4):
        assert re.fullmatch("[0-9]{12}", tokenizer.decode(crowd[(str(i), 0)].token_ids))
        alone = drive(engine, [asks("alone", form, seed=i)])
        assert alone[("alone", 0)].token_ids == crowd[(str(i), 0)].token_ids
    check_all_is_free(engine)


def test_a_request_waits_for_its_grammar_and_others_pass_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    may_compile = threading.Event()
    grammar_of = compiler_module.grammar_of

    def slow(*arguments: Any) -> str:
        may_compile.wait(20)
        return grammar_of(*arguments)

    monkeypatch.setattr(compiler_module, "grammar_of", slow)
    engine.add_request(asks("bound", PHONE))
    engine.add_request(asks("free", None, max_tokens=4))
    ended = set()
    while "free" not in ended:
        ended |= {output.request_id for output in engine.step() if output.finish_reason is not None}
    assert "bound" not in ended
    assert engine.stats().num_waiting == 1
    may_compile.set()
    assert drive(engine)[("bound", 0)].finish_reason is FinishReason.STOP


def test_a_grammar_that_is_late_ends_its_request_alone(null: NullWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(compiler_module, "grammar_of", lambda *_: never.wait(5) and "")
    facts = {"vocab_size": 49152, "eos_token_id": END}
    engine = null.engine(facts, tokenizer="smollm2", grammar_timeout_seconds=0.05, num_kv_blocks=100)
    replies = drive(engine, [asks("late", PHONE), asks("free", None, max_tokens=4)])
    never.set()
    assert replies[("late", 0)].finish_reason is FinishReason.ERROR
    assert "longer than 0.05 s" in str(replies[("late", 0)].error)
    assert replies[("free", 0)].finish_reason is FinishReason.LENGTH
    check_all_is_free(engine)
    engine.close()


def test_an_aborted_request_leaves_nothing(engine: Engine) -> None:
    engine.add_request(asks("gone", PHONE))
    engine.abort([("gone", 0)])
    assert not engine.has_work()
    assert drive(engine, [asks("gone", PHONE)])[("gone", 0)].finish_reason is FinishReason.STOP
    check_all_is_free(engine)


def test_a_processor_that_fights_the_grammar_fails_alone(engine: Engine) -> None:
    forced = dataclasses.replace(asks("forced", None), params=script([9, 9]).with_(structured=PHONE))
    replies = drive(engine, [forced, asks("fine", PHONE)])
    assert replies[("forced", 0)].finish_reason is FinishReason.ERROR
    assert "no token is left" in str(replies[("forced", 0)].error)
    assert replies[("fine", 0)].finish_reason is FinishReason.STOP


def test_ranks_follow_the_grammar(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rank 0 draws under the masks; the other takes over what it drew."""
    directory = tiny_models.save(tiny_models.make_llama(vocab_size=49152), tmp_path_factory.mktemp("split"))
    form = StructuredOutput(json_schema=PERSON)
    with LLM(
        str(directory), tokenizer="smollm2", backend="cpu", num_threads=2, progress=False, num_kv_blocks=400,
        block_size=4, tensor_parallel_size=2,
    ) as split:  # fmt: skip
        for seed in range(2):
            done = reply(split, form, seed=seed)
            assert done.finish_reason is FinishReason.STOP
            assert is_valid(json.loads(done.text), PERSON)
        assert re.fullmatch(r"\d{3}-\d{4}", reply(split, PHONE, temperature=0.0).text)
