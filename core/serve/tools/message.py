"""Deltas as OpenAI's chat JSON: the whole message, or what a piece adds to it in a stream.

    text, its end ──▶ parser ──▶ deltas ──▶ message()  {"content": …, "reasoning": …, "tool_calls": [{…}]}
                                       └──▶ delta()    the same keys, each only where it gained something

`reasoning` is given under `reasoning_content` too, which older clients read. One `ChoiceMessage` serves one choice.
"""

from __future__ import annotations

from typing import Any

from octavo.core.serve.tools.deltas import CallStart, ReasoningDelta, TextDelta, ToolParser

Json = dict[str, Any]


class ChoiceMessage:
    """The message of one choice.

    Args:
        parser: reads its text.
        parallel: with False, calls after the first are left out.
        reasoning: with False, reasoning is left out.

    Attributes:
        num_calls: calls given so far.
        reasoned: what the model said to itself in the last piece, whether it is left out or not.
    """

    def __init__(self, parser: ToolParser, *, parallel: bool = True, reasoning: bool = True) -> None:
        self._parser = parser
        self._parallel = parallel
        self._reasoning = reasoning
        self.num_calls = 0
        self.reasoned = ""

    def delta(self, text: str, *, ended: bool) -> Json:
        """What the next piece of text adds; empty for nothing."""
        deltas = self._parser.feed(text) + (self._parser.finish() if ended else [])
        content, self.reasoned, calls = "", "", list[Json]()
        for each in deltas:
            if isinstance(each, TextDelta):
                content += each.text
            elif isinstance(each, ReasoningDelta):
                self.reasoned += each.text
            elif each.index > 0 and not self._parallel:
                continue
            elif isinstance(each, CallStart):
                self.num_calls += 1
                function = {"name": each.name, "arguments": ""}
                calls.append({"index": each.index, "id": each.id, "type": "function", "function": function})
            elif calls and calls[-1]["index"] == each.index:
                calls[-1]["function"]["arguments"] += each.text
            else:
                calls.append({"index": each.index, "function": {"arguments": each.text}})
        reasoning = self.reasoned if self._reasoning else ""
        gained: Json = {"content": content, "reasoning": reasoning, "reasoning_content": reasoning, "tool_calls": calls}
        return {key: value for key, value in gained.items() if value}

    def message(self, text: str) -> Json:
        """The message of a whole text; its content is null where there are calls only."""
        gained = self.delta(text, ended=True)
        for call in gained.get("tool_calls", ()):
            del call["index"]
        return {"role": "assistant", "refusal": None, "content": None if self.num_calls else "", **gained}
