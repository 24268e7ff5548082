"""The form of a reply in which calls are demanded, or in which reasoning or calls may stand in the place of a form.

    start: lead? body                 lead: reasoning between its marks; it must come where the prompt has begun it
    body:  calls                      demanded(): the reply calls
         | calls | @form              framed():   it calls, or has the form that the request gave
         | words? calls | words       strict():   it says what it will, but calls are right

Without this a form would forbid a model to think and to call. The grammar is Lark, as core/grammar compiles it; a mark
that is a special token is named by its id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.structured import StructuredOutput
from octavo.core.grammar.forms import JSON_OPTIONS
from octavo.core.grammar.schema import check_keywords
from octavo.core.serve.tools import harmony
from octavo.core.serve.tools.calls import Tools
from octavo.core.serve.tools.llama3_json import TAG
from octavo.core.serve.tools.registry import ReplyFormat
from octavo.core.serve.tools.writing import PLAIN_JSON, WRITINGS, Parts, Slot, Writing

ANY_TEXT = r"(?s:.*)"
ANYTHING = f"/{ANY_TEXT}/"
SPACE = r"/[ \n]{1,4}/"
"""Between reasoning and what follows."""

TokenOf = Callable[[str], int | None]
"""The id of a text that is a special token; None for any other text."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that a reply may consist of.

    Attributes:
        tools: that may be called.
        writing: how they are written.
        is_single: one call at most.
        loose: names of those whose arguments may be any object.
    """

    tools: Tools
    writing: Writing
    is_single: bool
    loose: Set[str] = frozenset()


def demanded(calls: Calls, form: ReplyFormat, token_of: TokenOf, *, inside: bool) -> StructuredOutput:
    """The form of a reply that consists of calls.

    Args:
        form: how the reply is written.
        inside: it begins as reasoning.

    Raises:
        InvalidRequest: a tool's schema can't be honoured.
    """
    rules = _Rules(form, token_of, inside=inside)
    rules.add_calls(calls)
    return _checked(lambda: StructuredOutput(grammar=rules.text("calls")))


def framed(
    wanted: StructuredOutput, calls: Calls | None, form: ReplyFormat, token_of: TokenOf, *, inside: bool
) -> StructuredOutput:
    """A form before which the reply may reason, and in whose place it may call. Arguments and errors as above."""
    if calls is None and form.reasoning is None and not form.is_harmony:
        return wanted
    rules = _Rules(form, token_of, inside=inside)
    if calls is not None:
        rules.add_calls(calls)
    rules.add("answer", f"{rules.items(rules.before_answer)} @form".lstrip())
    return _checked(lambda: replace(wanted, frame=rules.text("answer" if calls is None else "calls | answer")))


def can_hold_strict(form: ReplyFormat) -> bool:
    """Whether `strict` has a form for replies that are written so."""
    writing = WRITINGS.get(form.calls or "")
    return form.is_harmony or (writing is not None and (writing.may_follow_text or form.calls == PLAIN_JSON))


def strict(calls: Calls, form: ReplyFormat, token_of: TokenOf, *, inside: bool) -> StructuredOutput | None:
    """The form of a reply that may say anything, whose calls are right. Arguments and errors as above.

    Returns:
        None where the format has no beginning of calls that words could be told by.
    """
    if form.is_harmony:  # whose calls and answers are messages of their own
        return framed(StructuredOutput(regex=ANY_TEXT), calls, form, token_of, inside=inside)
    if not can_hold_strict(form):
        return None
    if form.calls == PLAIN_JSON:
        return _bare(calls, form, token_of, inside=inside)
    rules = _Rules(form, token_of, inside=inside)
    rules.add_calls(calls, behind_words=True)
    return _checked(lambda: StructuredOutput(grammar=rules.text(f"calls | {ANYTHING}?")))


def _bare(calls: Calls, form: ReplyFormat, token_of: TokenOf, *, inside: bool) -> StructuredOutput:
    """Llama's calls begin as any object does, so where they must be right no words begin so."""
    rules = _Rules(form, token_of, inside=inside)
    rules.add_calls(calls)
    rules.add("WORDS", rf"/(?s:\s*[^{{\s].*)/ & ~/(?s:.*{re.escape(TAG)}.*)/")
    return _checked(lambda: StructuredOutput(grammar=rules.text("calls | WORDS?")))


def _checked(make: Callable[[], StructuredOutput]) -> StructuredOutput:
    try:
        return make()
    except InvalidRequest as error:
        raise InvalidRequest(f"tools: as the form of the reply, {error}", field="tools") from error


class _Rules:
    """A grammar that is being written."""

    def __init__(self, form: ReplyFormat, token_of: TokenOf, *, inside: bool) -> None:
        self._token_of = token_of
        self._lines: list[str] = []
        self._lead = ""
        self.before_answer: Parts = ()
        if form.is_harmony:
            self._add_analysis()
        elif form.thinking is not None:
            self._add_thinking(form.thinking.opens, form.thinking.closes, inside=inside)

    def text(self, body: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {self._lead} ({body})", *self._lines])

    def add(self, name: str, rule: str) -> None:
        """Add a rule."""
        self._lines.append(f"{name}: {rule}")

    def items(self, parts: Parts, slots: Mapping[Slot, str] | None = None) -> str:
        """Parts as the items of a rule; texts that follow each other are one."""
        items: list[str] = []
        text = ""
        for part in parts:
            slot = (slots or {})[part] if isinstance(part, Slot) else None
            token_id = None if isinstance(part, Slot) else self._token_of(part)
            if part is Slot.NAME or (slot is None and token_id is None):
                text += slot or str(part)
                continue
            items += [_quoted(text)] if text else []
            items.append(slot or f"<[{token_id}]>")
            text = ""
        return " ".join(items + ([_quoted(text)] if text else []))

    def add_calls(self, calls: Calls, *, behind_words: bool = False) -> None:
        """Add the rule `calls`; before them any words may come where it says so."""
        writing, before, first = calls.writing, self.items(calls.writing.before), "call"
        for i, (name, schema) in enumerate(calls.tools.items()):
            self.add(f"arguments_{i}", f"%json {arguments_json({} if name in calls.loose else schema)}")
        self._add_alternatives("call", calls.tools, writing.call)
        if behind_words:
            opening, *head = (*writing.before, *writing.call)[: max(1, len(writing.before))]
            self._add_until("opening", (str(opening),))
            before = f"opening {self.items(tuple(head))}"
            if not writing.before:
                first = "first"
                self._add_alternatives(first, calls.tools, writing.call[1:])
        more = "" if calls.is_single or writing.is_single else f"({self.items(writing.between)} call)*"
        self.add("calls", f"{before} {first} {more} {self.items(writing.after)}")

    def _add_alternatives(self, rule: str, tools: Tools, parts: Parts) -> None:
        """Add a rule for a call of one of the tools."""
        for i, name in enumerate(tools):
            self.add(f"{rule}_{i}", self.items(parts, {Slot.NAME: name, Slot.ARGUMENTS: f"arguments_{i}"}))
        self.add(rule, " | ".join(f"{rule}_{i}" for i in range(len(tools))))

    def _add_thinking(self, opens: tuple[str, ...], closes: tuple[str, ...], *, inside: bool) -> None:
        opening = " | ".join(self.items((mark,)) for mark in opens)
        self.add("lead", f"({opening}){'?' if inside else ''} thought ({SPACE})?")
        self._add_until("thought", closes)
        self._lead = "lead" if inside else "lead?"

    def _add_analysis(self) -> None:
        """What harmony's models think comes in a message of its own, before the one that answers or calls."""
        opening = self.items((harmony.CHANNEL, "analysis", harmony.MESSAGE))
        self.add("lead", f"{opening} thought {self.items((harmony.START, 'assistant'))}")
        self._add_until("thought", harmony.ENDS[:1])
        self._lead = "lead?"
        self.before_answer = (harmony.CHANNEL, "final", harmony.MESSAGE)

    def _add_until(self, name: str, marks: tuple[str, ...]) -> None:
        """Add a rule for any text up to the first of some marks, and the mark."""
        for i, mark in enumerate(marks):
            token_id = self._token_of(mark)
            if token_id is None:
                self._lines.append(f"{name}_{i}[lazy]: {ANYTHING} {_quoted(mark)}")
            else:
                self.add(f"{name}_{i}", f"({ANYTHING})? <[{token_id}]>")
        self.add(name, " | ".join(f"{name}_{i}" for i in range(len(marks))))


def arguments_json(schema: Mapping[str, Any]) -> str:
    """A tool's schema as a grammar holds it: without arguments that it does not name, unless it says that there may be
    some, since models that may write any write on and on. Raises InvalidRequest."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(
            "tool_choice demands a call, and the parameters of a tool are no object; give a schema of type object",
            field="tools",
        )
    try:
        check_keywords(schema)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"tool_choice demands a call, and of a tool's parameters {error}", field="tools"
        ) from error
    closed = {"additionalProperties": False} if "properties" in schema and "patternProperties" not in schema else {}
    text = json.dumps({**closed, **schema, "type": "object", "x-guidance": JSON_OPTIONS})
    return text.replace("::=", r":\u003a=")  # which would make the grammar look like EBNF; it can stand in texts only


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
