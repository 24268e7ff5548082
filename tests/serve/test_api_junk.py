"""Whatever stands in a body of /v1/responses or /v1/messages, it is answered or refused in the API's own form."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve import test_messages
from tests.serve.conftest import Server, error_of
from tests.serve.scripts import ZONE
from tests.serve.test_refusals import JUNK

CALL = {"name": "time", "arguments": '{"zone": "CET"}'}

RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "instructions": "Be kind.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]},
        {"type": "function_call", "call_id": "c", **CALL},
        {"type": "function_call_output", "call_id": "c", "output": "plain"},
    ],
    "tools": [{"type": "function", "name": "time", "description": "Tells it.", "parameters": ZONE, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "max_output_tokens": 2,
    "stream_options": {"include_obfuscation": False},
    "chat_template_kwargs": {"a": 1},
}

MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "tool_use", "id": "c", "name": "time", "input": {"zone": "CET"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "plain"}]}],
        },
    ],
    "tools": [{"name": "time", "description": "Tells it.", "input_schema": ZONE}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
    "output_config": {"effort": "low"},
    "metadata": {"user_id": "u"},
    "max_tokens": 2,
    "stop_sequences": ["zz"],
    "chat_template_kwargs": {"a": 1},
}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a value, with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


@pytest.mark.parametrize(("path", "right"), [("responses", RESPONSES), ("messages", MESSAGES)])
def test_junk_anywhere_is_answered_or_refused(scripted: Server, path: str, right: dict[str, Any]) -> None:
    rng = random.Random(0)
    assert scripted.http.post(f"/v1/{path}", json=right).status_code == 200
    seen = set()
    for i in range(600):
        body = copy.deepcopy(right)
        container, key = rng.choice([place for place in places(body) if place[1] != "model"])
        if rng.random() < 0.1:
            del container[key]
        else:
            container[key] = rng.choice(JUNK)
        response = scripted.http.post(f"/v1/{path}", json=body | {"stream": i % 4 == 0})
        seen.add(response.status_code)
        if response.status_code != 200:
            (error_of if path == "responses" else test_messages.error_of)(response, 400)
    assert seen == {200, 400}
