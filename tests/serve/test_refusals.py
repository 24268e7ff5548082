"""What the server refuses: one clear error, small, in OpenAI's shape, and nobody else notices."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from octavo.core.serve.chat.schema import ChatCompletionRequest
from octavo.core.serve.completions.schema import CompletionRequest
from tests.fakes.chains import FOREVER, VOCAB_SIZE
from tests.serve.conftest import Server, error_of

LAST_ID = VOCAB_SIZE - 1


def test_what_is_served(server: Server) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    (model,) = server.client.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("tiny", "model", "octavo", 2048)  # type: ignore[attr-defined]


def test_answers_are_not_held_back_by_nagles_algorithm(server: Server) -> None:
    """40 ms for each answer in two packets, wherever asyncio's own loop accepts the connections."""
    before = time.monotonic()
    for _ in range(50):
        server.http.get("/health")
    assert time.monotonic() - before < 50 * 0.035


def test_an_unknown_model(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.completions.create(model="gpt-" + "9" * 5000, prompt="x")
    assert caught.value.code == "model_not_found"
    assert "'tiny'" in str(caught.value)
    error_of(caught.value.response, 404)


def test_unknown_paths_and_methods(server: Server) -> None:
    error_of(server.http.get("/v1/nothing"), 404)
    response = server.http.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "tiny", "prompt": "x"} y',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "x", "seed": ' + b"1" * 10_000 + b"}",
        b'{"model": "tiny", "prompt": "x", "user": "\\"", "metadata": ' + b"[" * 130 + b"]" * 130 + b"}",
        b"[]",
        b'"tiny"',
        b"null",
    ],
)
def test_bodies_that_are_no_json_object(server: Server, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(server.http.post("/v1/completions", content=body, headers=headers), 400)


def test_a_body_that_does_not_call_itself_json(server: Server) -> None:
    """A page elsewhere could send it from a browser without asking."""
    body = json.dumps({"model": "tiny", "prompt": "x"})
    error_of(server.http.post("/v1/completions", content=body, headers={"content-type": "text/plain"}), 400)


def test_a_body_beyond_all_bounds(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"model": "tiny", "prompt": "'
        for _ in range(40):
            yield b"x" * (1 << 20)

    headers = {"content-type": "application/json"}
    error_of(server.http.post("/v1/completions", content=endless(), headers=headers), 413)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x"] * 2049}, "prompt"),
        ({"n": "2"}, "n"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream_options": []}, "stream_options"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"priority": 10**30}, "priority"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "x" * 2000}, "cache_salt"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": ["x" * 2000]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1025}, "logprobs"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "1"}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"9" * 3000: 1}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * (2**20 + 1)}, "allowed_token_ids"),
        ({"stop_token_ids": [1] * (2**20 + 1)}, "stop_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
        ({"stop": ["x"] * 65}, "len(stop)"),
        ({"bad_words": ["x"] * 1025}, "bad_words"),
        ({"bad_words": ["x" * 4097]}, "bad_words"),
        ({"prompt": ["x"] * 33, "n": 128}, "n"),
        ({"prompt": ["x"] * 2048, "n": 3}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2049}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"guided_json": {"title": "x" * 2**19}}, "guided_json"),
    ],
)  # fmt: skip
def test_wrong_fields_of_completions(server: Server, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        assert server.refusal(**({"prompt": "x", "stream": stream} | fields))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{}] * 100_001}, "messages"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "logprobs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"max_completion_tokens": 5000}, "max_tokens"),
    ],
)
def test_wrong_fields_of_chats(server: Server, fields: dict[str, Any], param: str) -> None:
    right = {"messages": [{"role": "user", "content": "x"}]}
    assert server.refusal("chat/completions", **(right | fields))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param", "wrong_id"),
    [
        ({"prompt": [[-1]]}, "prompt", -1),
        ({"prompt": [999999]}, "prompt", 999999),
        ({"prompt": [[5], [10**30]]}, "prompt", 10**30),
        ({"logit_bias": {"49152": 5}}, "logit_bias", 49152),
        ({"stop_token_ids": [49152]}, "stop_token_ids", 49152),
        ({"stop_token_ids": [-1]}, "stop_token_ids", -1),
        ({"allowed_token_ids": [3, 2**40]}, "allowed_token_ids", 2**40),
    ],
)
def test_ids_outside_the_vocabulary(server: Server, fields: dict[str, Any], param: str, wrong_id: int) -> None:
    """vllm#16529: such an id reached the worker and ended the engine."""
    with server.complete("Loop", stream=True, max_tokens=60, temperature=0) as neighbour:
        chunks = iter(neighbour)
        text = next(chunks).choices[0].text
        error = server.refusal(**({"prompt": "x"} | fields))
        assert error["param"] == param
        assert f"{wrong_id}, outside the vocabulary 0..{LAST_ID}" in error["message"]
        text += "".join(chunk.choices[0].text for chunk in chunks)
    assert text == (" one two three fourLoop" * 12)


def test_lengths(server: Server) -> None:
    """vllm#33418: both counts, the true limit; an exact fit is allowed."""
    exact = server.complete([100] * 2000, max_tokens=48, ignore_eos=True).usage
    assert (exact.prompt_tokens, exact.total_tokens) == (2000, 2048)
    assert server.complete([100] * 2048, max_tokens=0).usage.total_tokens == 2048
    assert server.complete([100] * 2047, max_tokens=None).usage.completion_tokens == 1
    error = server.refusal(prompt=[100] * 8, max_tokens=2045)
    assert error["param"] == "max_tokens"
    assert all(count in error["message"] for count in ("8 tokens", "2045", "2048", "at most 2040"))
    error = server.refusal(prompt=[100] * 2049)
    assert error["param"] == "prompt"
    assert all(count in error["message"] for count in ("2049", "2048"))
    assert server.refusal(prompt=" one" * 2049)["param"] == "prompt"
    long_chat = [{"role": "user", "content": "x" * 10**6}]
    assert server.refusal("chat/completions", messages=long_chat)["param"] == "messages"


@pytest.mark.parametrize("kind", ["text", "token ids", "chat"])
def test_a_huge_prompt_is_refused_soon_while_all_else_goes_on(server: Server, kind: str) -> None:
    """vllm#24910: 5 MB were tokenised on the event loop."""
    path, fields = {
        "text": ("completions", {"prompt": "word " * 10**6}),
        "token ids": ("completions", {"prompt": [5] * 10**6}),
        "chat": ("chat/completions", {"messages": [{"role": "user", "content": "word " * 10**6}]}),
    }[kind]
    body = json.dumps({"model": "tiny", **fields})
    polls: list[float] = []
    done = threading.Event()

    def poll_health() -> None:
        with httpx.Client(base_url=server.url) as client:
            while not done.is_set():
                asked = time.monotonic()
                assert client.get("/health").status_code == 200
                polls.append(time.monotonic() - asked)

    with server.complete("Loop", stream=True, **FOREVER) as stream:
        chunks = iter(stream)
        next(chunks)
        poller = threading.Thread(target=poll_health)
        poller.start()
        while not polls:
            next(chunks)
        asked = time.monotonic()
        response = server.http.post("/v1/" + path, content=body, headers={"content-type": "application/json"})
        took = time.monotonic() - asked
        for _ in range(20):
            next(chunks)
        done.set()
        poller.join()
    assert error_of(response, 400)["param"] in ("prompt", "messages")
    assert took < 3
    assert max(polls) < 1


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("completions", "suffix", "end"),
        ("completions", "return_tokens_as_token_ids", True),
        ("chat/completions", "modalities", ["text", "audio"]),
    ],
)
def test_what_can_not_be_honoured_is_refused(server: Server, path: str, name: str, value: Any) -> None:
    right: dict[str, Any] = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    error = server.refusal(path, **right, **{name: value})
    assert error["param"] == name
    assert "not supported" in error["message"]


def test_what_asks_for_nothing_more_is_let_through(server: Server) -> None:
    neutral = {
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"],
        "function_call": "none", "continue_final_message": False, "user": "somebody", "top_logprobs": 0,
    }  # fmt: skip
    reply = server.post("chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=1, **neutral)
    assert reply.status_code == 200
    assert "x-octavo-ignored-fields" not in reply.headers
    assert server.post("completions", prompt="x", best_of=1, suffix=None, max_tokens=1).status_code == 200


def test_unknown_fields_are_named_in_a_header(server: Server) -> None:
    reply = server.post("completions", prompt="x", max_tokens=1, wibble=1, top_q=0.5)
    assert reply.headers["x-octavo-ignored-fields"] == "top_q,wibble"
    options = {"include_usage": True, "more": True}
    nested = server.post("completions", prompt="x", max_tokens=1, stream=True, stream_options=options)
    assert nested.headers["x-octavo-ignored-fields"] == "stream_options.more"
    odd = server.post("completions", prompt="x", max_tokens=1, stream=True, **{"a\r\nb: c": 1, "ü" * 3000: 2})
    assert odd.headers["x-octavo-ignored-fields"].startswith("a??b??c,???")
    assert len(odd.headers["x-octavo-ignored-fields"]) == 1000
    assert "b" not in odd.headers


def test_request_ids_are_echoed_and_may_be_used_twice(server: Server) -> None:
    """vllm#10583: two live requests of one id mixed their output."""
    headers = {"x-request-id": "mine-1"}
    body = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": 100}
    with (
        server.http.stream("POST", "/v1/completions", json=body | {"prompt": "Loop"}, headers=headers) as one,
        server.http.stream("POST", "/v1/completions", json=body | {"prompt": "ABC"}, headers=headers) as two,
    ):
        assert one.headers["x-request-id"] == two.headers["x-request-id"] == "mine-1"
        assert "GH" in two.read().decode()
        assert one.read().decode().count("Loop") == 20
    for _ in range(3):  # given up, and tried again at once
        with server.http.stream("POST", "/v1/completions", json=body | {"prompt": "Loop"}, headers=headers) as gone:
            next(gone.iter_lines())
        again = server.http.post("/v1/completions", json=body | {"prompt": "ABC", "stream": False}, headers=headers)
        assert again.json()["choices"][0]["text"] == "DEFGH ok"
    for odd in ("", "x" * 300, "a b"):
        answered = server.http.get("/health", headers={"x-request-id": odd}).headers["x-request-id"]
        assert answered not in ("", odd)


JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 1.5, 1e308, 10**18, 10**40, "", "x", "\x00", "\u2028", [], [[]], [None], [""],
    ["x", 1], [5], [-1], {}, {"a": 1}, {"1": 1}, {"": None}, [{"role": "user", "content": None}],
    [{"role": "user", "content": [{}]}],
]  # fmt: skip


def test_junk_in_any_field_is_answered_or_refused(server: Server) -> None:
    rng = random.Random(0)
    right = {
        "completions": {"prompt": "ABC"},
        "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    seen = set()
    for path, kind in (("completions", CompletionRequest), ("chat/completions", ChatCompletionRequest)):
        fields = sorted({*kind.model_fields, *kind.UNSUPPORTED} - {"model"})
        for _ in range(250):
            junk = {name: rng.choice(JUNK) for name in rng.sample(fields, rng.choice((1, 1, 2)))}
            response = server.post(path, **({"max_tokens": 1, "temperature": 0} | right[path] | junk))
            seen.add(response.status_code)
            if response.status_code != 200:
                error_of(response, 400)
    assert seen == {200, 400}


def test_the_api_describes_itself(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    prompt = document["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]
    assert {"type": "string"} in prompt["anyOf"]
