"""What a reply is made of, piece by piece: text, reasoning, and calls of the client's tools.

    text of the model, cut anywhere ──feed()──▶ [parser: holds what it can't yet tell] ──▶ deltas
                                    ──finish()──▶ what was still held

A parser sees text alone, never tokens, and belongs to one choice of one reply. Joined, its deltas are the same for any
cut of the text. It never raises: what looks like a call and can't be read as one comes back as text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Words that the model said to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow.

    Attributes:
        index: 0 for the reply's first call.
        id: made here; the client's answer names it.
        name: of the tool, as the model wrote it.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; all of a call's are a JSON object."""

    index: int
    text: str


Delta = TextDelta | ReasoningDelta | CallStart | CallArguments


class ToolParser(Protocol):
    """Turns the text of one choice into deltas."""

    def feed(self, text: str) -> list[Delta]:
        """Take in the next piece of text; what it settled."""

    def finish(self) -> list[Delta]:
        """The text is over; what was held back."""


class PlainText:
    """Where nothing is to be looked for: all is text."""

    def feed(self, text: str) -> list[Delta]:
        """See ToolParser."""
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        """See ToolParser."""
        return []


class Chain:
    """Two parsers, one after the other: what is text to the first is read by the second."""

    def __init__(self, first: ToolParser, second: ToolParser) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> list[Delta]:
        """See ToolParser."""
        return self._on(self._first.feed(text))

    def finish(self) -> list[Delta]:
        """See ToolParser."""
        return self._on(self._first.finish()) + self._second.finish()

    def _on(self, deltas: list[Delta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            out.extend(self._second.feed(delta.text) if isinstance(delta, TextDelta) else [delta])
        return out
