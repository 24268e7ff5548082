"""The tools of a request, checked: names, and schemas bounded in size and depth before anything walks over them.

{"type": "function", "function": {"name": "get_weather", "description": …, "parameters": {JSON schema}}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.base.errors import InvalidRequest
from octavo.core.serve.tools.calls import Tools

MAX_TOOLS = 128
"""As in OpenAI's API."""

MAX_SCHEMA_CHARS = 100_000
MAX_SCHEMA_DEPTH = 64

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def read_tools(tools: Sequence[Any]) -> Tools:
    """The schema of each tool's parameters, by its name.

    Raises:
        InvalidRequest: naming the tool, the limit and the fix.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries; give at most {MAX_TOOLS}", field="tools")
    found: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise InvalidRequest(
                f"{where} is no function; give {{'type': 'function', 'function': {{'name': …}}}}", field=where
            )
        name = function.get("name")
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"{where}.function.name must be 1 to 64 letters, digits, or one of _ . -",
                field=f"{where}.function.name",
            )
        if name in found:
            raise InvalidRequest(
                f"{where}.function.name is that of an earlier tool; give each one once", field=f"{where}.function.name"
            )
        found[name] = _schema(function.get("parameters"), f"{where}.function.parameters")
    return found


def _schema(schema: Any, where: str) -> Mapping[str, Any]:
    if schema is None:
        return {}
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{where} is no object; give a JSON schema, or leave it out", field=where)
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            break
    else:
        raise InvalidRequest(
            f"{where} nests more than {MAX_SCHEMA_DEPTH} levels deep; give a flatter schema", field=where
        )
    if (size := len(json.dumps(schema))) > MAX_SCHEMA_CHARS:
        raise InvalidRequest(f"{where} has {size} characters; give at most {MAX_SCHEMA_CHARS}", field=where)
    return schema


def _inside(value: Any) -> Sequence[Any]:
    """The containers in a container."""
    values = value.values() if isinstance(value, Mapping) else value
    return [each for each in values if isinstance(each, Mapping | list)]
