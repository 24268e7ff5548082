"""What tools and tool_choice allow, read together; the names of parsers."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.base.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from octavo.core.base.errors import InvalidRequest
from octavo.core.serve.tools.choice import ToolUse, read_choice
from octavo.core.serve.tools.registry import CALL_FORMATS, REASONING_FORMATS, ReplyFormat

F: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G: dict[str, Any] = {"type": "function", "function": {"name": "g"}}
SCHEMAS = {"f": {"type": "object"}, "g": {}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("tools", "choice", "use"),
    [
        (None, None, ToolUse()),
        ([], "auto", ToolUse()),
        (None, "none", ToolUse()),
        ([F, G], "none", ToolUse()),
        ([F, G], None, ToolUse([F, G], SCHEMAS, False)),
        ([F, G], "auto", ToolUse([F, G], SCHEMAS, False)),
        ([F, G], "required", ToolUse([F, G], SCHEMAS, True)),
        ([F, G], named("g"), ToolUse([F, G], {"g": {}}, True, True)),
        ([F, G], allowed("auto", named("g")), ToolUse([G], {"g": {}}, False)),
        ([F, G], allowed("required", named("g"), named("f")), ToolUse([F, G], SCHEMAS, True)),
    ],
)
def test_what_a_request_allows(tools: Any, choice: Any, use: ToolUse) -> None:
    assert read_choice(tools, choice) == use


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        (None, "required", "tool_choice"),
        ([], named("f"), "tool_choice"),
        ([F], "any", "tool_choice"),
        ([F], {"type": "custom"}, "tool_choice"),
        ([F], named("g"), "tool_choice.function.name"),
        ([F], named(3), "tool_choice.function.name"),
        ([F], {"type": "function", "name": "f"}, "tool_choice.function.name"),
        ([F], allowed("any", named("f")), "tool_choice"),
        ([F], allowed("auto"), "tool_choice"),
        ([F], {"type": "allowed_tools"}, "tool_choice"),
        ([F], allowed("auto", named("g")), "tool_choice.allowed_tools.tools[0].function.name"),
        ([F, F], "none", "tools[1].function.name"),
    ],
)
def test_wrong_choices_are_refused(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_choice(tools, choice)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("calls", "reasoning", "said"),
    [
        ("none", "none", "calls of tools are left in the text, reasoning is left in the text"),
        ("hermes", "qwen3", "calls of tools are read as hermes, reasoning is read as qwen3"),
        ("gpt_oss", "none", "calls of tools are read as gpt_oss, reasoning is read as gpt_oss"),
    ],
)
def test_a_format_says_what_it_reads(calls: str, reasoning: str, said: str) -> None:
    assert str(ReplyFormat.of(calls, reasoning, None)) == said


def test_the_options_name_every_parser() -> None:
    assert ("auto", "none", *CALL_FORMATS) == TOOL_CALL_PARSERS
    assert ("auto", "none", *REASONING_FORMATS) == REASONING_PARSERS
