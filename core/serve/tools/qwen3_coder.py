"""Calls as Qwen3-Coder writes them: values without quotes, whose types the tool's schema tells.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Rome
    </parameter>
    <parameter=days>
    3
    </parameter>
    </function>
    </tool_call>

A value that its schema calls a string stays as it stands; any other is read as JSON, and is a string if it is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.serve.tools.calls import Call, Tools, call_of, read_json
from octavo.core.serve.tools.cursor import MAX_NAME_CHARS, Cursor, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def qwen3_coder(cursor: Cursor, tools: Tools) -> Steps[None]:
    """Read a reply."""
    while (yield from cursor.pass_on(OPEN, FUNCTION)) is not None:
        start = cursor.at
        yield from cursor.spaces()
        yield from cursor.one_of(OPEN)
        yield from cursor.spaces()
        call = yield from _function(cursor, tools)
        if call is None:
            cursor.give_back(start)
            continue
        cursor.call(*call)
        yield from cursor.spaces()
        yield from cursor.one_of(CLOSE)
        yield from cursor.spaces()


def _function(cursor: Cursor, tools: Tools) -> Steps[Call | None]:
    """The function that stands here; None if there is none, or not a whole one."""
    if (yield from cursor.one_of(FUNCTION)) is None:
        return None
    name, closed = yield from cursor.until(">", limit=MAX_NAME_CHARS)
    properties = tools.get(name, {}).get("properties")
    arguments: dict[str, Any] = {}
    while closed is not None:
        yield from cursor.spaces()
        tag = yield from cursor.one_of(PARAMETER, END_FUNCTION)
        if tag == END_FUNCTION:
            return call_of(name, arguments)
        if tag is None:
            return None
        key, closed = yield from cursor.until(">", limit=MAX_NAME_CHARS)
        if closed is not None:
            text, closed = yield from cursor.until(END_PARAMETER)
            arguments[key] = _value(text, properties.get(key) if isinstance(properties, Mapping) else None)
    return None


def _value(text: str, schema: Any) -> Any:
    """A parameter's value; the line feeds after its opening tag and before its closing one are the format's."""
    text = text.removeprefix("\n").removesuffix("\n")
    if not isinstance(schema, Mapping) or schema.get("type") == "string":
        return text
    word = text.strip()
    if word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    try:
        return read_json(word)
    except ValueError:
        return text
