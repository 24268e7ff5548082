"""Turns of other APIs as OpenAI's chat messages, which chat templates read.

system(…)                         ┐ joined, when they come before all else: many templates take one alone
system(…)                         ┘
user(…)
reasoning(…) said(…) call(…)      one message of the assistant, until someone else speaks
result(…)                         one message of a tool, which names its call
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(slots=True)
class _Turn:
    """A message that is being written.

    Attributes:
        texts, reasoning: joined only when all is there, so that a long turn costs no more than its length.
        calls: that the assistant made.
        head: what a tool's message says besides.
    """

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    head: Json = field(default_factory=dict)

    def message(self) -> Json:
        said: Json = {"role": self.role, **self.head, "content": self._content()}
        if self.reasoning:
            said["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls:
            said["tool_calls"] = self.calls
        return said

    def _content(self) -> str | list[Json] | None:
        if self.role == "system":
            return "\n\n".join(self.texts)
        if self.role == "assistant":
            return "\n".join(self.texts) if self.texts else None
        if len(self.texts) == 1:
            return self.texts[0]
        return [{"type": "text", "text": text} for text in self.texts]  # joined where the template reads no parts


class Conversation:
    """A conversation that is being written down."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._called: dict[str, str] = {}

    def messages(self) -> list[Json]:
        """All of it."""
        return [turn.message() for turn in self._turns]

    def system(self, text: str) -> None:
        """Words of whoever runs the assistant."""
        if len(self._turns) != 1 or self._turns[0].role != "system":
            self._turns.append(_Turn("system"))
        self._turns[-1].texts.append(text)

    def user(self, texts: Sequence[str]) -> None:
        """Words of the user, in one message."""
        self._turns.append(_Turn("user", list(texts)))

    def said(self, text: str) -> None:
        """Words of the assistant."""
        self._assistant().texts.append(text)

    def reasoning(self, text: str) -> None:
        """Words that the assistant said to itself; templates decide what becomes of them."""
        self._assistant().reasoning.append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A call of a tool. `arguments` is the text of a JSON object."""
        self._called[call_id] = name
        function = {"name": name, "arguments": arguments}
        self._assistant().calls.append({"id": call_id, "type": "function", "function": function})

    def knows(self, call_id: str) -> bool:
        """Whether a call of that id was made."""
        return call_id in self._called

    def result(self, call_id: str, texts: Sequence[str]) -> None:
        """What a call that was made gave."""
        head = {"tool_call_id": call_id, "name": self._called[call_id]}
        self._turns.append(_Turn("tool", list(texts) or [""], head=head))

    def _assistant(self) -> _Turn:
        """The assistant's message that is being written."""
        if not self._turns or self._turns[-1].role != "assistant":
            self._turns.append(_Turn("assistant"))
        return self._turns[-1]
