"""Turns of other APIs as OpenAI's chat messages, which chat templates read.

system(…)                         ┐ joined, when they come before all else: many templates take one alone
system(…)                         ┘
user(…)
reasoning(…) said(…) call(…)      one message of the assistant, until someone else speaks
result(…)                         one message of a tool, which names its call
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


class Conversation:
    """A conversation that is being written down.

    Attributes:
        messages: so far.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._called: dict[str, str] = {}

    def system(self, text: str) -> None:
        """Words of whoever runs the assistant."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def user(self, texts: Sequence[str]) -> None:
        """Words of the user, in one message."""
        self.messages.append({"role": "user", "content": _content(texts)})

    def said(self, text: str) -> None:
        """Words of the assistant."""
        turn = self._turn()
        turn["content"] = text if turn["content"] is None else f"{turn['content']}\n{text}"

    def reasoning(self, text: str) -> None:
        """Words that the assistant said to itself; templates decide what becomes of them."""
        turn = self._turn()
        turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), text)))

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A call of a tool. `arguments` is the text of a JSON object."""
        self._called[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def knows(self, call_id: str) -> bool:
        """Whether a call of that id was made."""
        return call_id in self._called

    def result(self, call_id: str, texts: Sequence[str]) -> None:
        """What a call that was made gave."""
        head = {"role": "tool", "tool_call_id": call_id, "name": self._called[call_id]}
        self.messages.append({**head, "content": _content(texts)})

    def _turn(self) -> Json:
        """The assistant's message that is being written."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]


def _content(texts: Sequence[str]) -> str | list[Json]:
    """One text as it is, several as parts, which the template's reader joins where the template does not."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts] if texts else ""
