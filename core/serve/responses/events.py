"""The events of a streamed response, numbered from 0 on.

response.created  response.in_progress
  response.output_item.added
    response.content_part.added                            text and reasoning
      response.output_text.delta ...                       or reasoning_text, or function_call_arguments
      response.output_text.done
    response.content_part.done
  response.output_item.done  ...
response.completed                                         or incomplete, or failed
"""

from __future__ import annotations

from typing import Any

from octavo.core.serve.blocks import Block, Kind
from octavo.core.serve.replies import event
from octavo.core.serve.responses.output import Items

Json = dict[str, Any]

_WORDS = {Kind.TEXT: "output_text", Kind.REASONING: "reasoning_text", Kind.CALL: "function_call_arguments"}


class ResponseEvents:
    """Writes the events of one response."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self._number = 0

    def response(self, what: str, response: Json) -> bytes:
        """The response as a whole: created, in_progress, completed, incomplete or failed."""
        return self._event(what, {"response": response})

    def opened(self, block: Block) -> bytes:
        """A block began."""
        added = self._item("added", block, self._items.begun(block))
        return added if block.kind is Kind.CALL else added + self._part("added", block, "")

    def gained(self, block: Block, text: str, logprobs: list[Json]) -> bytes:
        """A block grew."""
        return self._words("delta", block, {"delta": text}, logprobs)

    def closed(self, block: Block, status: str) -> bytes:
        """A block ended, as `status` says."""
        text = block.text
        is_call = block.kind is Kind.CALL
        whole = {"name": block.name, "arguments": text} if is_call else {"text": text}
        done = self._words("done", block, whole, self._items.logprobs[block.index])
        if not is_call:
            done += self._part("done", block, text)
        return done + self._item("done", block, self._items.whole(block, status))

    def _words(self, what: str, block: Block, words: Json, logprobs: list[Json]) -> bytes:
        if block.kind is not Kind.CALL:
            words["content_index"] = 0
        if block.kind is Kind.TEXT:
            words["logprobs"] = logprobs
        return self._event(f"{_WORDS[block.kind]}.{what}", {**self._place(block), **words})

    def _part(self, what: str, block: Block, text: str) -> bytes:
        part = {"content_index": 0, "part": self._items.part(block, text)}
        return self._event(f"content_part.{what}", {**self._place(block), **part})

    def _item(self, what: str, block: Block, item: Json) -> bytes:
        return self._event(f"output_item.{what}", {"output_index": block.index, "item": item})

    def _place(self, block: Block) -> Json:
        return {"item_id": self._items.id_of(block), "output_index": block.index}

    def _event(self, what: str, data: Json) -> bytes:
        number, self._number = self._number, self._number + 1
        name = f"response.{what}"
        return event({"type": name, "sequence_number": number, **data}, name)
