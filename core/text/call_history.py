"""Calls that an assistant made earlier in a conversation, in the form that a chat template reads.

Clients send a call's arguments as the text of a JSON object, as OpenAI's API has it, or as the object itself. Templates
read one of the two: most walk over an object, some put a text into the prompt as it stands.

    "{\\"a\\": 3}" | {"a": 3} | "" | None ──▶ {"a": 3}, {}          for templates that read objects
                                       ──▶ "{\\"a\\": 3}", "{}"    for those that read texts
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from octavo.core.base.errors import InvalidRequest

_PROBE = "call_probe"


def reads_objects(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether a template reads arguments as objects; one that reads neither form, or both, counts as such.

    Args:
        render: writes out a conversation. Raises InvalidRequest.
    """
    as_object, as_text = (_rendered(render, form) for form in ({_PROBE: "x"}, json.dumps({_PROBE: "x"})))
    if as_object is not None:
        return f"{{'{_PROBE}'" not in as_object  # how Python writes a dict that was taken for a text
    return as_text is None


def prepare_calls(calls: Any, where: str, *, as_objects: bool) -> list[dict[str, Any]]:
    """The `tool_calls` of a message for a template.

    Args:
        where: the field, for errors.
        as_objects: the template reads arguments as objects.

    Raises:
        InvalidRequest: a call has no name, or arguments that are no JSON object.
    """
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(f"{where} is no list; give the calls as the reply had them", field=where)
    return [_prepared(call, f"{where}[{i}]", as_objects) for i, call in enumerate(calls)]


def _prepared(call: Any, where: str, as_objects: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} has no function with a name; give the call as the reply had it", field=where)
    given, field = function.get("arguments"), f"{where}.function.arguments"
    arguments = _object(given, field)
    if as_objects:
        return {**call, "function": {**function, "arguments": arguments}}
    is_text = isinstance(given, str) and given.strip()
    text = given if is_text else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _object(arguments: Any, field: str) -> Mapping[str, Any]:
    """The object that arguments stand for. Raises InvalidRequest."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is not valid JSON; give an object, or its text", field=field) from error
    elif arguments is None or isinstance(arguments, str):
        return {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{field} is no JSON object; give one, or its text", field=field)
    return arguments


def _rendered(render: Callable[[list[dict[str, Any]]], str], arguments: Any) -> str | None:
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    try:
        return render(
            [
                {"role": "user", "content": "probe"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "probe", "name": "probe", "tool_call_id": "abcdefgh1"},
            ]
        )
    except InvalidRequest:
        return None
