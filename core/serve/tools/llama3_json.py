"""Calls as Llama 3 writes them: a bare JSON object at the reply's start, or one behind a special token.

    {"name": "get_weather", "parameters": {"city": "Rome"}}; {"name": …}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}

A bare object may as well be the answer that the user wanted, so it is a call only if one of the request's tools has its
name and it holds parameters.
"""

from __future__ import annotations

from octavo.core.serve.tools.calls import Tools, call_of_text
from octavo.core.serve.tools.cursor import Cursor, Steps

TAG = "<|python_tag|>"


def llama3_json(cursor: Cursor, tools: Tools) -> Steps[None]:
    """Read a reply."""
    while True:
        start = cursor.at
        yield from cursor.spaces()
        if cursor.num_calls:
            yield from cursor.one_of(";", ",")
            yield from cursor.spaces()
        tag = yield from cursor.one_of(TAG)
        yield from cursor.spaces()
        call = None
        if (yield from cursor.peek()) == "{":
            call = call_of_text((yield from cursor.balanced()), tools if tag is None else None)
        if call is not None:
            cursor.call(*call)
            continue
        cursor.give_back(start)
        if (yield from cursor.pass_on(TAG)) is None:
            return
