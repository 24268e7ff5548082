"""What forms allow, and which of them are refused, over SmolLM2's vocabulary."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.structured import MAX_CHOICES, MAX_FORM_CHARS, MAX_FORM_DEPTH, StructuredOutput
from octavo.core.grammar import compiler as compiler_module
from octavo.core.grammar.compiler import GrammarCompiler, Vocabulary
from tests.grammar.schemas import is_valid, random_schema

Accepts = Callable[[StructuredOutput, str], bool]
Walk = Callable[[StructuredOutput, int], str | None]

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<function=f>", "schema": POINT, "end": "</function>"}],
    "triggers": ["<function="],
}


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"json_schema": POINT}, ['{"x": 1, "y": -2}', '{\n  "x": 1,\n  "y": 2\n}'], ['{"x": 1}', '{"x":1,  "y":2}']),
        ({"json_object": True}, ["{}", '{"a": [1.5e3, {"b": null}], "c": "\\u00e9"}'], ["[1]", '{"a": "\\ud800"}']),
        ({"json_schema": {}}, ["1", "[true, false]", '"a"'], ["tru", "01", "[1,,2]"]),
        ({"json_schema": True}, ["null"], ["nul"]),
        ({"json_schema": {"type": "object"}}, ['{"a": 1}'], ["[]"]),
        ({"regex": r"[0-9]{3}(-|\*)[0-9]+"}, ["123-4", "123*45"], ["12-4", "123-", "123-4 "]),
        ({"choice": ["yes", "no", 'a\x01"\\/é\n|']}, ["yes", "no", 'a\x01"\\/é\n|'], ["ye", "yesno", "maybe"]),
        ({"grammar": 'start: "a" start "b" | "c"'}, ["c", "aacbb"], ["aacb", "ab"]),
        ({"grammar": 'root ::= "a" root | "b"'}, ["b", "aab"], ["aa", "c"]),
        (
            {"structural_tag": TAG},
            ["hello", 'so <function=f>{"x": 1, "y": 2}</function> and on'],
            ['so <function=f>{"x": 1}</function>', "<function=g>"],
        ),
        (
            {"choice": ["yes", "no"], "frame": 'start: ("Hm. ")? (@form | "pass")'},
            ["yes", "Hm. no", "Hm. pass"],
            ["Hm. ", "passyes", "form"],
        ),
        ({"json_schema": POINT, "frame": 'start: "x" @form'}, ['x{"x": 1, "y": 2}'], ['{"x": 1, "y": 2}', 'x{"x": 1}']),
    ],
)  # fmt: skip
def test_a_form_allows_what_it_says(form: dict[str, Any], right: list[str], wrong: list[str], accepts: Accepts) -> None:
    structured = StructuredOutput(**form)
    assert [text for text in right if not accepts(structured, text)] == []
    assert [text for text in wrong if accepts(structured, text)] == []


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"regex": "foo**"}, "repeats a repetition"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look ahead or behind"),
        ({"json_schema": {"type": "strange"}}, "a type is none of null"),
        ({"json_schema": {"$ref": "http://elsewhere.invalid/s"}}, "$ref points outside the schema"),
        ({"json_schema": {"$ref": "#/$defs/none"}}, "$ref points to nothing"),
        ({"json_schema": {"type": "string", "format": "strange"}}, "a format is none of those"),
        ({"json_schema": {"enum": []}}, "a schema allows no value"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structures"),
        ({"structural_tag": {**TAG, "triggers": ["<tool"]}}, "triggers"),
        ({"structural_tag": {**TAG, "format": {}}}, "'format'"),
    ],
)
def test_a_form_that_cannot_be_honoured_is_refused_with_the_reason(
    form: dict[str, Any], said: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)) as raised:
        compiler.check(StructuredOutput(**form), 10)
    assert raised.value.field == "structured_outputs"
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(Zanzibar"},
        {"regex": "[Zanzibar-a]"},
        {"json_schema": {"type": "Zanzibar"}},
        {"json_schema": {"type": "string", "format": "Zanzibar"}},
        {"json_schema": {"$ref": "#/$defs/Zanzibar"}},
        {"json_schema": {"properties": {"a": {"pattern": "(Zanzibar"}}}},
        {"json_schema": {"required": "Zanzibar"}},
        {"grammar": "start: Zanzibar" * 500},
        {"grammar": 'start: "Zanzibar'},
        {"grammar": "root ::= Zanzibar"},
        {"grammar": 'start: %json {"type": "Zanzibar"}'},
    ],
)
def test_a_reason_is_short_and_repeats_nothing(form: dict[str, Any], compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest) as raised:
        compiler.check(StructuredOutput(**form), 10)
    assert "zanzibar" not in str(raised.value).lower()
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "keyword",
    ["not", "if", "uniqueItems", "contains", "propertyNames", "dependentRequired", "unevaluatedProperties", "nullable",
     "minLenght", "x-guidance"],
)  # fmt: skip
@pytest.mark.parametrize("place", ["top", "properties", "items", "anyOf", "$defs", "additionalProperties"])
def test_a_keyword_that_is_not_enforced_is_named(keyword: str, place: str, compiler: GrammarCompiler) -> None:
    inner: Any = {"type": "string", keyword: {}}
    schema = {
        "top": inner,
        "properties": {"type": "object", "properties": {"a": inner}},
        "items": {"type": "array", "items": inner},
        "anyOf": {"anyOf": [{"type": "null"}, inner]},
        "$defs": {"$ref": "#/$defs/a", "$defs": {"a": inner}},
        "additionalProperties": {"type": "object", "additionalProperties": inner},
    }[place]
    with pytest.raises(InvalidRequest, match=f"keyword '{keyword}'"):
        compiler.check(StructuredOutput(json_schema=schema), 10)


def test_names_of_properties_and_data_are_no_keywords(accepts: Accepts) -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"const": "not"}, "if": {"enum": [1]}},
        "required": ["not"],
        "title": "T",
        "default": {"not": 1},
    }
    assert accepts(StructuredOutput(json_schema=schema), '{"not": "not", "if": 1}')


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({}, "given: none"),
        ({"regex": "a", "choice": ["a"]}, "given: regex, choice"),
        ({"choice": []}, "choice"),
        ({"choice": [""]}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, str(MAX_CHOICES)),
        ({"regex": ""}, "regex"),
        ({"regex": "a" * (MAX_FORM_CHARS + 1)}, str(MAX_FORM_CHARS)),
        ({"regex": "\ud800"}, "surrogate"),
        ({"json_schema": "{"}, "not valid JSON"),
        ({"json_schema": "[]"}, "JSON object"),
        ({"json_schema": "false"}, "JSON object"),
        ({"json_schema": False}, "no reply at all"),
        ({"json_schema": {"minimum": float("nan")}}, "not valid JSON"),
        ({"json_object": 1}, "true or false"),
        ({"frame": "start: @form"}, "given: none"),
        ({"regex": "a", "frame": ""}, "frame"),
        ({"regex": "a", "frame": "a" * (MAX_FORM_CHARS + 1)}, str(MAX_FORM_CHARS)),
    ],
)
def test_shapes_are_checked_at_once(form: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        StructuredOutput(**form)


@pytest.mark.parametrize("depth", [MAX_FORM_DEPTH + 1, 25_000])
def test_a_deep_schema_is_refused(depth: int) -> None:
    with pytest.raises(InvalidRequest, match="nested deeper"):
        StructuredOutput(json_schema='{"items":' * depth + "{}" + "}" * depth)


def test_equal_forms_are_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.start(StructuredOutput(json_schema=POINT))
    assert compiler.start(StructuredOutput(json_schema=json.dumps(POINT))) is first
    assert compiler.start(StructuredOutput(json_schema={**POINT, "title": "other"})) is not first


def test_the_least_recently_used_grammar_goes(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    forms = [StructuredOutput(choice=(f"kept {i}",)) for i in range(3)]
    first, second = compiler.start(forms[0]), compiler.start(forms[1])
    assert compiler.start(forms[0]) is first
    compiler.start(forms[2])
    assert compiler.start(forms[0]) is first
    assert compiler.start(forms[1]) is not second


def test_a_compilation_that_takes_too_long_is_given_up_and_kept_for_later(compiler: GrammarCompiler) -> None:
    may_read = threading.Event()

    def read() -> Vocabulary:
        may_read.wait(20)
        return Vocabulary([b"a", b""], frozenset({1}), (1,), None, lambda text: [0] * len(text))

    slow = GrammarCompiler(read)
    with pytest.raises(InvalidRequest, match=r"longer than 0\.05 s"):
        slow.check(StructuredOutput(regex="a+"), 0.05)
    may_read.set()
    slow.check(StructuredOutput(regex="a+"), 10)


def test_compilations_that_nobody_waits_for_any_more_do_not_begin() -> None:
    """Else a burst of slow forms kept the cores busy long after its clients had been refused."""
    may_read = threading.Event()

    def read() -> Vocabulary:
        may_read.wait(60)
        return Vocabulary([b"a", b""], frozenset({1}), (1,), None, lambda text: [0] * len(text))

    slow = GrammarCompiler(read, patience_s=0.05)
    forms = [StructuredOutput(regex="a" * (1 + i)) for i in range(20)]
    begun = [slow.start(form) for form in forms]
    deadline = time.monotonic() + 60
    while len(late := [each for each in begun if each.done.is_set()]) < 20 - compiler_module.MAX_AT_ONCE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all("takes longer than" in str(each.error) for each in late)
    may_read.set()
    for each in begun:
        assert each.done.wait(60)
    slow.check(forms[-1], 60)


def test_a_model_without_an_end_is_refused() -> None:
    endless = GrammarCompiler(lambda: Vocabulary([b"a"], frozenset(), (), None, lambda text: [0] * len(text)))
    with pytest.raises(InvalidRequest, match="ends a reply"):
        endless.check(StructuredOutput(regex="a+"), 10)


@pytest.mark.parametrize("seed", range(60))
def test_every_complete_reply_to_a_random_schema_is_valid(seed: int, walk: Walk) -> None:
    schema = random_schema(random.Random(seed))
    text = walk(StructuredOutput(json_schema=schema), seed)
    assert text is not None
    assert is_valid(json.loads(text), schema), (schema, text)


def test_walks_through_any_json_are_json(walk: Walk) -> None:
    texts = [text for seed in range(20) if (text := walk(StructuredOutput(json_object=True), seed)) is not None]
    assert len(texts) >= 5
    assert all(isinstance(json.loads(text), dict) for text in texts)
