"""vLLM's parameters and endpoints besides OpenAI's: prompts' logprobs and cuts, token ids, usage, tokenising."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.core.base.config import ServeConfig
from tests.fakes.chains import LETTERS
from tests.serve.conftest import Server, error_of

END = 2
"""<|im_end|>, which ends a reply."""


def ask(server: Server, prompt: Any, extra: dict[str, Any], **fields: Any) -> Any:
    """A completion with fields that OpenAI's client takes as extra_body only."""
    return server.client.completions.create(model="tiny", prompt=prompt, temperature=0, extra_body=extra, **fields)


def talk(server: Server, extra: dict[str, Any], **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Hi"}]
    return server.client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, extra_body=extra, **fields
    )


# -- prompt_logprobs ----------------------------------------------------------------------------------------------


def test_logprobs_of_a_prompt(server: Server) -> None:
    first, *others = ask(server, "ABCDEFGH", {"prompt_logprobs": 2}, max_tokens=1).choices[0].prompt_logprobs
    assert first is None
    ids = LETTERS[1:3]
    assert [next(iter(each)) for each in others] == [str(token_id) for token_id in ids]
    for each, token_id in zip(others, ids, strict=True):
        own = each[str(token_id)]
        assert (own["rank"], own["logprob"] > -1) == (1, True)
        assert sorted(entry["rank"] for entry in each.values()) == [1, 2]
    assert [each[str(token_id)]["decoded_token"] for each, token_id in zip(others, ids, strict=True)] == ["DEF", "GH"]


def test_logprobs_of_a_prompt_and_of_its_echo_have_numbers_of_their_own(server: Server) -> None:
    for logprobs, prompt_logprobs in ((1, 3), (3, 1)):
        (choice,) = ask(
            server, "ABCDEFGH", {"prompt_logprobs": prompt_logprobs}, max_tokens=0, echo=True, logprobs=logprobs
        ).choices
        assert [len(each) for each in choice.prompt_logprobs[1:]] == [prompt_logprobs] * 2
        assert [len(each) for each in choice.logprobs.top_logprobs[1:]] == [logprobs] * 2


def test_logprobs_of_a_chat_s_prompt(server: Server) -> None:
    reply = talk(server, {"prompt_logprobs": 0}, max_tokens=1)
    assert reply.prompt_logprobs[0] is None
    assert len(reply.prompt_logprobs) == reply.usage.prompt_tokens
    assert all(len(each) == 1 for each in reply.prompt_logprobs[1:])


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_they_are_not_streamed(server: Server, path: str) -> None:
    right = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    assert server.refusal(path, **right, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"


# -- return_token_ids ---------------------------------------------------------------------------------------------


def test_token_ids_of_completions(server: Server) -> None:
    extra = {"return_token_ids": True}
    whole = ask(server, ["ABC", "Go"], extra, n=2).choices
    assert [choice.prompt_token_ids for choice in whole[:2]] == [LETTERS[:1]] * 2
    assert whole[0].token_ids == [*LETTERS[1:], END][: len(whole[0].token_ids)]
    streamed: dict[int, list[int]] = {choice.index: [] for choice in whole}
    prompts = {}
    for chunk in ask(server, ["ABC", "Go"], extra, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.token_ids
            if hasattr(choice, "prompt_token_ids"):
                assert choice.index not in prompts, "told twice"
                prompts[choice.index] = choice.prompt_token_ids
    assert streamed == {choice.index: choice.token_ids for choice in whole}
    assert prompts == {choice.index: choice.prompt_token_ids for choice in whole}
    assert not hasattr(ask(server, "ABC", {}).choices[0], "token_ids")


def test_token_ids_of_chats(server: Server) -> None:
    extra = {"return_token_ids": True}
    whole = talk(server, extra, max_tokens=5)
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    assert len(whole.choices[0].token_ids) == whole.usage.completion_tokens
    chunks = list(talk(server, extra, max_tokens=5, stream=True))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert [i for c in chunks for i in getattr(c.choices[0], "token_ids", [])] == whole.choices[0].token_ids


# -- truncate_prompt_tokens, add_special_tokens -------------------------------------------------------------------


def test_prompts_are_cut_at_their_beginning(server: Server) -> None:
    cut = ask(server, ["ABCDEFGH", "ABCDEF"], {"truncate_prompt_tokens": 1, "return_token_ids": True}, echo=True)
    assert [choice.prompt_token_ids for choice in cut.choices] == [[LETTERS[2]], [LETTERS[1]]]
    assert [choice.text for choice in cut.choices] == ["GH ok", "DEFGH ok"]
    fits = ask(server, LETTERS[:2], {"truncate_prompt_tokens": 2000})
    assert fits.usage.prompt_tokens == 2
    assert ask(server, [5] * 3000, {"truncate_prompt_tokens": -1}, max_tokens=8).usage.prompt_tokens == 2040
    whole = talk(server, {"return_token_ids": True}, max_tokens=1).prompt_token_ids
    assert (
        talk(server, {"return_token_ids": True, "truncate_prompt_tokens": 3}, max_tokens=1).prompt_token_ids
        == (whole[-3:])
    )


def test_without_special_tokens(server: Server) -> None:
    """SmolLM2's tokenizer puts none around a text, so nothing changes."""
    without = ask(server, "ABC", {"add_special_tokens": False, "return_token_ids": True}).choices[0]
    assert (without.prompt_token_ids, without.text) == (LETTERS[:1], "DEFGH ok")
    told = server.http.post("/tokenize", json={"prompt": "ABC", "add_special_tokens": False})
    assert told.json()["tokens"] == LETTERS[:1]
    conversation = {"messages": [{"role": "user", "content": "Hi"}], "add_special_tokens": True}
    assert error_of(server.http.post("/tokenize", json=conversation), 400)["param"] == "add_special_tokens"


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_penalties(server: Server, penalty: dict[str, float]) -> None:
    """With a bias that wins by less than the penalty, a token comes once; without a penalty, again and again."""
    fields = {"prompt": "ABC", "max_tokens": 2, "temperature": 0, "allowed_token_ids": [253, 278]}
    fields["logit_bias"] = {"253": 1.0}
    assert server.post("completions", **fields).json()["choices"][0]["text"] == " a a"
    assert server.post("completions", **fields, **penalty).json()["choices"][0]["text"] == " a b"
    talk = {**fields, "messages": [{"role": "user", "content": "x"}]}
    talk.pop("prompt")
    reply = server.post("chat/completions", **talk, **penalty).json()["choices"][0]["message"]["content"]
    assert reply == " a b"


# -- best_of ------------------------------------------------------------------------------------------------------


def test_the_best_of_several_choices(server: Server) -> None:
    fields: dict[str, Any] = {
        "prompt": "Loop", "seed": 7, "temperature": 3.0, "max_tokens": 4, "logprobs": 0,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    tried = server.client.completions.create(model="tiny", n=6, **fields)
    best = server.client.completions.create(model="tiny", n=2, best_of=6, **fields)
    means = sorted((sum(c.logprobs.token_logprobs) / 4 for c in tried.choices), reverse=True)
    assert [c.index for c in best.choices] == [0, 1]
    assert [sum(c.logprobs.token_logprobs) / 4 for c in best.choices] == pytest.approx(means[:2])
    assert best.usage.completion_tokens == tried.usage.completion_tokens == 24
    plain = server.client.completions.create(model="tiny", best_of=6, **(fields | {"logprobs": None}))
    assert (plain.choices[0].text, plain.choices[0].logprobs) == (best.choices[0].text, None)
    assert server.refusal(prompt="x", best_of=2, stream=True)["param"] == "best_of"


# -- stream_options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_stream_options_are_for_streams(server: Server, path: str) -> None:
    right = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    for stream in (None, False):
        error = server.refusal(path, **right, stream=stream, stream_options={"include_usage": True})
        assert error["param"] == "stream_options"


def test_usage_as_it_grows(server: Server) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    for stream in (
        ask(server, "ABC", {}, n=2, stream=True, stream_options=options),
        talk(server, {}, n=2, stream=True, max_tokens=3, stream_options=options),
    ):
        *chunks, last = stream
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == last.usage.completion_tokens
        assert chunks[-1].usage == last.usage
        assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens}


def test_usage_is_null_before_the_last_chunk(server: Server) -> None:
    body = {"model": "tiny", "prompt": "ABC", "stream": True, "stream_options": {"include_usage": True}}
    lines = server.http.post("/v1/completions", json=body).text.split("\n\n")
    assert all('"usage":null' in line for line in lines[:-3])
    assert "usage" not in server.post("completions", prompt="ABC", stream=True).text


# -- /tokenize, /detokenize, render -------------------------------------------------------------------------------


def test_tokenising_and_back(server: Server) -> None:
    told = server.http.post("/tokenize", json={"model": "tiny", "prompt": "ABCDEF", "return_token_strs": True}).json()
    assert told == {"count": 2, "max_model_len": 2048, "tokens": LETTERS[:2], "token_strs": ["ABC", "DEF"]}
    assert server.http.post("/detokenize", json={"tokens": LETTERS[:2]}).json() == {"prompt": "ABCDEF"}
    assert server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_tokenising_a_conversation(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    told = server.http.post("/tokenize", json={"messages": messages}).json()
    whole = talk(server, {"return_token_ids": True}, max_tokens=1)
    assert told["tokens"] == whole.prompt_token_ids
    shorter = server.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert shorter["tokens"] == told["tokens"][: shorter["count"]]
    assert shorter["count"] < told["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "prompt"),
        ("/tokenize", {"model": "other", "prompt": "x"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * 10**7}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ],
)
def test_what_can_not_be_tokenised(server: Server, path: str, body: dict[str, Any], status: int, param: str) -> None:
    assert error_of(server.http.post(path, json=body), status)["param"] == param


def test_requests_as_they_would_run(server: Server) -> None:
    fields = {
        "repetition_penalty": 1.5,
        "stop": "x",
        "logit_bias": {"5": 1.5},
        "top_k": 3,
        "priority": 2,
        "bad_words": ["GH"],
    }
    shown = server.post("completions/render", prompt=["ABC", "ABCDEF"], **fields).json()
    assert [each["token_ids"] for each in shown] == [LETTERS[:1], LETTERS[:2]]
    params = shown[0]["sampling_params"]
    assert (params["stop"], params["logit_bias"], params["top_k"], params["max_tokens"]) == (["x"], {"5": 1.5}, 3, 16)
    assert params["repetition_penalty"] == 1.5
    assert [LETTERS[2]] in params["bad_words_token_ids"]
    assert (shown[0]["priority"], shown[0]["stream"]) == (2, False)
    messages = [{"role": "user", "content": "Hi"}]
    chat = server.post("chat/completions/render", messages=messages, seed=5).json()
    assert chat["token_ids"] == server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert chat["sampling_params"]["seed"] == 5
    assert server.stats().num_running == server.stats().num_waiting == 0
    assert server.refusal("completions/render", prompt=[999999])["param"] == "prompt"
    assert server.refusal("chat/completions/render", messages=[])["param"] == "messages"


SAMPLING: dict[str, Any] = {
    "n": 2, "min_tokens": 1, "temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5,
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 5, "stop": ["x"], "stop_token_ids": [7],
    "include_stop_str_in_output": True, "ignore_eos": True, "logit_bias": {"5": 1.5}, "bad_words": ["GH"],
    "allowed_token_ids": [5, 6], "skip_special_tokens": False, "prompt_logprobs": 2,
}  # fmt: skip


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_each_field_of_sampling_reaches_the_engine(server: Server, path: str) -> None:
    both = {"prompt": "ABC", "messages": [{"role": "user", "content": "x"}]}
    shown = server.post(f"{path}/render", **both, **SAMPLING, cache_salt="mine", priority=3).json()
    (shown,) = shown if isinstance(shown, list) else [shown]
    assert {name: shown["sampling_params"][name] for name in SAMPLING} == SAMPLING
    assert (shown["cache_salt"], shown["priority"]) == ("mine", 3)


def test_one_model(server: Server) -> None:
    assert server.client.models.retrieve("tiny") == server.client.models.list().data[0]
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("a/b")


# -- --strict-api -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict(chain_model: Path) -> Iterator[Server]:
    made = Server(str(chain_model), ServeConfig(strict_api=True), tokenizer="smollm2")
    with made:
        yield made


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/completions/render", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_a_strict_server_refuses_unknown_fields(strict: Server, path: str, right: dict[str, Any]) -> None:
    def post(**more: Any) -> httpx.Response:
        return strict.http.post(path, json={"model": "tiny", **right, **more})

    assert post().status_code == 200
    refused = post(top_q=0.5)
    assert refused.status_code == 400
    assert "top_q" in refused.json()["error"]["message"]
    if path == "/v1/completions":
        nested = post(stream=True, stream_options={"more": 1})
        assert error_of(nested, 400)["param"] == "stream_options.more"
        assert error_of(post(**{"ü\r\n" * 5000: 1}), 400)["param"] == "?" * 100
