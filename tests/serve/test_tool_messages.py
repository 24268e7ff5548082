"""Tools of a request are checked; deltas become OpenAI's messages."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.base.errors import InvalidRequest
from octavo.core.serve.tools.message import ChoiceMessage
from octavo.core.serve.tools.registry import ReplyFormat
from octavo.core.serve.tools.request import MAX_SCHEMA_DEPTH, MAX_TOOLS, read_tools

CALLS = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'


def message(**options: Any) -> ChoiceMessage:
    parser = ReplyFormat.of("hermes", "qwen3", None).open_parser({"f": {}, "g": {}}, "")
    assert parser is not None
    return ChoiceMessage(parser, **options)


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_a_message_of_calls_alone_has_no_content() -> None:
    made = message().message(CALLS)
    assert made["content"] is None
    assert "reasoning" not in made
    functions = [call["function"] for call in made["tool_calls"]]
    assert functions == [{"name": "f", "arguments": "{}"}, {"name": "g", "arguments": '{"a": 1}'}]
    assert len({call["id"] for call in made["tool_calls"]}) == 2


def test_a_message_without_calls_has_content_and_no_list() -> None:
    made = message().message("<think>Hm.</think>Four.")
    assert made == {
        "role": "assistant", "refusal": None, "content": "Four.", "reasoning": "Hm.", "reasoning_content": "Hm.",
    }  # fmt: skip
    assert message().message("")["content"] == ""


def test_deltas_add_up_to_the_message() -> None:
    streamed = message()
    gained = [streamed.delta(each, ended=False) for each in f"<think>Hm.</think>I look. {CALLS}"]
    gained.append(streamed.delta("", ended=True))
    assert "".join(each.get("content", "") for each in gained) == "I look."
    assert "".join(each.get("reasoning", "") for each in gained) == "Hm."
    calls = [call for each in gained for call in each.get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "f"), (1, "g")]
    assert streamed.num_calls == 2


def test_one_call_and_no_reasoning_when_asked() -> None:
    made = message(parallel=False, reasoning=False).message(f"<think>Hm.</think>{CALLS}")
    assert [call["function"]["name"] for call in made["tool_calls"]] == ["f"]
    assert "reasoning" not in made


def test_tools_are_read() -> None:
    schema = {"type": "object"}
    assert read_tools([tool("f", parameters=schema), tool("a.b-c_1")]) == {"f": schema, "a.b-c_1": {}}
    assert read_tools([tool(parameters=nested(MAX_SCHEMA_DEPTH))])


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([tool()] * (MAX_TOOLS + 1), "tools"),
        ([3], "tools[0]"),
        ([{"type": "web_search"}], "tools[0]"),
        ([tool("a b")], "tools[0].function.name"),
        ([tool(3)], "tools[0].function.name"),
        ([tool("x" * 65)], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters=nested(MAX_SCHEMA_DEPTH + 1))], "tools[0].function.parameters"),
        ([tool(parameters=nested(5000))], "tools[0].function.parameters"),
        ([tool(parameters={"description": "x" * 100_001})], "tools[0].function.parameters"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools: list[Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_tools(tools)
    assert refusal.value.field == field
    assert len(str(refusal.value)) < 300
