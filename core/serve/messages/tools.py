"""The tools of /v1/messages as chat completions spell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.base.errors import InvalidRequest

Json = dict[str, Any]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None) -> tuple[list[Json], Any]:
    """The tools, and which of them may or must be called.

    Raises:
        InvalidRequest: a tool or a choice of a kind that this server does not have.
    """
    functions = [_function(i, tool) for i, tool in enumerate(tools or ())]
    kind = "auto" if choice is None else choice.get("type")
    if kind == "tool" and choice is not None:
        name = choice.get("name")
        if not isinstance(name, str):
            raise InvalidRequest("tool_choice.name must be that of a tool", field="tool_choice.name")
        return functions, {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", field="tool_choice.type")
    return functions, _CHOICES[kind]


def _function(index: int, tool: Mapping[str, Any]) -> Json:
    where = f"tools[{index}]"
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"{where}.type is that of a tool which this server does not have; give tools with an input_schema",
            field=f"{where}.type",
        )
    if not isinstance(tool.get("input_schema"), Mapping):
        raise InvalidRequest(f"{where}.input_schema must be a JSON schema", field=f"{where}.input_schema")
    given = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**given, "parameters": tool["input_schema"]}}
