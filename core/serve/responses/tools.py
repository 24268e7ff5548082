"""The tools of /v1/responses as chat completions spell them, where what is flat here lies one level deeper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.base.errors import InvalidRequest

Json = dict[str, Any]

_FUNCTION_KEYS = ("name", "description", "parameters", "strict")


def chat_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None
) -> tuple[list[Json], Any]:
    """The tools, and which of them may or must be called.

    Raises:
        InvalidRequest: a tool or a choice of a kind that this server does not have.
    """
    functions = [_function(i, tool) for i, tool in enumerate(tools or ())]
    if choice is None or isinstance(choice, str):
        return functions, choice or "auto"
    if choice.get("type") == "allowed_tools":
        return functions, _allowed(choice)
    return functions, _named(choice, "tool_choice")


def _function(index: int, tool: Mapping[str, Any]) -> Json:
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"tools[{index}].type is not function, and no other tools are here; leave it out",
            field=f"tools[{index}].type",
        )
    return {"type": "function", "function": {key: tool[key] for key in _FUNCTION_KEYS if tool.get(key) is not None}}


def _allowed(choice: Mapping[str, Any]) -> Json:
    tools = choice.get("tools")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest("tool_choice.tools must be a list of tools", field="tool_choice.tools")
    named = [_named(each, f"tool_choice.tools[{i}]") for i, each in enumerate(tools)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": named}}


def _named(choice: Any, where: str) -> Json:
    name = choice.get("name") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(name, str):
        raise InvalidRequest(f"{where} must name a function: {{'type': 'function', 'name': …}}", field=where)
    return {"type": "function", "function": {"name": name}}
