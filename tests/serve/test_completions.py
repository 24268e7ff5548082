"""/v1/completions, whole and streamed, with OpenAI's client."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest

from tests.fakes.chains import CHARACTERS, END, LETTERS
from tests.serve.conftest import Server


def joined(stream: Any) -> dict[int, dict[str, Any]]:
    """Choice index -> what its chunks add up to."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "logprobs": None, "finish_reason": None})
    for chunk in stream:
        for choice in chunk.choices:
            so_far = choices[choice.index]
            assert so_far["finish_reason"] is None, "a chunk after the last one"
            so_far["text"] += choice.text
            so_far["finish_reason"] = choice.finish_reason
            if choice.logprobs is not None:
                lists = so_far["logprobs"] = so_far["logprobs"] or defaultdict(list)
                for name, values in choice.logprobs.model_dump().items():
                    lists[name] += values
    return dict(choices)


def as_streamed(whole: Any) -> dict[int, dict[str, Any]]:
    """A whole reply's choices, in the form of `joined`."""
    return {
        choice.index: {
            "text": choice.text,
            "logprobs": None if choice.logprobs is None else choice.logprobs.model_dump(),
            "finish_reason": choice.finish_reason,
        }
        for choice in whole.choices
    }


def both(server: Server, prompt: Any, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices of a reply, after checking that it is the same streamed."""
    whole = as_streamed(server.complete(prompt, **fields))
    assert joined(server.complete(prompt, stream=True, **fields)) == whole
    return whole


def test_a_reply_and_its_usage(server: Server) -> None:
    reply = server.complete("ABC", temperature=0)
    assert reply.object == "text_completion"
    assert reply.model == "tiny"
    assert reply.id.startswith("cmpl-")
    (choice,) = reply.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "DEFGH ok", "stop", None)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (1, 4, 5)


def test_a_stream_is_the_same_reply_in_pieces(server: Server) -> None:
    chunks = list(server.complete("ABC", temperature=0, stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["DEF", "GH", " ok", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_max_tokens_is_16_by_default_and_null_fills_the_context(server: Server) -> None:
    assert server.complete("Loop", temperature=0).usage.completion_tokens == 16
    filled = server.complete([LETTERS[0]] * 2000 + [44449], temperature=0, max_tokens=None)
    assert filled.usage.total_tokens == 2048
    assert filled.choices[0].finish_reason == "length"


def test_several_prompts_of_each_form(server: Server) -> None:
    texts = server.complete(["ABC", "Go"], temperature=0)
    assert [(c.index, c.text) for c in texts.choices] == [(0, "DEFGH ok"), (1, "ď😀 exaggerated")]
    assert (texts.usage.prompt_tokens, texts.usage.completion_tokens) == (2, 11)
    ids = server.complete([LETTERS[:1], CHARACTERS[:1]], temperature=0)
    assert [c.text for c in ids.choices] == ["DEFGH ok", "ď😀 exaggerated"]
    assert server.complete(LETTERS[:2], temperature=0).choices[0].text == "GH ok"
    assert both(server, ["ABC", "Go", "ABC"], temperature=0)[2]["text"] == "DEFGH ok"


def test_several_choices_of_several_prompts_are_indexed_prompt_by_prompt(server: Server) -> None:
    reply = server.complete(["ABC", "Go"], n=2, temperature=0)
    assert [(c.index, c.text[:1]) for c in reply.choices] == [(0, "D"), (1, "D"), (2, "ď"), (3, "ď")]
    assert reply.usage.prompt_tokens == 2
    assert reply.usage.completion_tokens == 2 * (4 + 7)


def test_choices_differ_and_repeat_with_their_seed(server: Server) -> None:
    """vllm#11898: equal replies, and no chunks for the others once choice 0 has ended."""
    fields = {"n": 3, "seed": 7, "temperature": 3.0, "max_tokens": 12, "stop_token_ids": [*range(20000)]}
    first = both(server, "Loop", **fields)
    assert len({choice["text"] for choice in first.values()}) == 3
    assert both(server, "Loop", **fields) == first
    assert {index: choice["finish_reason"] for index, choice in first.items()}.keys() == {0, 1, 2}
    assert len({len(choice["text"]) for choice in first.values()}) > 1, "choices of one length test nothing"
    assert both(server, "Loop", **(fields | {"seed": 8})) != first


def test_usage_of_a_stream_sums_all_choices(server: Server) -> None:
    fields = {"n": 3, "seed": 7, "temperature": 3.0, "max_tokens": 12, "stop_token_ids": [*range(20000)]}
    whole = server.complete(["Loop", "ABC"], **fields)
    *chunks, last = server.complete(["Loop", "ABC"], stream=True, stream_options={"include_usage": True}, **fields)
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_cached_tokens_are_told(server: Server) -> None:
    prompt = [*range(100, 164)]
    server.complete(prompt, max_tokens=1)
    usage = server.complete(prompt, max_tokens=1).usage
    assert usage.prompt_tokens == 64
    assert usage.prompt_tokens_details.cached_tokens == 48
    assert server.complete(prompt, max_tokens=1, cache_salt="another").usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "DE"}, ""),
        ({"stop": ["FG"]}, "DE"),
        ({"stop": ["H o", "FGH"]}, "DE"),
        ({"stop": "FG", "include_stop_str_in_output": True}, "DEFG"),
        ({"stop_token_ids": [23960]}, "DEF"),
        ({"stop": "GH okay"}, "DEFGH ok"),
    ],
)
def test_stops(server: Server, fields: dict[str, Any], text: str) -> None:
    choice = both(server, "ABC", temperature=0, **fields)[0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")


def test_the_stop_that_was_met_is_named(server: Server) -> None:
    assert server.complete("ABC", temperature=0, stop=["x", "FG"]).choices[0].stop_reason == "FG"
    assert server.complete("ABC", temperature=0, stop_token_ids=[10907]).choices[0].stop_reason == 10907
    assert server.complete("ABC", temperature=0).choices[0].stop_reason is None


def test_sampling_fields_reach_the_sampler(server: Server) -> None:
    assert server.complete("ABC", temperature=0, max_tokens=2, ignore_eos=True).choices[0].text == "DEFGH"
    assert server.complete("ABC", temperature=0, max_tokens=1, logit_bias={"253": 100}).choices[0].text == " a"
    assert server.complete("ABC", temperature=0, max_tokens=2, allowed_token_ids=[278]).choices[0].text == " b b"
    assert "GH" not in server.complete("ABC", temperature=0, bad_words=["GH"], max_tokens=5).choices[0].text
    assert server.complete("ABC", temperature=5.0, top_k=1).choices[0].text == "DEFGH ok"
    assert server.complete("ABC", temperature=5.0, min_p=0.9).choices[0].text == "DEFGH ok"
    longer = server.complete("ABC", temperature=0, min_tokens=8, max_tokens=10, skip_special_tokens=False)
    assert longer.usage.completion_tokens >= 8


# -- echo and logprobs --------------------------------------------------------------------------------------------


def test_scoring_a_prompt(server: Server) -> None:
    """vllm#6521: echo with max_tokens 0."""
    reply = server.complete("ABCDEFGH", max_tokens=0, echo=True, logprobs=1, temperature=0)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == ("ABCDEFGH", "length")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 0)
    logprobs = choice.logprobs
    assert logprobs.tokens == ["ABC", "DEF", "GH"]
    assert logprobs.text_offset == [0, 3, 6]
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert all(-1 < value <= 0 for value in logprobs.token_logprobs[1:])
    assert [list(top) for top in logprobs.top_logprobs[1:]] == [["DEF"], ["GH"]]


def test_echo_alone_and_no_tokens_alone(server: Server) -> None:
    alone = server.complete("ABC", max_tokens=0, echo=True).choices[0]
    assert (alone.text, alone.logprobs, alone.finish_reason) == ("ABC", None, "length")
    nothing = server.complete("ABC", max_tokens=0)
    assert (nothing.choices[0].text, nothing.choices[0].finish_reason) == ("", "length")
    assert nothing.usage.completion_tokens == 0
    assert both(server, LETTERS[:1], echo=True, temperature=0)[0]["text"] == "ABCDEFGH ok"
    assert both(server, ["ABC", "Go"], echo=True, temperature=0, n=2)[3]["text"] == "Goď😀 exaggerated"


@pytest.mark.parametrize("n", [1, 3])
def test_echo_with_logprobs_streams_what_it_answers(server: Server, n: int) -> None:
    choices = both(server, "ABCDEF", echo=True, logprobs=2, temperature=0, n=n)
    assert len(choices) == n
    for choice in choices.values():
        assert choice["text"] == "ABCDEFGH ok"
        assert choice["logprobs"]["tokens"] == ["ABC", "DEF", "GH", " ok", "<|im_end|>"]
        assert choice["logprobs"]["text_offset"] == [0, 3, 6, 8, 11]
        assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [0, 2, 2, 2, 2]


def test_logprobs_stay_finite_whatever_is_masked(server: Server) -> None:
    """vllm#10234: a logprob of minus infinity is no JSON."""
    masked = {"top_k": 1, "temperature": 1, "allowed_token_ids": [5, 6], "logit_bias": {"7": -100}}
    for fields in ({"echo": True}, {}, {"stream": True}):
        response = server.post("completions", prompt="ABC", logprobs=5, max_tokens=3, **masked, **fields)
        assert response.status_code == 200
        assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", response.text))
    choice = server.complete("ABC", logprobs=5, max_tokens=3, **masked).choices[0]
    assert all(-10_000 < value <= 0 for value in choice.logprobs.token_logprobs)


def test_tokens_of_split_characters_are_told_apart(server: Server) -> None:
    choice = both(server, "Go", temperature=0, logprobs=1)[0]
    assert choice["text"] == "ď😀 exaggerated"
    tokens = choice["logprobs"]["tokens"]
    assert tokens[-2:] == [" exaggerated", "<|im_end|>"]
    data = b"".join(bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) for token in tokens[:5])
    assert data.decode() == "ď😀"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 14]


def test_logprobs_0_gives_the_chosen_tokens_alone(server: Server) -> None:
    logprobs = both(server, "ABC", temperature=0, logprobs=0)[0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [["DEF"], ["GH"], [" ok"], ["<|im_end|>"]]


def test_a_special_token_in_the_text_is_shown_when_asked(server: Server) -> None:
    fields = {"temperature": 0, "max_tokens": 1, "allowed_token_ids": [END], "ignore_eos": True}
    assert server.complete("ABC", **fields).choices[0].text == ""
    assert server.complete("ABC", **fields, skip_special_tokens=False).choices[0].text == "<|im_end|>"
