"""/v1/responses by OpenAI's client: text, reasoning, calls, whole and streamed; what is echoed and what is refused."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from octavo.core.base.params import FinishReason
from tests.serve.conftest import Server, error_of
from tests.serve.scripts import NOTHING, ZONE

TOOLS: list[Any] = [
    {"type": "function", "name": "time", "description": "Tells it.", "parameters": ZONE, "strict": False},
    {"type": "function", "name": "city", "parameters": NOTHING, "strict": False},
]
VARYING = {"id", "created_at", "completed_at", "call_id", "item_id"}
"""What differs between two replies that are alike."""


def ask(server: Server, given: Any, **fields: Any) -> Any:
    return server.client.responses.create(model="tiny", input=given, **({"temperature": 0} | fields))


def alike(value: Any) -> Any:
    """A reply, or part of one, without what differs anyway."""
    if isinstance(value, dict):
        return {key: alike(inner) for key, inner in value.items() if key not in VARYING}
    return [alike(inner) for inner in value] if isinstance(value, list) else value


def events_of(server: Server, given: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, as they went over the wire, numbered and named as they should be."""
    body = {"model": "tiny", "input": given, "stream": True, "temperature": 0, **fields}
    with server.http.stream("POST", "/v1/responses", json=body) as response:
        text = response.read().decode()
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for number, block in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


def both(server: Server, given: Any, **fields: Any) -> dict[str, Any]:
    """A reply, after checking that its stream ends with the same one and that its events add up to it."""
    whole = server.http.post("/v1/responses", json={"model": "tiny", "input": given, "temperature": 0, **fields}).json()
    events = events_of(server, given, **fields)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    assert events[-1]["type"] == f"response.{whole['status']}"
    last = events[-1]["response"]
    assert alike(last | {"usage": None}) == alike(whole | {"usage": None})
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert events[0]["response"]["id"] == last["id"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    for index, item in enumerate(done):
        _check_item([event for event in events if event.get("output_index") == index], item)
    return whole


def _check_item(events: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """The events of one item come in their order and add up to it."""
    added, *inner, done = events
    assert added["type"] == "response.output_item.added"
    assert added["item"]["status"] == "in_progress"
    assert added["item"]["id"] == done["item"]["id"]
    if item["type"] == "function_call":
        word, words = "function_call_arguments", item["arguments"]
        assert inner[-1]["arguments"] == words
    else:
        (part,) = item["content"]
        word, words = part["type"], part["text"]
        assert (inner[0]["type"], inner[-1]["type"]) == ("response.content_part.added", "response.content_part.done")
        assert inner[-1]["part"] == part
        inner = inner[1:-1]
        assert inner[-1]["text"] == words
        assert all(event["content_index"] == 0 for event in inner)
    *deltas, last = inner
    assert {event["type"] for event in deltas} == {f"response.{word}.delta"}
    assert last["type"] == f"response.{word}.done"
    assert "".join(event["delta"] for event in deltas) == words
    assert {event["item_id"] for event in inner} == {item["id"]}


def test_a_reply_and_its_usage(scripted: Server) -> None:
    reply = ask(scripted, "Say plain", instructions="Be kind.", extra_body={"cache_salt": "nobody has it cached"})
    assert (reply.object, reply.status, reply.model, reply.error) == ("response", "completed", "tiny", None)
    assert reply.id.startswith("resp_")
    assert reply.output_text == "Hello world!"
    (item,) = reply.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (26, 5, 31)
    assert reply.usage.input_tokens_details.cached_tokens == 0
    assert reply.usage.output_tokens_details.reasoning_tokens == 0
    assert reply.completed_at >= reply.created_at


@pytest.mark.parametrize("word", ["plain", "hush", "think", "call"])
def test_streams_equal_whole_replies(scripted: Server, word: str) -> None:
    assert both(scripted, f"Say {word}", tools=TOOLS)["status"] == "completed"


def test_the_clients_own_stream_reads_it(scripted: Server) -> None:
    for word in ("plain", "think", "call"):
        with scripted.client.responses.stream(model="tiny", input=f"Say {word}", tools=TOOLS, temperature=0) as stream:
            types = [event.type for event in stream]
            final = stream.get_final_response()
        assert types[-1] == "response.completed"
        assert final.output_text == ask(scripted, f"Say {word}", tools=TOOLS).output_text


def test_reasoning_is_an_item_of_its_own(scripted: Server) -> None:
    reply = both(scripted, "Say think")
    thought, said = reply["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, four?"}]
    assert said["content"][0]["text"] == "Four."
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert reply["usage"]["output_tokens"] == 7


def test_calls(scripted: Server) -> None:
    said, *calls = both(scripted, "Please call", tools=TOOLS)["output"]
    assert said["content"][0]["text"] == "I'll look."
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("time", {"zone": "CET"}),
        ("city", {}),
    ]
    assert all(call["call_id"] and call["call_id"] != call["id"] for call in calls)
    assert len({item["id"] for item in [said, *calls]}) == 3


def test_one_call_when_more_are_not_wanted(scripted: Server) -> None:
    reply = both(scripted, "Please call", tools=TOOLS, parallel_tool_calls=False)
    assert [item["type"] for item in reply["output"]] == ["message", "function_call"]
    assert reply["parallel_tool_calls"] is False


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_nothing_is_a_call(scripted: Server, fields: dict[str, Any]) -> None:
    assert "<tool_call>" in ask(scripted, "Please call", **fields).output_text


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "time"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]},
    ],
)
def test_a_tool_that_must_be_called_is(caller: Server, choice: Any) -> None:
    reply = both(caller, "Say plain", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    (call,) = reply["output"]
    assert call["type"] == "function_call"
    wanted = {"time": {"zone": "CET"}} | ({"city": {}} if choice == "required" else {})
    assert json.loads(call["arguments"]) == wanted[call["name"]]
    assert (reply["status"], reply["tool_choice"]) == ("completed", choice)


def test_a_conversation_is_carried_by_its_items(scripted: Server) -> None:
    asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Please call"}]}]
    first = ask(scripted, asked, tools=TOOLS)
    history = asked + [item.model_dump() for item in first.output]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Now plain"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = ask(scripted, history + outputs, tools=TOOLS)
    assert second.output_text == "Hello world!"
    assert second.usage.input_tokens > first.usage.input_tokens
    thought = ask(scripted, "Say think")
    third = ask(scripted, [*(item.model_dump() for item in thought.output), {"role": "user", "content": "Say plain"}])
    assert third.output_text == "Hello world!"


def test_max_output_tokens_leaves_it_incomplete(scripted: Server) -> None:
    reply = both(scripted, "Say loop", max_output_tokens=3)
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert reply["output"][0]["status"] == "incomplete"
    assert reply["output"][0]["content"][0]["text"] == "tick tock tick "
    assert reply["completed_at"] is None
    cut = both(scripted, "Say think", max_output_tokens=2)
    assert [item["type"] for item in cut["output"]] == ["reasoning"]
    cut = both(scripted, "Please call", tools=TOOLS, max_output_tokens=4)
    assert [item["type"] for item in cut["output"]] == ["message"]


def turns(num_words: int) -> list[Any]:
    """A conversation of ten turns, the last of which asks for `plain`."""
    said = {"role": "assistant", "content": "Yes"}
    asked = [{"role": "user", "content": "hat " * num_words} for _ in range(9)]
    return [*(item for each in asked for item in (each, said)), {"role": "user", "content": "Say plain"}]


@pytest.mark.parametrize("num_words", [100, 100_000])
def test_truncation_leaves_out_the_oldest_turns(scripted: Server, num_words: int) -> None:
    fields: dict[str, Any] = {"instructions": "Be kind.", "max_output_tokens": 60}
    last = ask(scripted, "Say plain", **fields).usage.input_tokens
    reply = ask(scripted, turns(num_words), truncation="auto", **fields)
    assert (reply.output_text, reply.truncation) == ("Hello world!", "auto")
    turn = len(" user  assistant Yes") + len("hat ") * num_words  # a token a byte
    assert reply.usage.input_tokens == last + (2048 - 60 - last) // turn * turn
    error = scripted.refusal("responses", input=turns(num_words), **fields)
    assert "max_model_len" in error["message"]
    alone = scripted.refusal("responses", input=turns(num_words)[:1] * 3, truncation="auto", max_output_tokens=2000)
    assert "max_model_len" in alone["message"]


def test_truncation_leaves_out_nothing_that_fits(scripted: Server) -> None:
    sizes = {ask(scripted, turns(2), truncation=each).usage.input_tokens for each in ("auto", "disabled")}
    assert len(sizes) == 1


def test_text_has_the_form_asked_for(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"enum": [7, 8]}},
        "required": ["age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "person", "schema": schema, "strict": True}
    reply = both(server, "Hi", text={"format": form}, max_output_tokens=60)
    assert json.loads(reply["output"][0]["content"][0]["text"])["age"] in (7, 8)
    assert reply["text"]["format"] == form
    loose = ask(server, "Hi", text={"format": {"type": "json_object"}}, max_output_tokens=20)
    assert loose.output_text.startswith("{")


class Person(pydantic.BaseModel):
    """What a reply is parsed to."""

    age: Literal[7, 8]
    adult: bool


def test_the_client_parses_a_reply_to_its_own_class(server: Server) -> None:
    reply = server.client.responses.parse(
        model="tiny", input="Hi", text_format=Person, max_output_tokens=60, temperature=0
    )
    assert reply.output_parsed.age in (7, 8)
    with server.client.responses.stream(
        model="tiny", input="Hi", text_format=Person, max_output_tokens=60, temperature=0
    ) as stream:
        assert stream.get_final_response().output_parsed == reply.output_parsed


def test_logprobs_belong_to_the_text(scripted: Server) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": TOOLS}
    for word, tokens in (
        ("plain", ["Hello", " wor", "ld", "!"]),
        ("think", ["\n\nFour", "."]),
        ("call", ["I", "'ll look."]),
    ):
        reply = both(scripted, f"Say {word}", **fields)
        (text,) = [item["content"][0] for item in reply["output"] if item["type"] == "message"]
        assert [entry["token"] for entry in text["logprobs"]] == tokens
        assert {len(entry["top_logprobs"]) for entry in text["logprobs"]} == {2}
        deltas = [
            entry["token"]
            for event in events_of(scripted, f"Say {word}", **fields)
            if event["type"] == "response.output_text.delta"
            for entry in event["logprobs"]
        ]
        assert deltas == tokens
    plain = ask(scripted, "Say plain")
    assert plain.output[0].content[0].logprobs == []


def test_what_a_response_says_of_its_request(scripted: Server) -> None:
    metadata = {"team": "a"}
    reply = ask(
        scripted, "Say plain", metadata=metadata, instructions="Be kind.", max_output_tokens=9, top_p=0.5, store=True,
        tools=TOOLS, truncation="disabled", user="u", reasoning={"effort": "low"}, prompt_cache_key="k",
        include=["reasoning.encrypted_content"], service_tier="auto",
    )  # fmt: skip
    said = reply.model_dump()
    assert said["metadata"] == metadata
    assert (said["instructions"], said["max_output_tokens"], said["top_p"]) == ("Be kind.", 9, 0.5)
    assert (said["temperature"], said["tool_choice"], said["truncation"]) == (0, "auto", "disabled")
    assert [tool["name"] for tool in said["tools"]] == ["time", "city"]
    assert said["text"]["format"]["type"] == "text"
    assert (said["user"], said["prompt_cache_key"], said["reasoning"]["effort"]) == ("u", "k", "low")
    assert said["store"] is False, "nothing is kept, whatever was asked for"
    assert reply.previous_response_id is None


def test_a_client_that_leaves_ends_its_request(scripted: Server) -> None:
    before = scripted.stats().finished[FinishReason.ABORT]
    stream = ask(scripted, "Say loop", stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    scripted.wait_idle()
    with pytest.raises(openai.APITimeoutError):
        scripted.client.with_options(timeout=0.2).responses.create(model="tiny", input="Say loop", temperature=0)
    scripted.wait_idle()
    assert scripted.stats().finished[FinishReason.ABORT] == before + 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "x'}]},
            "input[0].arguments",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2048}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["x"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]}},
            "tool_choice.tools[0].name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": 5}, "metadata"),
        ({"temperature": 1000}, "temperature"),
    ],
)
def test_what_can_not_be_done_is_refused(scripted: Server, fields: dict[str, Any], param: str) -> None:
    error = scripted.refusal("responses", **({"input": "Say plain"} | fields))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_unknown_models_and_fields(scripted: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        scripted.client.responses.create(model="other", input="x")
    reply = scripted.post("responses", input="Say plain", wibble=1)
    assert reply.headers["x-octavo-ignored-fields"] == "wibble"


def test_nothing_is_kept(scripted: Server) -> None:
    reply = ask(scripted, "Say plain", store=True)
    for gone in (
        scripted.client.responses.retrieve,
        scripted.client.responses.delete,
        scripted.client.responses.cancel,
    ):
        with pytest.raises(openai.NotFoundError, match="no response is kept"):
            gone(reply.id)
    assert error_of(scripted.http.get(f"/v1/responses/{reply.id}/input_items"), 404)["type"] == "invalid_request_error"
