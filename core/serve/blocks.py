"""A reply as the blocks it is made of, one after the other; the APIs that list them (Responses, Messages) stand on it.

    text of one choice ──▶ parser ──▶ deltas ──▶ Opened  Gained Gained ...  Closed   Opened  Gained ...  Closed
                                                 └── block 0: reasoning ──┘ └── block 1: a call ──────┘

One block is open at a time. A `BlockReader` belongs to one choice and owns its blocks; APIs read them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from octavo.core.serve.tools.deltas import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta, ToolParser


class Kind(enum.Enum):
    """What a block holds."""

    TEXT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True)
class Block:
    """A part of a reply.

    Attributes:
        index: its place in the reply.
        parts: what it gained so far: words, or the JSON text of a call's arguments.
        call_id, name: of a call.
    """

    index: int
    kind: Kind
    parts: list[str] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """All that it gained."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Gained:
    """A block grew."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is complete, or was cut by the end of the reply."""

    block: Block


Step = Opened | Gained | Closed


class BlockReader:
    """Turns the text of one choice into blocks.

    Args:
        parser: reads the text.
        parallel: with False, calls after the first are left out.
        reasoning: with False, reasoning is left out.

    Attributes:
        blocks: all that were opened; only this class writes to them.
    """

    def __init__(self, parser: ToolParser, *, parallel: bool = True, reasoning: bool = True) -> None:
        self._parser = parser
        self._parallel = parallel
        self._reasoning = reasoning
        self._open: Block | None = None
        self.blocks: list[Block] = []

    @property
    def has_calls(self) -> bool:
        """Whether any block is a call."""
        return any(block.kind is Kind.CALL for block in self.blocks)

    def feed(self, text: str, *, ended: bool) -> list[Step]:
        """What the next piece of text brings; `ended` when it is the last one."""
        steps: list[Step] = []
        for delta in self._parser.feed(text) + (self._parser.finish() if ended else []):
            if self._is_wanted(delta):
                self._take(delta, steps)
        if ended:
            self._close(steps)
        return steps

    def _is_wanted(self, delta: Delta) -> bool:
        if isinstance(delta, CallStart | CallArguments):
            return self._parallel or delta.index == 0
        return bool(delta.text) and (self._reasoning or isinstance(delta, TextDelta))

    def _take(self, delta: Delta, steps: list[Step]) -> None:
        if isinstance(delta, CallStart):
            self._start(Block(len(self.blocks), Kind.CALL, call_id=delta.id, name=delta.name), steps)
            return
        if not isinstance(delta, CallArguments):
            kind = Kind.REASONING if isinstance(delta, ReasoningDelta) else Kind.TEXT
            if self._open is None or self._open.kind is not kind:
                self._start(Block(len(self.blocks), kind), steps)
        assert self._open is not None  # arguments follow the start of their call
        self._open.parts.append(delta.text)
        steps.append(Gained(self._open, delta.text))

    def _start(self, block: Block, steps: list[Step]) -> None:
        self._close(steps)
        self._open = block
        self.blocks.append(block)
        steps.append(Opened(block))

    def _close(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(Closed(self._open))
            self._open = None
