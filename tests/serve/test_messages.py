"""/v1/messages by Anthropic's client: text, thinking and tools, whole and streamed; errors in Anthropic's form."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import pydantic
import pytest

from octavo.core.base.config import ServeConfig
from octavo.core.base.params import FinishReason
from tests.fakes.chains import FOREVER
from tests.serve.conftest import Server
from tests.serve.scripts import NOTHING, ZONE

TOOLS: list[Any] = [
    {"name": "time", "description": "Tells it.", "input_schema": ZONE},
    {"name": "city", "input_schema": NOTHING},
]


@pytest.fixture(scope="module")
def claude(scripted: Server) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client of the scripted model."""
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def fields_of(words: Any, fields: dict[str, Any]) -> dict[str, Any]:
    messages = words if isinstance(words, list) else [{"role": "user", "content": words}]
    return {"model": "tiny", "max_tokens": 100, "messages": messages, "temperature": 0, **fields}


def by_client(words: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The same as the client takes it, which no longer knows of temperatures, nor of what is ours."""
    body = fields_of(words, fields)
    return body | {"extra_body": {name: body.pop(name) for name in ("temperature", "cache_salt") if name in body}}


def ask(client: anthropic.Anthropic, words: Any, **fields: Any) -> Any:
    return client.messages.create(**by_client(words, fields))


def events_of(server: Server, words: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream as they went over the wire, each named by its type."""
    body = fields_of(words, fields) | {"stream": True}
    with server.http.stream("POST", "/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"}) as response:
        text = response.read().decode()
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def both(server: Server, client: anthropic.Anthropic, words: Any, **fields: Any) -> Any:
    """A reply, after checking that the client puts the same one together from a stream in the right order."""
    whole = ask(client, words, **fields)
    with client.messages.stream(**by_client(words, fields)) as stream:
        streamed = stream.get_final_message()
    assert plain(streamed) == plain(whole)
    start, *blocks, delta, stop = events_of(server, words, **fields)
    assert [start["type"], delta["type"], stop["type"]] == ["message_start", "message_delta", "message_stop"]
    order = [(event["type"].removeprefix("content_block_"), event["index"]) for event in blocks]
    wanted = [
        (kind, index)
        for index in range(len(whole.content))
        for kind in ("start", *["delta"] * order.count(("delta", index)), "stop")
    ]
    assert order == wanted
    return whole


def plain(message: Any) -> dict[str, Any]:
    """A message without its ids and what the cache did."""
    said = message.model_dump()
    for block in said["content"]:
        block.pop("id", None)
    said["usage"] = said["usage"]["output_tokens"]
    return {key: value for key, value in said.items() if key != "id"}


def test_a_reply_and_its_usage(scripted: Server, claude: anthropic.Anthropic) -> None:
    reply = both(scripted, claude, "Say plain", system="Be kind.", cache_salt="new")
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "tiny")
    assert reply.id.startswith("msg_")
    assert [(block.type, block.text) for block in reply.content] == [("text", "Hello world!")]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (26, 5)


def test_usage_in_a_stream(scripted: Server) -> None:
    start, *_, delta, _ = events_of(scripted, "Say plain")
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (10, 0)
    assert start["message"]["content"] == []
    assert delta["usage"]["output_tokens"] == 5
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_tokens_in_the_cache_are_counted_apart(claude: anthropic.Anthropic) -> None:
    words = "hat " * 8 + "plain"
    usages = [ask(claude, words, cache_salt="apart").usage for _ in range(2)]
    assert [usage.cache_read_input_tokens for usage in usages] == [0, 32]
    assert [usage.input_tokens + usage.cache_read_input_tokens for usage in usages] == [38, 38]


def test_a_reply_that_says_nothing(scripted: Server, claude: anthropic.Anthropic) -> None:
    reply = both(scripted, claude, "Say hush")
    assert (reply.content, reply.stop_reason) == ([], "end_turn")


def test_thinking(scripted: Server, claude: anthropic.Anthropic) -> None:
    reply = both(scripted, claude, "Say think", thinking={"type": "enabled", "budget_tokens": 1024})
    thought, said = reply.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm, four?")
    assert (said.type, said.text) == ("text", "Four.")
    hidden = both(scripted, claude, "Say think", thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in hidden.content] == ["text"]


def test_tools(scripted: Server, claude: anthropic.Anthropic) -> None:
    reply = both(scripted, claude, "Please call", tools=TOOLS)
    said, *calls = reply.content
    assert said.text == "I'll look."
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "time", {"zone": "CET"}),
        ("tool_use", "city", {}),
    ]
    assert reply.stop_reason == "tool_use"
    assert len({call.id for call in calls}) == 2


def test_a_conversation_with_results(claude: anthropic.Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "Please call"}]
    first = ask(claude, asked, tools=TOOLS)
    asked.append({"role": "assistant", "content": first.content})
    ids = [block.id for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": each, "content": [{"type": "text", "text": "x"}]} for each in ids]
    for last in ([*results, {"type": "text", "text": "Say plain"}], [{**results[0], "content": "plain"}]):
        reply = ask(claude, [*asked, {"role": "user", "content": last}], tools=TOOLS)
        assert reply.content[0].text == "Hello world!"


@pytest.mark.parametrize(
    ("choice", "kinds"),
    [
        ({"type": "none"}, ["text"]),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["text", "tool_use"]),
        ({"type": "auto"}, ["text", "tool_use", "tool_use"]),
    ],
)
def test_choices_of_tools(scripted: Server, claude: anthropic.Anthropic, choice: Any, kinds: list[str]) -> None:
    reply = both(scripted, claude, "Please call", tools=TOOLS, tool_choice=choice)
    assert [block.type for block in reply.content] == kinds


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "time"}])
def test_a_tool_that_must_be_used_is(caller: Server, choice: dict[str, Any]) -> None:
    with anthropic.Anthropic(base_url=caller.url, api_key="none", max_retries=0) as client:
        once = choice | {"disable_parallel_tool_use": True}
        reply = both(caller, client, "Say plain", tools=TOOLS, tool_choice=once)
    (call,) = reply.content
    assert (call.type, reply.stop_reason) == ("tool_use", "tool_use")
    wanted = {"time": {"zone": "CET"}} | ({"city": {}} if choice["type"] == "any" else {})
    assert call.input == wanted[call.name]


def test_the_limit_is_met(scripted: Server, claude: anthropic.Anthropic) -> None:
    reply = both(scripted, claude, "Say loop", max_tokens=3)
    assert (reply.stop_reason, reply.content[0].text) == ("max_tokens", "tick tock tick ")
    full = ask(claude, "Say loop", max_tokens=100_000)
    assert full.stop_reason == "model_context_window_exceeded"
    assert full.usage.output_tokens > 2000


def test_stop_sequences(scripted: Server, claude: anthropic.Anthropic) -> None:
    reply = both(scripted, claude, "Say plain", stop_sequences=["zz", "wor"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "wor")
    assert reply.content[0].text == "Hello "


class Person(pydantic.BaseModel):
    """What a reply is parsed to."""

    age: Literal[7, 8]
    adult: bool


def test_the_client_parses_a_reply_to_its_own_class(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        reply = client.messages.parse(
            model="tiny", max_tokens=60, messages=user({"type": "text", "text": "Hi"}), output_format=Person
        )
    assert reply.parsed_output.age in (7, 8)
    assert reply.stop_reason == "end_turn"


def test_the_assistants_turn_goes_on(scripted: Server, claude: anthropic.Anthropic) -> None:
    talk = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "I say plain"}]
    assert both(scripted, claude, talk).content[0].text == "Hello world!"


def test_turns_of_one_role_are_one(claude: anthropic.Anthropic) -> None:
    apart = [{"role": "user", "content": "Say"}, {"role": "user", "content": "plain"}]
    together = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("Say", "plain")]}]
    counts = {claude.messages.count_tokens(model="tiny", messages=each).input_tokens for each in (apart, together)}
    assert counts == {len("user Say ") + 1}


def test_tokens_are_counted(claude: anthropic.Anthropic) -> None:
    talk: Any = [{"role": "user", "content": "Say plain"}]
    bare = claude.messages.count_tokens(model="tiny", messages=talk)
    assert bare.input_tokens == ask(claude, talk).usage.input_tokens
    system = claude.messages.count_tokens(model="tiny", messages=talk, system=[{"type": "text", "text": "Be kind."}])
    assert system.input_tokens > bare.input_tokens
    tools = claude.messages.count_tokens(model="tiny", messages=talk, tools=TOOLS)
    assert tools.input_tokens > bare.input_tokens


def test_a_client_that_leaves_ends_its_request(scripted: Server, claude: anthropic.Anthropic) -> None:
    before = scripted.stats().finished[FinishReason.ABORT]
    with claude.messages.stream(**by_client("Say loop", {"max_tokens": 100_000})) as stream:
        next(iter(stream.text_stream))
    scripted.wait_idle()
    with pytest.raises(anthropic.APITimeoutError):
        claude.with_options(timeout=0.2).messages.create(**by_client("Say loop", {"max_tokens": 100_000}))
    scripted.wait_idle()
    assert scripted.stats().finished[FinishReason.ABORT] == before + 2


# -- errors -------------------------------------------------------------------------------------------------------


def error_of(response: httpx.Response, status: int) -> dict[str, str]:
    """The error object of a response in Anthropic's form."""
    assert response.status_code == status, response.text[:500]
    assert len(response.content) < 4096
    body = response.json()
    assert (set(body), body["type"]) == ({"type", "error"}, "error")
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["message"]
    return body["error"]


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": user()}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "going on"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
                ]
            },
            "tool_result",
        ),
        ({"messages": user(IMAGE)}, "messages[0].content[0]"),
        ({"messages": user({"type": "text"})}, "messages[0].content[0].text"),
        ({"messages": user(RESULT)}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]}, "messages[0].content[0]"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1000}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop_sequences": [""]}, "stop"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_what_can_not_be_done_is_refused(scripted: Server, fields: dict[str, Any], named: str) -> None:
    body = fields_of("Say plain", {}) | fields
    error = error_of(scripted.http.post("/v1/messages", json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]


def test_an_unknown_model_a_path_and_a_method(scripted: Server, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        claude.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    assert raised.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert error_of(scripted.http.get("/v1/messages/batches"), 404)["type"] == "not_found_error"
    assert error_of(scripted.http.get("/v1/messages"), 405)["type"] == "invalid_request_error"
    assert error_of(scripted.http.post("/v1/messages", content=b"x"), 400)["type"] == "invalid_request_error"
    json_head = {"content-type": "application/json"}
    assert error_of(scripted.http.post("/v1/messages", content=b"{", headers=json_head), 400)
    refused = scripted.http.post("/v1/messages/count_tokens", json={"model": "tiny"})
    assert "messages" in error_of(refused, 400)["message"]


def test_what_asks_for_nothing_is_let_through(scripted: Server, claude: anthropic.Anthropic) -> None:
    reply = ask(
        claude, "Say plain", metadata={"user_id": "u"}, service_tier="auto", thinking={"type": "disabled"},
        extra_headers={"anthropic-version": "2023-06-01", "anthropic-beta": "any"}, extra_query={"beta": "true"},
    )  # fmt: skip
    assert reply.content[0].text == "Hello world!"
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body = fields_of("Say plain", {"context_management": kept, "cache_control": {"type": "ephemeral"}})
    assert scripted.http.post("/v1/messages", json=body).status_code == 200


def test_replies_and_errors_have_an_id(scripted: Server, claude: anthropic.Anthropic) -> None:
    assert ask(claude, "Say plain", extra_headers={"x-request-id": "mine"})._request_id == "mine"
    with pytest.raises(anthropic.BadRequestError) as raised:
        claude.messages.create(model="tiny", max_tokens=1, messages=[])
    assert raised.value.request_id


def test_unknown_fields_are_named_in_a_header(scripted: Server) -> None:
    reply = scripted.post("messages", **fields_of("Say plain", {"wibble": 1}))
    assert reply.headers["x-octavo-ignored-fields"] == "wibble"


@pytest.fixture(scope="module")
def guarded(chain_model: Path) -> Iterator[Server]:
    """A server with a key, small bodies, one request at a time and no queue."""
    settings = ServeConfig(api_key=("secret",), max_body_bytes=4096, max_queued_requests=1)
    made = Server(str(chain_model), settings, tokenizer="smollm2", max_num_seqs=1)
    with made:
        yield made


def test_the_door_speaks_the_same_form(guarded: Server) -> None:
    with anthropic.Anthropic(base_url=guarded.url, api_key="secret", max_retries=0) as client:
        assert client.messages.count_tokens(model="tiny", messages=user({"type": "text", "text": "Hi"})).input_tokens
    body = fields_of("Hi", {})
    assert error_of(guarded.http.post("/v1/messages", json=body), 401)["type"] == "authentication_error"
    large = body | {"system": "x" * 5000}
    key = {"x-api-key": "secret"}
    assert error_of(guarded.http.post("/v1/messages", json=large, headers=key), 413)["type"] == "request_too_large"
    endless = fields_of([{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Loop"}], dict(FOREVER))
    kwargs = {"json": endless, "headers": key}
    asked = [threading.Thread(target=guarded.http.post, args=("/v1/messages",), kwargs=kwargs) for _ in range(2)]
    for waiting, thread in enumerate(asked):
        thread.start()
        guarded.wait(lambda stats, n=waiting: stats.num_running == 1 and guarded.engine.num_waiting == n)
    refused = guarded.http.post("/v1/messages", json=body, headers=key)
    assert error_of(refused, 429)["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) >= 1
    for thread in asked:
        thread.join()
    guarded.wait_idle()
