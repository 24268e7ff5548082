"""Calls as Llama 3.2 and 4 write them: a Python list of calls at the reply's start, or between special tokens.

    [get_weather(city="Rome", days=3), get_time()]
    <|python_start|>[get_weather(city="Rome")]<|python_end|>

Only calls of the request's tools count: the brackets may as well begin an ordinary answer.
"""

from __future__ import annotations

from octavo.core.serve.tools.calls import Call, Tools
from octavo.core.serve.tools.cursor import MAX_NAME_CHARS, Cursor, Steps
from octavo.core.serve.tools.python_calls import calls_of_list

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"


def pythonic(cursor: Cursor, tools: Tools) -> Steps[None]:
    """Read a reply."""
    while True:
        start = cursor.at
        yield from cursor.spaces()
        yield from cursor.one_of(OPEN)
        yield from cursor.spaces()
        calls = yield from _calls(cursor, tools)
        if calls is not None:
            for call in calls:
                cursor.call(*call)
            yield from cursor.spaces()
            yield from cursor.one_of(CLOSE)
        else:
            cursor.give_back(start)
        if (yield from cursor.pass_on(OPEN)) is None:
            return


def _calls(cursor: Cursor, tools: Tools) -> Steps[list[Call] | None]:
    """The list that stands here. Its first name is looked at before the rest is waited for."""
    if (yield from cursor.peek()) != "[":
        return None
    start = cursor.at
    cursor.at += 1
    name, _ = yield from cursor.until("(", limit=MAX_NAME_CHARS)
    if name.strip() not in tools:
        return None
    cursor.at = start
    return calls_of_list((yield from cursor.balanced("\"'")), tools)
