"""Calls as Hermes and Qwen write them.

    I'll look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Rome"}}
    </tool_call>
    <tool_call> … </tool_call>

A call counts once its JSON is whole; a closing tag that is missing is not missed.
"""

from __future__ import annotations

from octavo.core.serve.tools.calls import Tools, call_of_text
from octavo.core.serve.tools.cursor import Cursor, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def hermes(cursor: Cursor, tools: Tools) -> Steps[None]:  # noqa: ARG001 - marks alone tell a call
    """Read a reply."""
    while (yield from cursor.pass_on(OPEN)) is not None:
        start = cursor.at
        yield from cursor.spaces()
        yield from cursor.one_of(OPEN)
        yield from cursor.spaces()
        call = call_of_text((yield from cursor.balanced()))
        if call is None:
            cursor.give_back(start)
            continue
        cursor.call(*call)
        yield from cursor.spaces()
        yield from cursor.one_of(CLOSE)
        yield from cursor.spaces()
