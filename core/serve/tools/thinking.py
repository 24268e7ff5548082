"""Reasoning between two marks, split from the answer.

    <think>             Okay, the user …         </think>          The answer is 4.
    [THINK]                                      [/THINK]
    Here is my thought process:                  Here is my response:

Some templates write the opening mark into the prompt, so that the reply begins inside. White space beside a mark is the
mark's. Without an opening mark where the format has it, all is answer; without a closing one, all is reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.serve.tools.cursor import Cursor, Steps
from octavo.core.serve.tools.deltas import ReasoningDelta


@dataclass(frozen=True, slots=True)
class Thinking:
    """One way to mark reasoning.

    Attributes:
        opens, closes: the spellings of the marks.
        always: the reply begins inside unless the prompt ends with a closing mark.
        anywhere: reasoning may also begin behind text, and again.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    always: bool = False
    anywhere: bool = False

    def begins_inside(self, prompt_end: str) -> bool:
        """Whether a reply to a prompt begins as reasoning; prompt_end is its last text."""
        end = prompt_end.rstrip()
        return not end.endswith(self.closes) if self.always else end.endswith(self.opens)

    def end_of(self, said: str) -> str:
        """What stands for the end of a prompt that ends in the middle of a reply, of which `said` is there."""
        opened, closed = (max(map(said.rfind, marks)) for marks in (self.opens, self.closes))
        return self.opens[0] if opened > closed else self.closes[0]

    def split(self, cursor: Cursor, *, inside: bool) -> Steps[None]:
        """Read a reply."""
        start = cursor.at
        yield from cursor.spaces()
        opened = yield from cursor.one_of(*self.opens)
        if opened is not None or inside:
            yield from self._reason(cursor)
        else:
            cursor.give_back(start)
        while self.anywhere and (yield from cursor.pass_on(*self.opens)) is not None:
            yield from cursor.spaces()
            yield from cursor.one_of(*self.opens)
            yield from self._reason(cursor)

    def _reason(self, cursor: Cursor) -> Steps[None]:
        yield from cursor.spaces()
        if (yield from cursor.pass_on(*self.closes, kind=ReasoningDelta)) is not None:
            yield from cursor.spaces()
            yield from cursor.one_of(*self.closes)
            yield from cursor.spaces()
