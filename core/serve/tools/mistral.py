"""Calls as Mistral's models write them, before and after version 11 of their tokenizer.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": …}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]get_time[CALL_ID]9b1deb4d3[ARGS]{}

Their templates want ids of nine letters and digits, so `new_id` makes those; an id that the model wrote is kept if it
is one.
"""

from __future__ import annotations

import re

from octavo.core.serve.tools.calls import Call, Tools, call_of, call_of_json, read_json
from octavo.core.serve.tools.cursor import MAX_NAME_CHARS, Cursor, Steps

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def mistral(cursor: Cursor, tools: Tools) -> Steps[None]:  # noqa: ARG001 - marks alone tell a call
    """Read a reply."""
    while (yield from cursor.pass_on(OPEN)) is not None:
        start = cursor.at
        yield from cursor.spaces()
        yield from cursor.one_of(OPEN)
        yield from cursor.spaces()
        is_list = (yield from cursor.peek()) in ("[", "{")
        found = yield from (_listed(cursor) if is_list else _named(cursor))
        if not found:
            cursor.give_back(start)
            continue
        for (name, arguments), call_id in found:
            cursor.call(name, arguments, call_id)
        yield from cursor.spaces()


Found = list[tuple[Call, str | None]]


def _listed(cursor: Cursor) -> Steps[Found | None]:
    """The older form; all of the list are calls, or it is none."""
    text = yield from cursor.balanced()
    try:
        value = None if text is None else read_json(text)
    except ValueError:
        return None
    calls = [call_of_json(each) for each in (value if isinstance(value, list) else [value])]
    return [(call, None) for call in calls if call is not None] if None not in calls else None


def _named(cursor: Cursor) -> Steps[Found | None]:
    """The newer form, with or without [ARGS]."""
    name, mark = yield from cursor.until(ARGS, CALL_ID, "{", limit=MAX_NAME_CHARS)
    call_id = ""
    if mark == CALL_ID:
        call_id, mark = yield from cursor.until(ARGS, "{", limit=MAX_NAME_CHARS)
    if mark is None:
        return None
    if mark == "{":
        cursor.at -= 1
    yield from cursor.spaces()
    text = yield from cursor.balanced()
    call = None if text is None else call_of(name.strip(), text)
    return None if call is None else [(call, call_id if re.fullmatch("[A-Za-z0-9]{9}", call_id) else None)]
