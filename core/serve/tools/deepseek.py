"""Calls as DeepSeek V3 and R1 write them, and V3.1, which leaves out what is not needed.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Rome"}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜> … <｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>

The markers around all calls say nothing that those of each call don't: they are dropped.
"""

from __future__ import annotations

from octavo.core.serve.tools.calls import Call, Tools, call_of
from octavo.core.serve.tools.cursor import MAX_NAME_CHARS, Cursor, Steps

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


def deepseek_v3(cursor: Cursor, tools: Tools) -> Steps[None]:  # noqa: ARG001 - marks alone tell a call
    """Read a reply."""
    while (yield from cursor.pass_on(ALL_BEGIN, BEGIN, ALL_END)) is not None:
        start = cursor.at
        yield from cursor.spaces()
        if (yield from cursor.one_of(ALL_BEGIN, BEGIN, ALL_END)) != BEGIN:
            continue
        call = yield from _call(cursor)
        if call is None:
            cursor.give_back(start)
            continue
        cursor.call(*call)
        yield from cursor.spaces()
        yield from cursor.one_of(FENCE)
        yield from cursor.spaces()
        yield from cursor.one_of(END)
        yield from cursor.spaces()


def _call(cursor: Cursor) -> Steps[Call | None]:
    name, mark = yield from cursor.until(SEPARATOR, limit=MAX_NAME_CHARS)
    if mark is not None and name.strip() == "function":
        name, mark = yield from cursor.until("\n", limit=MAX_NAME_CHARS)
    if mark is None:
        return None
    yield from cursor.spaces()
    yield from cursor.one_of(FENCE + "json")
    yield from cursor.spaces()
    text = yield from cursor.balanced()
    return None if text is None else call_of(name.strip(), text)
