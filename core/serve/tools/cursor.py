"""A place in a text that is still growing: what the parsers of tool calls are written with.

    settled, given on │ held: maybe a marker, or a call that is not whole │ not here yet
                      └ at

A syntax is a generator over a cursor, written as if the text were whole; wherever what is here leaves a question open
it yields, and goes on when there is more. Each question is answered by the text alone, not by where it was cut, which
is why any cut gives the same reply. One cursor serves one choice; only its syntax and `CursorParser` touch it.

White space that touches a marker belongs to the marker and is no text, unless what the marker opens is given back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from octavo.core.serve.tools.deltas import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta

T = TypeVar("T")
Steps = Generator[None, None, T]
Kind = type[TextDelta] | type[ReasoningDelta]

MAX_DEPTH = 100
"""Of brackets in a call; Python reads no deeper without running out of stack."""

MAX_NAME_CHARS = 256
"""Within which a name must be over."""


class Cursor:
    """See the module.

    Args:
        new_id: makes the id of a call.

    Attributes:
        at: where the next read begins; a syntax may put it back to a place that it read after the last `pass_on`.
        num_calls: calls given so far.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._text = ""
        self._ended = False
        self._out: list[Delta] = []
        self.at = 0
        self.num_calls = 0

    # -- what drives it -----------------------------------------------------------------------------------------------

    def add(self, text: str) -> None:
        """Let the text grow."""
        self._text += text

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def take(self) -> list[Delta]:
        """What was written since the last call."""
        taken, self._out = self._out, []
        return taken

    # -- what a syntax writes -----------------------------------------------------------------------------------------

    def say(self, text: str, kind: Kind = TextDelta) -> None:
        """Give text on."""
        if text:
            self._out.append(kind(text))

    def call(self, name: str, arguments: str, call_id: str | None = None) -> None:
        """Give a whole call on; arguments is a JSON object."""
        self._out += [
            CallStart(self.num_calls, call_id or self._new_id(), name),
            CallArguments(self.num_calls, arguments),
        ]
        self.num_calls += 1

    def give_back(self, start: int) -> None:
        """What was read from `start` on was no call: it is text."""
        self.say(self._text[start : self.at])

    # -- what a syntax reads ------------------------------------------------------------------------------------------

    def pass_on(self, *markers: str, kind: Kind = TextDelta) -> Steps[str | None]:
        """Give text on up to the first of the markers, none of which holds another one.

        Returns the marker, before which (and before the white space around it) the cursor then stands; None: the text
        ended without one.
        """
        while True:
            self._text, self.at = self._text[self.at :], 0
            places = [(place, marker) for marker in markers if (place := self._text.find(marker)) >= 0]
            if places:
                place, marker = min(places)
                self.at = len(self._text[:place].rstrip())
                self.say(self._text[: self.at], kind)
                return marker
            held = self._half_open(markers)
            self.at = len(self._text)
            if markers and not self._ended:
                self.at = len(self._text[: self.at - held].rstrip())
            self.say(self._text[: self.at], kind)
            if self._ended:
                return None
            yield

    def one_of(self, *literals: str) -> Steps[str | None]:
        """Step over whichever literal stands here, the longest if several do; None: none does."""
        longest = max(map(len, literals))
        while not self._ended:
            here = self._text[self.at : self.at + longest]
            if not any(literal.startswith(here) and literal != here for literal in literals):
                break
            yield
        found = [literal for literal in literals if self._text.startswith(literal, self.at)]
        if not found:
            return None
        self.at += len(max(found, key=len))
        return max(found, key=len)

    def spaces(self) -> Steps[None]:
        """Step over white space."""
        while True:
            self.at = len(self._text) - len(self._text[self.at :].lstrip())
            if self.at < len(self._text) or self._ended:
                return
            yield

    def peek(self) -> Steps[str]:
        """The character that stands here; empty at the end."""
        while self.at >= len(self._text) and not self._ended:
            yield
        return self._text[self.at : self.at + 1]

    def until(self, *literals: str, limit: int | None = None) -> Steps[tuple[str, str | None]]:
        """Read up to the first of the literals, and step over it.

        Returns what stood before it, and the literal; None for it when the text ended first, or when more than `limit`
        characters came first (then nothing was read).
        """
        searched = self.at
        while True:
            places = [(place, each) for each in literals if (place := self._text.find(each, searched)) >= 0]
            read = min(places)[0] - self.at if places else len(self._text) - self.at - self._half_open(literals)
            if limit is not None and read > limit:
                return "", None
            if places:
                start, (place, literal) = self.at, min(places)
                self.at = place + len(literal)
                return self._text[start:place], literal
            if self._ended:
                start, self.at = self.at, len(self._text)
                return self._text[start:], None
            searched = max(self.at, len(self._text) - max(map(len, literals)) + 1)
            yield

    def balanced(self, quotes: str = '"') -> Steps[str | None]:
        """Read from the bracket that stands here to the one that closes it; brackets between quotes don't count.

        Returns None when no bracket stands here, when it is never closed, or when they nest too deeply.
        """
        if (yield from self.peek()) not in ("{", "["):
            return None
        outside = re.compile(rf"[\[\]{{}}(){quotes}]")
        start, depth, quote = self.at, 0, ""
        while True:
            match = (re.compile(rf"[{quote}\\]") if quote else outside).search(self._text, self.at)
            if match is None:
                self.at = max(self.at, len(self._text))
                if self._ended:
                    self.at = len(self._text)
                    return None
                yield
                continue
            self.at = match.end()
            mark = match[0]
            if mark == "\\":
                self.at += 1  # the character behind it, which may not be here yet
            elif mark in quotes:
                quote = "" if quote else mark
            else:
                depth += 1 if mark in "[{(" else -1
            if depth > MAX_DEPTH:
                return None
            if depth == 0:
                return self._text[start : self.at]

    def _half_open(self, literals: tuple[str, ...]) -> int:
        """How many characters at the end may be the beginning of a literal."""
        if self._ended or not literals:
            return 0
        tail = self._text[self.at :][-max(map(len, literals)) + 1 :] if max(map(len, literals)) > 1 else ""
        for start in range(len(tail)):
            if any(literal.startswith(tail[start:]) for literal in literals):
                return len(tail) - start
        return 0


class CursorParser:
    """A `ToolParser` (deltas.py) that runs a syntax.

    Args:
        syntax: reads the whole text of a choice; when it returns, the rest is text.
        new_id: makes the id of a call.
    """

    def __init__(self, syntax: Callable[[Cursor], Steps[None]], new_id: Callable[[], str]) -> None:
        self._cursor = Cursor(new_id)
        self._steps = self._run(syntax)
        next(self._steps)

    def feed(self, text: str) -> list[Delta]:
        """See ToolParser."""
        self._cursor.add(text)
        next(self._steps)
        return self._cursor.take()

    def finish(self) -> list[Delta]:
        """See ToolParser."""
        self._cursor.end()
        next(self._steps, None)
        return self._cursor.take()

    def _run(self, syntax: Callable[[Cursor], Steps[None]]) -> Steps[None]:
        yield from syntax(self._cursor)
        yield from self._cursor.pass_on()
