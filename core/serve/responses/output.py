"""Blocks of a reply as the output items of /v1/responses.

text       {"type": "message", "content": [{"type": "output_text", "text", "annotations", "logprobs"}]}
reasoning  {"type": "reasoning", "content": [{"type": "reasoning_text", "text"}], "summary": []}
call       {"type": "function_call", "call_id", "name", "arguments"}
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from typing import Any

from octavo.core.serve.blocks import Block, Kind

Json = dict[str, Any]

_PREFIXES = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}


class Items:
    """The items of one response: their ids, and the logprobs of their text.

    Attributes:
        logprobs: of the text of each block, by its index.
    """

    def __init__(self) -> None:
        self._key = uuid.uuid4().hex
        self.logprobs: defaultdict[int, list[Json]] = defaultdict(list)

    def id_of(self, block: Block) -> str:
        """The item's id."""
        return f"{_PREFIXES[block.kind]}_{self._key}{block.index:04x}"

    def begun(self, block: Block) -> Json:
        """The item before it holds anything."""
        return self._item(block, "in_progress", [], "")

    def whole(self, block: Block, status: str) -> Json:
        """The item with all that it gained."""
        return self._item(block, status, [self.part(block, block.text)], block.text)

    def part(self, block: Block, text: str) -> Json:
        """The part that an item of text or of reasoning consists of."""
        if block.kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs[block.index] if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, block: Block, status: str, content: list[Json], arguments: str) -> Json:
        head = {"id": self.id_of(block), "status": status}
        if block.kind is Kind.CALL:
            call = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
            return {"type": "function_call", **head, **call}
        if block.kind is Kind.REASONING:
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", **head, "role": "assistant", "content": content}
