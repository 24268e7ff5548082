"""The input of /v1/responses as a chat: messages, calls, their outputs and reasoning, one after the other.

"Hi"                                                   a user's message
{"type": "message", "role", "content"}                 type may be left out; content is a text or parts of text
{"type": "reasoning", "content" or "summary"}          goes to the assistant's message that follows
{"type": "function_call", "call_id", "name", "arguments"}
{"type": "function_call_output", "call_id", "output"}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.base.errors import InvalidRequest
from octavo.core.serve.conversation import Conversation
from octavo.core.serve.tools.calls import write_arguments

Item = Mapping[str, Any]

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def read_input(instructions: str | None, value: str | Sequence[Item]) -> list[dict[str, Any]]:
    """A chat's messages.

    Raises:
        InvalidRequest: naming the item.
    """
    if not value:
        raise InvalidRequest("input is empty; give a text or at least one item", field="input")
    conversation = Conversation()
    if instructions:
        conversation.system(instructions)
    if isinstance(value, str):
        conversation.user([value])
        return conversation.messages()
    for i, item in enumerate(value):
        kind = item.get("type") or "message"
        read = _READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise InvalidRequest(
                f"input[{i}].type is not supported; give {', '.join(_READERS)}", field=f"input[{i}].type"
            )
        read(conversation, item, f"input[{i}]")
    return conversation.messages()


def _message(conversation: Conversation, item: Item, where: str) -> None:
    role = item.get("role")
    texts = _texts(item.get("content"), f"{where}.content")
    if role == "user":
        conversation.user(texts)
    elif role == "assistant":
        for text in texts:
            conversation.said(text)
    elif role in ("system", "developer"):
        conversation.system("\n".join(texts))
    else:
        raise InvalidRequest(f"{where}.role must be user, assistant, system or developer", field=f"{where}.role")


def _reasoning(conversation: Conversation, item: Item, where: str) -> None:
    words = item.get("content") or item.get("summary")
    for text in _texts(words, f"{where}.content") if words else ():
        conversation.reasoning(text)


def _call(conversation: Conversation, item: Item, where: str) -> None:
    call_id, name, arguments = (_text_of(item, key, where) for key in ("call_id", "name", "arguments"))
    if write_arguments(arguments) is None:
        raise InvalidRequest(f"{where}.arguments must be the text of a JSON object", field=f"{where}.arguments")
    conversation.call(call_id, name, arguments)


def _output(conversation: Conversation, item: Item, where: str) -> None:
    call_id = _text_of(item, "call_id", where)
    if not conversation.knows(call_id):
        raise InvalidRequest(
            f"{where}.call_id is that of no function_call before it; send the call too, for nothing is kept here",
            field=f"{where}.call_id",
        )
    conversation.result(call_id, _texts(item.get("output"), f"{where}.output"))


_READERS: Mapping[str, Callable[[Conversation, Item, str], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}


def _text_of(item: Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{key} must be a text", field=f"{where}.{key}")
    return value


def _texts(value: Any, where: str) -> list[str]:
    """The texts of a text, or of a list of parts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a text or a list of parts", field=where)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in (*TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise InvalidRequest(
                f"{where}[{i}] is no text, and this model takes text only; give {{'type': 'input_text', 'text': …}}",
                field=f"{where}[{i}]",
            )
        texts.append(text)
    return texts
