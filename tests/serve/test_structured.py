"""Structured output over HTTP, by OpenAI's client and by plain JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.serve.conftest import Server

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}, "adult": {"type": "boolean"}},
    "required": ["age", "adult"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Hi"}]


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"age", "adult"} and type(value["age"]) is int and type(value["adult"]) is bool


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_chat_reply_has_its_schema(server: Server, strict: bool | None) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": strict}}
    reply = server.chat(response_format=wanted, max_tokens=100, temperature=0, n=2)
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "stop"]
    assert all(is_person(choice.message.content) for choice in reply.choices)


def test_a_stream_brings_the_same_text(server: Server) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    fields: dict[str, Any] = {"response_format": wanted, "max_tokens": 100, "temperature": 0}
    whole = server.chat(**fields).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in server.chat(**fields, stream=True)]
    assert "".join(pieces) == whole


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}, r"\d{3}-\d{4}"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, "a|b"),
        ({"structured_outputs": {"json": {"const": 7}, "regex": None}}, "7"),
        ({"structured_outputs": {"json_object": True}}, r"(?s)\{.*\}"),
        ({"guided_regex": "x{2}"}, "xx"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_json": {"enum": [1, 2]}}, "1|2"),
        ({"guided_json": '{"enum": [1, 2]}'}, "1|2"),
        ({"guided_grammar": 'root ::= "ab"'}, "ab"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "c"}}}}, '"c"'),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_every_spelling_in_both_endpoints(server: Server, path: str, fields: dict[str, Any], pattern: str) -> None:
    reply = server.post(path, prompt="ABC", messages=MESSAGES, max_tokens=60, temperature=0, **fields)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    text = choice["text"] if path == "completions" else choice["message"]["content"]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, text), text
    else:  # only an object of any size may still be open
        assert "json_object" in str(fields)


def test_a_choice_with_more_logprobs_than_it_allows_tokens(server: Server) -> None:
    reply = server.post(
        "chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=20, temperature=0,
        structured_outputs={"choice": ["yes", "no"]},
    )  # fmt: skip
    assert reply.status_code == 200

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    (choice,) = json.loads(reply.content, parse_constant=refuse)["choices"]
    assert choice["message"]["content"] in ("yes", "no")
    for entry in choice["logprobs"]["content"]:
        assert -1e9 < entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 20


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("structured_outputs", {"regex": "foo**"}, "repeats a repetition"),
        ("structured_outputs", {"regex": "("}, "unclosed group"),
        ("structured_outputs", {"json": {"type": "strange"}}, "a type is none of null"),
        ("structured_outputs", {"json": {"type": "array", "uniqueItems": True}}, "'uniqueItems'"),
        ("structured_outputs", {"grammar": "start: missing"}, "missing"),
        ("structured_outputs", {"choice": []}, "choice"),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}, "exactly one"),
        ("structured_outputs", {"whitespace_pattern": "x", "json": {}}, "give one of json, json_object"),
        ("guided_choice", [], "choice"),
        ("guided_regex", "(", "unclosed group"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strange"}}},
            "a type is none of null",
        ),
        ("response_format", {"type": "xml"}, "json_schema"),
        ("response_format", {}, "json_schema"),
        ("response_format", {"type": "json_schema"}, "schema"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {}, "strong": 1}},
            "give name, description, schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_honoured_is_a_400_with_the_reason(
    server: Server, field: str, value: Any, said: str, stream: bool
) -> None:
    fields: dict[str, Any] = {field: value, "stream": stream}
    error = server.refusal("chat/completions", messages=MESSAGES, **fields)
    assert error["param"] == field
    assert said in error["message"]
    assert server.complete("ABC", max_tokens=2).choices[0].text  # its neighbours and the server go on


@pytest.mark.parametrize("form", [{"json": {"$ref": "#"}}, {"grammar": "start: a\na: a"}])
def test_a_form_that_only_goes_in_circles_is_a_400(server: Server, form: dict[str, Any]) -> None:
    assert "allows no text" in server.refusal(prompt="ABC", structured_outputs=form)["message"]


def test_a_form_that_grows_too_complex_tells_nothing_of_itself(server: Server) -> None:
    reply = server.post("completions", prompt="ABC", max_tokens=4, structured_outputs={"regex": "(a{1000}){1000}b"})
    message = reply.json()["error"]["message"]
    assert "too complex" in message
    assert "aaa" not in message


SPOILT = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(Zanzibar"}}, "required": ["a"]}
FINE = {"type": "object", "properties": {}}


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
def test_a_tool_whose_schema_cannot_be_honoured_is_named(scripted: Server, fields: dict[str, Any]) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("fine", FINE), ("spoilt", SPOILT))
    ]
    error = scripted.refusal("chat/completions", messages=MESSAGES, tools=tools, **fields)
    assert error["param"] == "tools[1].function.parameters"
    assert "unclosed group" in error["message"]
    assert "Zanzibar" not in error["message"]
    assert len(error["message"]) < 250


def test_so_it_is_in_the_words_of_the_other_apis(scripted: Server) -> None:
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "messages": MESSAGES}
    tool = {"name": "spoilt", "input_schema": SPOILT}
    reply = scripted.http.post("/v1/messages", json={**ask, "tools": [tool], "tool_choice": {"type": "any"}})
    assert reply.status_code == 400
    assert "tools[0].input_schema" in reply.json()["error"]["message"]
    function = {"type": "function", "name": "spoilt", "parameters": SPOILT}
    error = scripted.refusal("responses", input="Hi", tools=[function], tool_choice="required")
    assert error["param"] == "tools[0].parameters"
    format_ = {"type": "json_schema", "name": "x", "schema": SPOILT}
    assert scripted.refusal("responses", input="Hi", text={"format": format_})["param"].startswith("text.format")


def test_two_forms_are_one_too_many(server: Server) -> None:
    both: dict[str, Any] = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    assert "give one" in server.refusal(prompt="ABC", **both)["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_ends_goes_before_min_tokens(server: Server, path: str, stream: bool) -> None:
    reply = server.post(
        path, prompt="ABC", messages=MESSAGES, max_tokens=30, min_tokens=20, stream=stream, n=2,
        structured_outputs={"choice": ["yes"]},
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    assert reply.text.count('"finish_reason":"stop"') == 2
    assert "error" not in reply.text


def test_a_form_that_may_go_on_does_so_until_min_tokens(server: Server) -> None:
    reply = server.post(
        "completions", prompt="ABC", max_tokens=30, min_tokens=12, temperature=0, structured_outputs={"regex": "[ab]+"}
    ).json()
    assert reply["usage"]["completion_tokens"] >= 12
    assert re.fullmatch("[ab]+", reply["choices"][0]["text"])


def test_a_combination_that_leaves_nothing_is_an_error_and_no_hang(server: Server) -> None:
    with pytest.raises(openai.APIStatusError, match="no token is left") as raised:
        server.client.completions.create(
            model="tiny", prompt="ABC", max_tokens=30,
            extra_body={"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [0]},
        )  # fmt: skip
    assert raised.value.status_code == 500
