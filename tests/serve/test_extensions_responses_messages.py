"""Fields that /v1/responses and /v1/messages take besides their own APIs', and conversations only tokenised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo.core.base.config import ServeConfig
from tests.fakes.scripted_chat import TEMPLATE, save_scripted_chat
from tests.serve.conftest import Server
from tests.serve.scripts import NOTHING, SCRIPTS
from tests.serve.test_chat_tools import running

USER = [{"role": "user", "content": "Say"}]
ENDING = "{% if tools %}{{ tools | tojson }}{% endif %}{{ word or '' }}{{ reasoning_effort or '' }}"
"""The end of a conversation, as variables of the template have it."""

SAMPLING: dict[str, Any] = {
    "frequency_penalty": 0.5, "ignore_eos": True, "min_p": 0.25, "min_tokens": 2, "presence_penalty": -0.5,
    "repetition_penalty": 1.5, "seed": 7, "stop": ["zz"], "top_k": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def teller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model whose template tells of its variables, on a server that takes templates from requests."""
    directory = save_scripted_chat(tmp_path_factory.mktemp("teller"), SCRIPTS, template=TEMPLATE + ENDING)
    yield from running(Server(str(directory), ServeConfig(trust_request_chat_template=True)))


Asked = list[tuple[Any, dict[str, Any]]]


@pytest.fixture
def asked(teller: Server, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The parameters and options of each call that reaches the engine."""
    calls: Asked = []
    complete_many = teller.engine.complete_many

    async def listen(prompts: Any, params: Any, **options: Any) -> Any:
        calls.append((params, options))
        return await complete_many(prompts, params, **options)

    monkeypatch.setattr(teller.engine, "complete_many", listen)
    return calls


def test_what_responses_ask_of_the_sampler_reaches_it(teller: Server, asked: Asked) -> None:
    reply = teller.post("responses", input="Say plain", max_output_tokens=4, priority=3, cache_salt="own", **SAMPLING)
    assert reply.status_code == 200, reply.text
    ((params, options),) = asked
    wanted = SAMPLING | {"stop": ("zz",)}
    assert {name: getattr(params, name) for name in SAMPLING} == wanted
    assert (options["priority"], options["cache_salt"]) == (3, "own")
    assert reply.json()["usage"]["output_tokens"] == 4


def test_what_messages_ask_of_the_sampler_reaches_it(teller: Server, asked: Asked) -> None:
    given = {"temperature": 0.5, "top_k": 3, "top_p": 0.75}
    reply = teller.post("messages", messages=USER, max_tokens=4, priority=-2, **given)
    assert reply.status_code == 200, reply.text
    ((params, options),) = asked
    assert {name: getattr(params, name) for name in given} == given
    assert options["priority"] == -2


def test_templates_hear_of_their_variables(teller: Server) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": {"word": " plain"}, "temperature": 0}
    said = teller.post("responses", input="Say", **fields).json()
    assert said["output"][0]["content"][0]["text"] == "Hello world!"
    said = teller.post("messages", messages=USER, max_tokens=20, **fields).json()
    assert said["content"][0]["text"] == "Hello world!"
    effort = teller.post("messages", messages=USER, max_tokens=20, output_config={"effort": " plain"}, temperature=0)
    assert effort.json()["content"][0]["text"] == "Hello world!"


def test_notes_of_the_client_change_no_reply(teller: Server) -> None:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "Say plain"}], "temperature": 0}
    replies = [teller.post("chat/completions", **given, **more) for more in ({}, {"metadata": {"a": "b"}})]
    assert "x-octavo-ignored-fields" not in replies[1].headers
    assert replies[0].json()["choices"] == replies[1].json()["choices"]


def test_streams_take_options_that_change_nothing(teller: Server) -> None:
    given: dict[str, Any] = {"input": "Say plain", "stream": True, "temperature": 0}
    options: list[dict[str, Any]] = [{}, {"stream_options": {"include_obfuscation": False}}]
    bodies = [teller.post("responses", **given, **more) for more in options]
    assert [body.status_code for body in bodies] == [200, 200]
    assert bodies[0].text.count("event: ") == bodies[1].text.count("event: ")


def test_a_conversation_is_tokenised_as_it_would_run(teller: Server) -> None:
    def tokens(**fields: Any) -> list[int]:
        reply = teller.http.post("/tokenize", json={"messages": USER, **fields})
        assert reply.status_code == 200, reply.text
        told: list[int] = reply.json()["tokens"]
        return told

    def text(**fields: Any) -> str:
        back: str = teller.http.post("/detokenize", json={"tokens": tokens(**fields)}).json()["prompt"]
        return back

    assert text(chat_template_kwargs={"word": " plain"}) == text() + " plain"
    tools = [{"type": "function", "function": {"name": "city", "parameters": NOTHING}}]
    assert '"city"' in text(tools=tools)
    assert text(chat_template="{{ messages[0].content }}!") == "Say!"
    begun = [*USER, {"role": "assistant", "content": "I say"}]
    ends: dict[str, Any] = {"messages": begun, "chat_template_kwargs": {"word": " plain"}}
    assert text(**ends).endswith("I say plain")
    assert text(**ends, continue_final_message=True).endswith("I say")
