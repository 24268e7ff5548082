"""Anthropic's messages as a chat: their blocks become messages of the user, the assistant and tools.

    system                                 ──▶ system
    user       [tool_result, text]         ──▶ tool, user
    assistant  [thinking, text, tool_use]  ──▶ assistant, with reasoning_content and tool_calls

Turns of one role that follow each other are one, as in Anthropic's API. Where the assistant's turn comes last, the
reply goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.base.errors import InvalidRequest
from octavo.core.serve.conversation import Conversation

Block = Mapping[str, Any]


def read_messages(system: str | Sequence[Any] | None, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A chat's messages.

    Raises:
        InvalidRequest: naming the message and the block.
    """
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message", field="messages")
    conversation = Conversation()
    if system:
        conversation.system("\n".join(_texts(system, "system")))
    said: list[str] = []  # by the user, since the last message of somebody else
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role, blocks = message.get("role"), _blocks(message.get("content"), f"{where}.content")
        if role == "user":
            for j, block in enumerate(blocks):
                _take_user(conversation, said, block, f"{where}.content[{j}]")
            continue
        _flush(conversation, said)
        if role == "system":
            conversation.system("\n".join(_texts(blocks, f"{where}.content")))
        elif role == "assistant":
            for j, block in enumerate(blocks):
                _take_assistant(conversation, block, f"{where}.content[{j}]")
        else:
            raise InvalidRequest(f"{where}.role must be user, assistant or system", field=f"{where}.role")
    _flush(conversation, said)
    chat = conversation.messages()
    if not chat:
        raise InvalidRequest("messages holds no block that could be read; give at least one of text", field="messages")
    if chat[-1].get("tool_calls"):
        raise InvalidRequest("messages ends with a tool_use; give its tool_result", field="messages")
    return chat


def _take_user(conversation: Conversation, said: list[str], block: Block, where: str) -> None:
    if block.get("type") != "tool_result":
        said += _texts([block], where, indexed=False)
        return
    _flush(conversation, said)
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str) or not conversation.knows(call_id):
        raise InvalidRequest(
            f"{where}.tool_use_id is that of no tool_use before it; send the assistant's turn too",
            field=f"{where}.tool_use_id",
        )
    texts = _texts(block.get("content") or "", f"{where}.content")
    conversation.result(call_id, ["Error:", *texts] if block.get("is_error") is True else texts)


def _take_assistant(conversation: Conversation, block: Block, where: str) -> None:
    kind = block.get("type")
    if kind == "thinking":
        conversation.reasoning(_text_of(block, "thinking", where))
    elif kind == "tool_use":
        arguments = block.get("input")
        if not isinstance(arguments, Mapping):
            raise InvalidRequest(f"{where}.input must be an object", field=f"{where}.input")
        call_id, name = _text_of(block, "id", where), _text_of(block, "name", where)
        conversation.call(call_id, name, json.dumps(arguments, ensure_ascii=False))
    elif kind != "redacted_thinking":  # which nobody here can read
        conversation.said(_texts([block], where, indexed=False)[0])


def _flush(conversation: Conversation, said: list[str]) -> None:
    """Write down what the user said."""
    if said:
        conversation.user(said)
        said.clear()


def _blocks(content: Any, where: str) -> list[Block]:
    """Content as blocks, whichever way it was given."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise InvalidRequest(f"{where} must be a text or a list of blocks", field=where)
    return content


def _texts(content: Any, where: str, *, indexed: bool = True) -> list[str]:
    """The texts of content that holds nothing else."""
    texts = []
    for i, block in enumerate(_blocks(content, where)):
        place = f"{where}[{i}]" if indexed and not isinstance(content, str) else where
        if block.get("type") != "text":
            raise InvalidRequest(
                f"{place} is no text, and this model takes text only; give {{'type': 'text', 'text': …}}", field=place
            )
        texts.append(_text_of(block, "text", place))
    return texts


def _text_of(block: Block, key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{key} must be a text", field=f"{where}.{key}")
    return value
