"""Text as it comes out of the engine: whole characters, stop strings, end ids. Tokens are forced by a script.

SmolLM2's ids: ABC [35542], DEF [33203], GH [23960], 😀 [10813, 242, 218], ď [143, 233].
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from octavo import LLM, FinishReason, SamplingParams
from octavo.core.engine.outputs import CompletionOutput
from tests.engine.worlds import NullWorld, script
from tests.fakes.null_model import continuation

ABC, DEF, GH = 35542, 33203, 23960
EMOJI, D_CARON = [10813, 242, 218], [143, 233]
IM_END = 2


def whole(llm: LLM, params: SamplingParams) -> CompletionOutput:
    return llm.generate("Hi", params)[0].outputs[0]


def streamed(llm: LLM, params: SamplingParams) -> tuple[list[str], CompletionOutput]:
    """The deltas of a stream, and its last piece."""
    pieces = [piece.outputs[0] for piece in llm.generate_stream("Hi", params)]
    return [piece.text for piece in pieces], pieces[-1]


def ids_of(llm: LLM, *texts: str) -> list[int]:
    """One id per text."""
    return [token for text in texts for token in llm.tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("token_ids", "text"),
    [
        (D_CARON, "ď"),
        (EMOJI, "😀"),
        ([ABC, *EMOJI, *D_CARON, DEF], "ABC😀ďDEF"),
        ([EMOJI[0], ABC], "\ufffdABC"),
        ([*EMOJI, *EMOJI[:2]], "😀\ufffd"),
    ],
)
def test_characters_over_several_tokens(scripted: LLM, token_ids: list[int], text: str) -> None:
    """waybarrios/vllm-mlx#109, Blaizzy/mlx-vlm#1076: each token decoded alone; a character cut by max_tokens."""
    params = script(token_ids).with_(logprobs=1)
    reply = whole(scripted, params)
    deltas, _ = streamed(scripted, params)
    assert reply.text == "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas) == ("\ufffd" not in text)
    assert [next(iter(position)) for position in reply.logprobs] == token_ids
    assert b"".join(map(scripted.tokenizer.token_bytes, token_ids)).decode(errors="replace") == text


def test_sentencepiece_spaces(scripted_gemma: LLM) -> None:
    """waybarrios/vllm-mlx#109: the space before a word is kept; byte tokens join to characters."""
    token_ids = scripted_gemma.tokenizer.encode(" heron and 𐍈!", add_special_tokens=False)
    assert len(token_ids) > 5  # the Gothic letter is four byte tokens
    deltas, last = streamed(scripted_gemma, script(token_ids))
    assert "".join(deltas) == whole(scripted_gemma, script(token_ids)).text == " heron and 𐍈!"
    assert "\ufffd" not in "".join(deltas)
    assert last.finish_reason is FinishReason.LENGTH


def test_any_sequence_of_tokens_has_a_text(scripted: LLM) -> None:
    """vllm#17448, fixed by #19449: byte tokens that are not UTF-8 alone must neither raise nor end the batch."""
    tokenizer = scripted.tokenizer
    partial = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_text(i)]
    assert len(partial) == 314
    rng = random.Random(0)
    sequences = [
        [rng.choice(partial) if rng.random() < 0.7 else rng.randrange(300, 49152) for _ in range(rng.randrange(1, 16))]
        for _ in range(500)
    ]
    for start in range(0, 500, 8):
        batch = sequences[start : start + 8]
        outputs = scripted.generate([[1]] * len(batch), [script(sequence) for sequence in batch])
        for sequence, output in zip(batch, outputs, strict=True):
            assert output.outputs[0].token_ids == sequence
            assert output.outputs[0].text == tokenizer.decode(sequence)
    for sequence in sequences[:40]:
        deltas, _ = streamed(scripted, script(sequence))
        assert "".join(deltas) == tokenizer.decode(sequence)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "matched", "before", "num_tokens"),
    [
        (["DE"], "DE", "ABC", 2),
        (["EFG"], "EFG", "ABCD", 3),
        (["FG"], "FG", "ABCDE", 3),
        (["GH", "EF"], "EF", "ABCD", 2),
        (["FGH", "CDE"], "CDE", "AB", 2),
        (["ABCDEFGH"], "ABCDEFGH", "", 3),
        (["GH", "H"], "GH", "ABCDEF", 3),
        (["B"], "B", "A", 1),
    ],
)
def test_stop_strings_across_tokens(
    scripted: LLM, include: bool, stop: list[str], matched: str, before: str, num_tokens: int
) -> None:
    """vllm#3572, TGI#1039, llama.cpp#11538: a stop that begins or ends inside a token, or spans tokens."""
    params = script([ABC, DEF, GH, ABC, DEF, GH]).with_(stop=stop, include_stop_str_in_output=include, logprobs=0)
    reply = whole(scripted, params)
    assert reply.text == before + (matched if include else "")
    assert (reply.finish_reason, reply.stop_reason) == (FinishReason.STOP, matched)
    assert len(reply.token_ids) == len(reply.logprobs) == num_tokens
    deltas, last = streamed(scripted, params)
    assert "".join(deltas) == reply.text
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, matched)
    stats = scripted.stats()
    assert (stats.num_running, stats.kv_blocks_used) == (0, 0)


def test_a_stop_that_may_still_come_is_held_back(scripted: LLM) -> None:
    """vllm#3574, #2577: nothing of a stop string is sent; what was held for one that does not come is."""
    token_ids = [DEF, GH, *ids_of(scripted, "I", "J")]
    params = script(token_ids)
    deltas, last = streamed(scripted, params.with_(stop="DEFGHIJ"))
    assert ("".join(deltas), last.stop_reason) == ("", "DEFGHIJ")
    for never in ("DEFGHIX", "HIJK"):  # the second: still open when max_tokens ends the reply
        deltas, last = streamed(scripted, params.with_(stop=never))
        assert "".join(deltas) == whole(scripted, params.with_(stop=never)).text == "DEFGHIJ"
        assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, None)
    deltas, _ = streamed(scripted, params.with_(stop="DEFGHIX"))
    assert deltas[:3] == ["", "", ""]


def test_held_text_is_sent_when_an_end_id_or_an_abort_ends_the_reply(scripted: LLM) -> None:
    reply = whole(scripted, script([ABC, DEF, IM_END]).with_(stop="DEFG", max_tokens=9))
    assert (reply.text, reply.finish_reason, reply.stop_reason) == ("ABCDEF", FinishReason.STOP, None)
    assert reply.token_ids == [ABC, DEF, IM_END]


def test_stop_strings_of_one_choice_leave_the_others_alone(scripted: LLM) -> None:
    """vllm#11898: choices end each for itself."""
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    free = scripted.generate("Hi", params)[0].outputs
    stop = next(char for char in free[0].text[5:] if sum(char in choice.text for choice in free) == 1)
    outputs = scripted.generate("Hi", params.with_(stop=stop))[0].outputs
    assert outputs[0].finish_reason is FinishReason.STOP
    assert outputs[0].text == free[0].text[: free[0].text.index(stop)]
    assert outputs[1:] == free[1:]


def test_min_tokens_holds_for_stop_strings_too(scripted: LLM) -> None:
    params = script([ABC, DEF, ABC, DEF, ABC, DEF]).with_(stop="CD")
    assert whole(scripted, params).text == "AB"
    reply = whole(scripted, params.with_(min_tokens=4))
    assert reply.text == "ABCDEFAB"
    assert len(reply.token_ids) == 4


def test_special_tokens_are_left_out_of_the_text_unless_wanted(scripted: LLM) -> None:
    params = script([ABC, 1, DEF]).with_(ignore_eos=True)
    assert whole(scripted, params).text == "ABCDEF"
    assert whole(scripted, params.with_(skip_special_tokens=False)).text == "ABC<|im_start|>DEF"


def test_spaces_before_punctuation_are_not_cleaned_up(scripted: LLM) -> None:
    """TGI#2927: stream and full text differ where decoding tidies up."""
    token_ids = ids_of(scripted, "He said : ' I am n't , ' .")
    deltas, _ = streamed(scripted, script(token_ids))
    assert "".join(deltas) == whole(scripted, script(token_ids)).text == "He said : ' I am n't , ' ."


class TestEndIds:
    """End ids come from generation_config, config and tokenizer together."""

    @pytest.fixture
    def llm(self, null: NullWorld) -> Iterator[LLM]:
        options = {"generation": {"eos_token_id": [2, 0]}, "tokenizer": "smollm2", "num_kv_blocks": 50}
        with null.llm({"vocab_size": 49152}, **options) as llm:
            yield llm

    @pytest.mark.parametrize("end", [2, 0])
    def test_each_of_them_ends_a_reply(self, llm: LLM, end: int) -> None:
        """vllm#4589; the id is among the tokens, not in the text, and no stop_reason of its own."""
        params = script([ABC, end, DEF], then=DEF).with_(max_tokens=20, skip_special_tokens=False)
        reply = whole(llm, params)
        assert (reply.text, reply.token_ids) == ("ABC", [ABC, end])
        assert (reply.finish_reason, reply.stop_reason) == (FinishReason.STOP, None)

    @pytest.mark.parametrize("end", [2, 0])
    def test_ignore_eos_holds_for_all_of_them(self, llm: LLM, end: int) -> None:
        """vllm#4589: ids of generation_config taken for stop ids."""
        reply = whole(llm, script([ABC, end, DEF], then=DEF).with_(max_tokens=20, ignore_eos=True))
        assert len(reply.token_ids) == 20
        assert (reply.finish_reason, reply.stop_reason) == (FinishReason.LENGTH, None)

    def test_min_tokens_holds_all_of_them_back(self, llm: LLM) -> None:
        """vllm#5849, #15407, mlx-vlm#2112."""
        params = SamplingParams(
            temperature=0.0, max_tokens=20, min_tokens=8, logit_bias={0: 100, 2: 99, ABC: 98}, stop_token_ids=[ABC]
        )
        reply = whole(llm, params)
        assert len(reply.token_ids) == 9
        assert not {0, 2, ABC} & set(reply.token_ids[:8])
        assert (reply.token_ids[8], reply.finish_reason) == (0, FinishReason.STOP)

    def test_a_stop_id_is_the_stop_reason(self, llm: LLM) -> None:
        reply = whole(llm, script([ABC, DEF, GH]).with_(stop_token_ids=[GH, DEF]))
        assert (reply.text, reply.token_ids) == ("ABC", [ABC, DEF])
        assert (reply.finish_reason, reply.stop_reason) == (FinishReason.STOP, DEF)


def test_end_ids_of_a_model_without_a_tokenizer(null: NullWorld) -> None:
    reply = continuation([2], 3, 97)
    for facts, generation in (({"eos_token_id": reply[1]}, None), ({}, {"eos_token_id": [reply[1], 96]})):
        with null.llm(facts, generation=generation, num_kv_blocks=20) as llm:
            (output,) = llm.generate([[2]], SamplingParams(temperature=0.0, max_tokens=9))
            assert output.outputs[0].token_ids == reply[:2]
