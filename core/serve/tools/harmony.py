"""Replies of gpt-oss, in the harmony format: messages, each with a channel, perhaps with a recipient.

    <|channel|>analysis<|message|>The user wants …<|end|>                                          reasoning
    <|start|>assistant<|channel|>commentary<|message|>I'll look.<|end|>                             text
    <|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{"zone": "CET"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>                             text

The prompt ends with `<|start|>assistant`. <|call|> and <|return|> end the reply by their ids and are no text then, so a
call's arguments may also end with the reply. A line feed stands between two messages of one kind.
"""

from __future__ import annotations

import re

from octavo.core.serve.tools.calls import Tools, call_of
from octavo.core.serve.tools.cursor import Cursor, Kind, Steps
from octavo.core.serve.tools.deltas import ReasoningDelta, TextDelta

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = " to="

MAX_HEADER_CHARS = 512


def harmony(cursor: Cursor, tools: Tools | None) -> Steps[None]:
    """Read a reply; without tools nothing is a call."""
    said: set[Kind] = set()
    start = cursor.at
    if (yield from cursor.one_of(RECIPIENT)) is None:  # the header goes on right behind <|start|>assistant
        if (yield from cursor.pass_on(START, CHANNEL)) is None:
            return
        start = cursor.at
    cursor.at = start
    while True:
        header, found = yield from cursor.until(MESSAGE, limit=MAX_HEADER_CHARS)
        if found is None:
            yield from cursor.spaces()
            yield from cursor.one_of(START, CHANNEL)  # step over it: what is wrong with it stays so
            cursor.give_back(start)
        elif recipient := re.search(r"to=([^\s<]+)", header):
            yield from _call(cursor, start, recipient[1], tools)
        else:
            is_analysis = re.search(r"<\|channel\|>\s*analysis\b", header) is not None
            yield from _say(cursor, ReasoningDelta if is_analysis else TextDelta, said)
        if (yield from cursor.pass_on(START, CHANNEL)) is None:
            return
        start = cursor.at


def _call(cursor: Cursor, start: int, recipient: str, tools: Tools | None) -> Steps[None]:
    """A message to a tool; one that is no call of a client's is given back whole."""
    name = recipient.removeprefix("functions.")
    text, _ = yield from cursor.until(*ENDS)
    known = tools is not None and (name != recipient or name in tools)
    call = call_of(name, text) if known and text.strip() else None
    if call is None:
        cursor.give_back(start)
    else:
        cursor.call(*call)


def _say(cursor: Cursor, kind: Kind, said: set[Kind]) -> Steps[None]:
    """A message to the user, or to itself. One that was not closed ends where the next one begins."""
    yield from cursor.spaces()
    if kind in said:
        cursor.say("\n", kind)
    said.add(kind)
    if (yield from cursor.pass_on(*ENDS, START, CHANNEL, kind=kind)) is not None:
        yield from cursor.spaces()
        yield from cursor.one_of(*ENDS)
