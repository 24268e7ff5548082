"""What a client wrote comes back in no error: not its values, and not the names that it made up.

One thing is told: what can't be honoured in a schema or grammar, in a line (FORMS), or nobody would find it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.conftest import Server

JSON = {"content-type": "application/json"}

MARK = "Zanzibar"
"""Stands in the request wherever a text may stand."""

FORMS = {"schema", "structural_tag", "guided_grammar", "regex", "parameters", "input_schema"}

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "time", "description": "Tells it.", "parameters": SCHEMA}}
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "time", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "plain"},
]  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "plain"},
]

BODIES: dict[str, list[dict[str, Any]]] = {
    "completions": [
        {"prompt": "x", "stop": ["a"], "logit_bias": {"1": 1}, "bad_words": ["b"], "cache_salt": "c", "user": "u",
         "n": 1, "temperature": 0.5, "stream_options": {"include_usage": True}, "stream": True},
        {"prompt": ["x"], "response_format": FORMAT},
        {"prompt": [1, 2], "structured_outputs": {"regex": "a+"}},
        {"prompt": [[1], [2]], "structured_outputs": {"structural_tag": TAG}},
        {"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}},
        {"prompt": "x", "guided_grammar": 'root ::= "a"'},
        {"prompt": "x", "guided_grammar": 'start: "a"'},
    ],
    "chat/completions": [
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "time"}}},
        {"messages": MESSAGES, "response_format": FORMAT, "chat_template_kwargs": {"a": 1}, "documents": [{"a": "b"}]},
        {"messages": MESSAGES, "tool_choice": "auto", "reasoning_effort": "low", "chat_template": "x"},
    ],
    "responses": [
        {"input": ITEMS, "instructions": "Answer soon.", "metadata": {"a": "b"}, "text": {"format": {"type": "text"}}},
        {"input": "Hi", "tools": [{"type": "function", "name": "time", "parameters": SCHEMA}], "tool_choice": "auto",
         "include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"}, "truncation": "auto"},
    ],
    "messages": [
        {"max_tokens": 1, "system": [{"type": "text", "text": "x"}], "messages": MESSAGES[:1],
         "thinking": {"type": "enabled"},
         "tools": [{"name": "time", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "time"}},
    ],
    "embeddings": [{"input": "x", "encoding_format": "float", "prompt_name": "x"}],
    "rerank": [{"query": "x", "documents": ["a", "b"], "top_n": 1}],
}  # fmt: skip


def marked(body: Any) -> Iterator[Any]:
    """Copies of a body with the mark in one place each: for a value, for a key, and beside the keys."""
    keys = list(body) if isinstance(body, dict) else range(len(body))
    for key in keys:
        if key in FORMS:
            continue
        for mark in (MARK, {MARK: MARK}):
            changed = copy.copy(body)
            changed[key] = mark
            yield changed
        if isinstance(body[key], dict | list):
            for inner in marked(body[key]):
                changed = copy.copy(body)
                changed[key] = inner
                yield changed
    if isinstance(body, dict):
        yield body | {MARK: MARK}
        for key in keys:
            yield {MARK if each == key else each: value for each, value in body.items()}


@pytest.mark.parametrize("path", BODIES)
def test_no_error_says_what_the_request_said(server: Server, scripted: Server, path: str) -> None:
    num_refused = 0
    for body in BODIES[path]:
        for changed in marked({"model": "tiny", "max_tokens": 1} | body):
            for each in (server, scripted) if path == "chat/completions" else (scripted,):
                response = each.http.post(f"/v1/{path}", json=changed)
                assert response.status_code < 500, (changed, response.text)
                if response.status_code >= 400:
                    num_refused += 1
                    assert MARK not in response.text, (changed, response.text)
                    assert len(response.content) < 4096
    assert num_refused > 5


def test_nor_do_the_errors_before_a_body_is_read(server: Server) -> None:
    for response in (
        server.http.get(f"/v1/{MARK}"),
        server.http.request(MARK.upper(), "/v1/completions"),
        server.http.post("/v1/completions", content=b"{}", headers={"content-type": f"text/{MARK}"}),
        server.http.post("/v1/completions", content=f'{{"{MARK}": {MARK}', headers=JSON),
    ):  # fmt: skip
        assert 400 <= response.status_code < 500
        assert MARK.lower() not in response.text.lower()
