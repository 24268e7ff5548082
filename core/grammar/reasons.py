"""Why a form can't be honoured, in words of our own: the compiler's hold pieces of what the client wrote."""

from __future__ import annotations

import re

_REASONS = (
    ("unclosed group", "a regular expression has an unclosed group"),
    ("unopened group", "a regular expression closes a group that it never opened"),
    ("look-around", "regular expressions can't look ahead or behind; say what the text holds instead"),
    ("backreferences", "regular expressions can't refer back to a group; write its pattern again"),
    ("regex", "a regular expression can't be read; check its brackets, escapes and repetitions"),
    ("Invalid type", "a type is none of null, boolean, integer, number, string, array and object"),
    ("Unknown format", "a format is none of those that can be enforced; give a pattern instead"),
    ("oneOf", "a oneOf has alternatives that can't be told apart; give anyOf instead"),
    ("does not exist", "a $ref points to nothing in the schema; name a part of it, such as #/$defs/name"),
    ("not present in a registry", "a $ref points outside the schema; put what it names into $defs"),
    ("Unsatisfiable", "a schema allows no value; loosen the limits or types that contradict each other"),
    ("for 'required'", "required is no list of names"),
    ("Expected ", "a keyword of a schema has a value of the wrong type"),
    ("unknown name", "it names a rule or token that is missing from the grammar"),
    ("not found", "it names a rule or token that is missing from the grammar"),
    ("lexer error", "the grammar can't be split into its parts; a text or an expression may be unclosed"),
    ("expecting ", "the grammar's syntax is wrong"),
    ("no start rule", "the grammar has no rule named start"),
    ("too large", "it is too large; make it smaller"),
    ("too many", "it is too large; make it smaller"),
    ("limit", "it is too large; make it smaller"),
)
"""What stands in a message of llguidance's -> what the client is told; the first that fits. The order matters where
one message holds another, as that of a regular expression within a schema does."""

_OTHER = "its compiler can't take it; make it simpler"

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_EXCERPT = re.compile(r"\n.*", re.DOTALL)


def reason_of(message: str) -> str:
    """One clause on a compiler's message, without a word of the message itself."""
    # What the client wrote stands in quotes and excerpts, and must not decide which reason is told.
    head = _QUOTED.sub("", _EXCERPT.sub("", message))
    detail = message[message.rfind("\nerror: ") :] if "\nerror: " in message else ""
    said = f"{detail.partition(chr(10) + '   1 |')[0]} {head}"
    return next((reason for mark, reason in _REASONS if mark in said), _OTHER)
