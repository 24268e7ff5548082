"""Calls as Gemma 3 writes them when its prompt describes tools: in a fence, as Python or as JSON, or as bare JSON.

    ```tool_code                              ```json
    get_weather(city="Rome")                  {"name": "get_weather", "parameters": {"city": "Rome"}}
    ```                                       ```

Gemma has no token for calls, and answers hold such fences too: only calls of the request's tools count, and in Python
only if the whole fence is calls.
"""

from __future__ import annotations

from octavo.core.serve.tools.calls import Call, Tools, call_of_text
from octavo.core.serve.tools.cursor import Cursor, Steps
from octavo.core.serve.tools.python_calls import calls_of_code

CODE, JSON, FENCE = "```tool_code", "```json", "```"


def gemma(cursor: Cursor, tools: Tools) -> Steps[None]:
    """Read a reply."""
    while True:
        start = cursor.at
        yield from cursor.spaces()
        calls = yield from _calls(cursor, tools)
        if calls:
            for call in calls:
                cursor.call(*call)
            yield from cursor.spaces()
        else:
            cursor.give_back(start)
        if (yield from cursor.pass_on(CODE, JSON)) is None:
            return


def _calls(cursor: Cursor, tools: Tools) -> Steps[list[Call] | None]:
    fence = yield from cursor.one_of(CODE, JSON)
    if fence == CODE:
        code, closed = yield from cursor.until(FENCE)
        return None if closed is None else calls_of_code(code, tools)
    yield from cursor.spaces()
    if (yield from cursor.peek()) != "{":
        return None
    call = call_of_text((yield from cursor.balanced()), tools)
    if call is None:
        return None
    if fence is not None:
        yield from cursor.spaces()
        yield from cursor.one_of(FENCE)
    return [call]
