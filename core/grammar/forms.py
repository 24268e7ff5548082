"""From a StructuredOutput to the text of a grammar that llguidance compiles.

White space between the parts of JSON is bounded, so that no model writes it until its tokens run out; where any value
is allowed, numbers are bounded for the same reason.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.structured import FIELD, StructuredOutput
from octavo.core.grammar.reasons import reason_of
from octavo.core.grammar.schema import allows_any_object, allows_any_value, check_keywords

SPACE = r"[ \n]|\n[ \t]{1,12}"
"""Between two parts of JSON, at most once: a space, or a line feed and what indents the next line."""

JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": SPACE, "lenient": False, "coerce_one_of": False}

_ANY_JSON = r"""
start: {start}
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{{" SPACE? (pair ("," SPACE? pair)*)? "}}"
pair: STRING SPACE? ":" SPACE? value SPACE?
array: "[" SPACE? (value SPACE? ("," SPACE? value SPACE?)*)? "]"
STRING: /"([^"\\\x00-\x1F\x7F]|\\["\\\/bfnrt]|\\u([0-9a-cefA-CEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{{2}})*"/
NUMBER: /-?(0|[1-9][0-9]{{0,15}})(\.[0-9]{{1,16}})?([eE][+-]?[0-9]{{1,2}})?/
SPACE: /[ \n]|\n[ \t]{{1,12}}/
"""


def grammar_of(structured: StructuredOutput, special_texts: Collection[str]) -> str:
    """The grammar of a form.

    Args:
        special_texts: the model's special tokens, which a structural tag may begin with.

    Raises:
        InvalidRequest: the form can't be honoured; what is wrong inside a grammar shows when it is compiled.
    """
    grammar = _grammar_of_form(structured, special_texts)
    return grammar if structured.frame is None else _framed(structured.frame, grammar)


def _framed(frame: str, grammar: str) -> str:
    """A grammar in the place of `@form` in another one. Both are Lark, or lists that hold one grammar."""
    form = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": frame}, {**form, "name": "form"}]})


def _grammar_of_form(structured: StructuredOutput, special_texts: Collection[str]) -> str:
    from llguidance import LLMatcher

    if structured.json_object:
        return _ANY_JSON.format(start="object")
    if structured.json_schema is not None:
        return _of_schema(json.loads(str(structured.json_schema)))
    if structured.regex is not None:
        check_repetitions(structured.regex)
        grammar: str = LLMatcher.grammar_from_regex(structured.regex)
        return grammar
    if structured.choice is not None:
        return "start: " + " | ".join(_lark_text(each) for each in structured.choice)
    if structured.grammar is not None:
        return _of_grammar(structured.grammar)
    return _of_tags(json.loads(str(structured.structural_tag)), special_texts)


def check_repetitions(regex: str) -> None:
    """Refuse a repetition of a repetition, such as `a**`: kinds of regular expressions disagree on what it means.

    Raises:
        InvalidRequest: naming the place.
    """
    repeated, in_class, skip = False, False, False
    for place, char in enumerate(regex):
        if skip or in_class:
            in_class = in_class and (skip or char != "]")
            skip = not skip and char == "\\"
            repeated = False
            continue
        if char in "*+{" and repeated:
            raise InvalidRequest(
                f"regex is invalid at character {place}: {char!r} repeats a repetition; put the first one in a group",
                field=FIELD,
            )
        skip, in_class, repeated = char == "\\", char == "[", char in "*+}"


def _of_schema(schema: Any) -> str:
    from llguidance import LLMatcher

    check_keywords(schema)
    if allows_any_value(schema):
        return _ANY_JSON.format(start="value")
    if allows_any_object(schema):
        return _ANY_JSON.format(start="object")
    grammar: str = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
    return grammar


def _of_grammar(text: str) -> str:
    """Lark as it is; EBNF, which writes `::=`, turned into it."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # its parser raises bare exceptions
        raise InvalidRequest(f"grammar is not EBNF that can be read: {reason_of(str(error))}", field=FIELD) from error
    return lark


def _of_tags(tag: Any, special_texts: Collection[str]) -> str:
    from llguidance import StructTag

    unknown = set(tag) - {"type", "structures", "triggers"}
    if unknown:
        raise InvalidRequest(
            f"structural_tag has {sorted(unknown)[0][:80]!r}; give structures and triggers", field=FIELD
        )
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not _are_texts(triggers) or not isinstance(structures, list) or not structures:
        raise InvalidRequest(
            "structural_tag needs structures, a list of objects, and triggers, a list of texts", field=FIELD
        )
    tags = [_read_tag(each, triggers, StructTag) for each in structures]
    grammar: str = StructTag.to_grammar(tags, assume_special=any(each.trigger in special_texts for each in tags))
    return grammar


def _read_tag(structure: Any, triggers: list[str], make: Any) -> Any:
    if not isinstance(structure, dict) or set(structure) != {"begin", "schema", "end"}:
        raise InvalidRequest("each of structural_tag's structures must have begin, schema and end", field=FIELD)
    begin, schema, end = structure["begin"], structure["schema"], structure["end"]
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise InvalidRequest("structural_tag: begin and end must be texts and schema an object", field=FIELD)
    check_keywords(schema)
    trigger = next((each for each in triggers if begin.startswith(each)), None)
    if trigger is None:
        raise InvalidRequest("structural_tag: each begin must start with one of the triggers", field=FIELD)
    return make(trigger=trigger, begin=begin, grammar={**schema, "x-guidance": JSON_OPTIONS}, end=end)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value)


def _lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
