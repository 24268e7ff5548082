"""Whatever a model writes under a demand for calls, its parser reads as calls: random walks through the grammars."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.structured import StructuredOutput
from octavo.core.grammar.forms import grammar_of
from octavo.core.serve.tools.calls import Tools
from octavo.core.serve.tools.demand import Calls, can_hold_strict, demanded, framed, strict
from octavo.core.serve.tools.registry import CALL_FORMATS, REASONING_FORMATS, ReplyFormat
from octavo.core.serve.tools.writing import OLDER_DEEPSEEK, OLDER_MISTRAL, WRITINGS, Writing, writable
from tests.serve.test_tool_parsers import joined

ZONES = ["CET", 'a "b"']
TOOLS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {"zone": {"enum": ZONES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["zone"],
        "additionalProperties": False,
    },
    "g.h-1": {"properties": {}, "additionalProperties": False},
}
MARKS = sorted(
    {mark for form in CALL_FORMATS.values() for mark in form.markers}
    | {"<think>", "</think>", "[THINK]", "[/THINK]", "<|python_tag|>"}
)


class _Bytes:
    """A vocabulary of END, marks that are special tokens, and all bytes."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = 0, None

    def __init__(self, special: list[str]) -> None:
        self.tokens = [b"</s>", *(mark.encode() for mark in special), *(bytes([i]) for i in range(256))]
        self.special_token_ids = list(range(len(special) + 1))
        self.first_byte = len(special) + 1

    def __call__(self, text: str | bytes) -> list[int]:
        return [self.first_byte + byte for byte in (text.encode() if isinstance(text, str) else text)]


class Vocabulary:
    """Marks are special tokens, or texts like others."""

    def __init__(self, *, special: bool) -> None:
        marks = MARKS if special else []
        self.bytes = _Bytes(marks)
        self.ids = {mark: i for i, mark in enumerate(marks, start=1)}
        self.tokenizer = LLTokenizer(self.bytes, eos_token=[0])

    def matcher(self, wanted: StructuredOutput) -> LLMatcher:
        """Raises AssertionError where the grammar is none."""
        grammar = grammar_of(wanted, frozenset(MARKS))
        failed, said = LLMatcher.validate_grammar_with_warnings(grammar, self.tokenizer)
        assert (failed, list(said)) == (False, []), grammar
        return LLMatcher(self.tokenizer, grammar, log_level=0)

    def walk(self, wanted: StructuredOutput, rng: random.Random) -> str:
        """A reply in the form: any token that may follow, with a liking for those that come to an end."""
        matcher = self.matcher(wanted)
        written: list[int] = []
        while len(written) < 3000:
            bits = matcher.compute_bitmask()
            allowed = [i for i in range(len(self.bytes.tokens)) if bits[i // 8] >> (i % 8) & 1]
            if 0 in allowed and (len(allowed) == 1 or rng.random() < 0.5):
                return b"".join(self.bytes.tokens[i] for i in written).decode()
            liked = [i for i in allowed if i != 0 and self._is_liked(i)]
            token_id = rng.choice(liked if liked and rng.random() < 0.9 else [i for i in allowed if i])
            written.append(token_id)
            assert matcher.consume_token(token_id)
        raise AssertionError("the walk finds no end")

    def _is_liked(self, token_id: int) -> bool:
        return token_id < self.bytes.first_byte or self.bytes.tokens[token_id] in b'}],"</>thinkA.'

    def accepts(self, wanted: StructuredOutput, text: str) -> bool:
        """Whether a text is a whole reply in the form."""
        matcher = self.matcher(wanted)
        return matcher.consume_tokens(self._encode(text)) and matcher.is_accepting()

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            mark = next((mark for mark in self.ids if text.startswith(mark)), None)
            ids += self.bytes(text[0]) if mark is None else [self.ids[mark]]
            text = text[1 if mark is None else len(mark) :]
        return ids


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(special=request.param)


WRITTEN: list[tuple[str, Writing]] = [
    *WRITINGS.items(), ("mistral", OLDER_MISTRAL), ("deepseek_v3", OLDER_DEEPSEEK),
]  # fmt: skip
LEADS = {"none": ("", ""), "qwen3": ("<think>A.</think>", ""), "deepseek_r1": ("A.</think>", "<think>\n")}


def calls_of(text: str, form: ReplyFormat, prompt_end: str = "", tools: Tools = TOOLS) -> Any:
    parser = form.open_parser(tools, prompt_end)
    return joined(parser.feed(text) + parser.finish())


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(("name", "writing"), WRITTEN)
def test_replies_under_a_demand_are_calls(vocabulary: Vocabulary, name: str, writing: Writing, single: bool) -> None:
    if name == "gpt_oss" and not vocabulary.ids:
        pytest.skip("harmony's marks are special tokens: as texts they would not end what stands before them")
    rng = random.Random(f"{name} {single}")
    form = ReplyFormat(name, None)
    wanted = demanded(Calls(TOOLS, writing, single), form, vocabulary.ids.get, inside=False)
    counts = set()
    for _ in range(20):
        text = vocabulary.walk(wanted, rng)
        read = calls_of(text, form)
        assert read.text == "", text
        assert read.calls, text
        for called, arguments in read.calls:
            given = json.loads(arguments)
            assert called in TOOLS
            assert given == {} if called == "g.h-1" else given["zone"] in ZONES
        counts.add(len(read.calls))
    assert counts == {1} if single or writing.is_single else len(counts) > 1


@pytest.mark.parametrize("reasoning", LEADS)
@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json"])
def test_reasoning_may_come_before_a_demanded_call(vocabulary: Vocabulary, name: str, reasoning: str) -> None:
    lead, prompt_end = LEADS[reasoning]
    form = ReplyFormat(name, None if reasoning == "none" else reasoning)
    inside = form.begins_inside(prompt_end)
    wanted = demanded(Calls(TOOLS, WRITINGS[name], False), form, vocabulary.ids.get, inside=inside)
    alone = demanded(Calls(TOOLS, WRITINGS[name], True), ReplyFormat(name, None), vocabulary.ids.get, inside=False)
    plain = vocabulary.walk(alone, random.Random(1))
    assert vocabulary.accepts(wanted, f"{lead}\n\n{plain}" if lead else plain)
    assert vocabulary.accepts(wanted, plain) is not inside
    read = calls_of(lead + plain, form, prompt_end)
    assert (read.text, read.reasoning, len(read.calls)) == ("", "A." if lead else "", 1)


def test_harmony_thinks_in_a_message_of_its_own(vocabulary: Vocabulary) -> None:
    form = ReplyFormat("gpt_oss", "gpt_oss")
    wanted = demanded(Calls(TOOLS, WRITINGS["gpt_oss"], False), form, vocabulary.ids.get, inside=False)
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.g.h-1 <|constrain|>json<|message|>{}"
    assert vocabulary.accepts(wanted, call)
    assert vocabulary.accepts(wanted, analysis + call)
    assert not vocabulary.accepts(wanted, analysis)
    read = calls_of(analysis + call, form)
    assert (read.text, read.reasoning, read.calls) == ("", "Hm.", [("g.h-1", "{}")])


B: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"type": "integer"}},
    "required": ["b"],
    "additionalProperties": False,
}
TAG: dict[str, Any] = {"structures": [{"begin": "<a>", "schema": {"const": 3}, "end": "</a>"}], "triggers": ["<a"]}
TEXTS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    "mistral": "[TOOL_CALLS]f[ARGS]%s",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>%s"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gpt_oss": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s",
}
"""A call of f in each format that tells calls from words."""


@pytest.mark.parametrize("name", TEXTS)
def test_strict_tools_leave_words_free_and_hold_calls(vocabulary: Vocabulary, name: str) -> None:
    if name == "gpt_oss" and not vocabulary.ids:
        pytest.skip("harmony's marks are special tokens")
    say = "<|channel|>final<|message|>%s" if name == "gpt_oss" else "%s"
    call, form = TEXTS[name], ReplyFormat(name, None)
    calls = Calls(TOOLS, WRITINGS[name], False)
    held, loose = (
        strict(replace(calls, loose=names), form, vocabulary.ids.get, inside=False) for names in (set[str](), {"f"})
    )
    assert held is not None
    assert loose is not None
    right, wrong = call % '{"zone": "CET"}', call % '{"zone": "EST"}'
    words = "Words, {} and [lists]\n"
    for text in (say % words, say % "", right):
        assert vocabulary.accepts(held, text)
    assert not vocabulary.accepts(held, wrong)
    assert not vocabulary.accepts(held, call.replace("f", "h") % "{}")
    assert vocabulary.accepts(loose, wrong)
    if name != "gpt_oss":  # whose words are a message of their own
        assert vocabulary.accepts(held, words + right)
        assert not vocabulary.accepts(held, words + wrong)
        between = "".join(map(str, WRITINGS[name].between))
        assert vocabulary.accepts(held, words + right + between + right) is (name != "deepseek_v3")


def test_strict_calls_of_llama_are_the_only_objects(vocabulary: Vocabulary) -> None:
    name = "llama3_json"
    held = strict(Calls(TOOLS, WRITINGS[name], False), ReplyFormat(name, None), vocabulary.ids.get, inside=False)
    assert held is not None
    call = '{"name": "f", "parameters": %s}'
    right, wrong = call % '{"zone": "CET"}', call % '{"zone": "EST"}'
    for text in ("", "Words, {} and\n[lists]", right, f"{right}; {right}"):
        assert vocabulary.accepts(held, text), text
    for text in (wrong, f" \n{wrong}", f"Words <|python_tag|>{wrong}", f"{right}; {wrong}", f"{right} {wrong}"):
        assert not vocabulary.accepts(held, text), text


@pytest.mark.parametrize("name", ["gemma", "pythonic", "qwen3_coder", None])
def test_formats_whose_calls_look_like_words_are_not_held(name: str | None) -> None:
    form = ReplyFormat(name, None)
    assert not can_hold_strict(form)
    assert strict(Calls(TOOLS, WRITINGS["gemma"], False), form, {}.get, inside=False) is None


FORMS: dict[str, tuple[StructuredOutput, str, str]] = {
    "json_schema": (StructuredOutput(json_schema=B), '{"b": 3}', '{"c": 3}'),
    "json_object": (StructuredOutput(json_object=True), '{"any": [3]}', "3"),
    "regex": (StructuredOutput(regex="a/b+"), "a/bb", "ab"),
    "choice": (StructuredOutput(choice=("yes", "no")), "no", "maybe"),
    "lark": (StructuredOutput(grammar='start: "x" Y\nY: /y+/'), "xyy", "yx"),
    "ebnf": (StructuredOutput(grammar='root ::= "x" "z"'), "xz", "z"),
    "tag": (StructuredOutput(structural_tag=TAG), "so <a>3</a>", "so <a>4</a>"),
}
"""A form, what it allows, and what it does not."""


@pytest.mark.parametrize("kind", FORMS)
def test_a_form_leaves_room_for_reasoning_and_calls(vocabulary: Vocabulary, kind: str) -> None:
    """Else a model that thinks first could not think, and one with tools could not call."""
    wanted, right, wrong = FORMS[kind]
    form = ReplyFormat("hermes", "qwen3")
    calls = Calls(TOOLS, WRITINGS["hermes"], False)
    token_of: Callable[[str], int | None] = vocabulary.ids.get
    call = '<tool_call>\n{"name": "g.h-1", "arguments": {}}\n</tool_call>'
    both = framed(wanted, calls, form, token_of, inside=False)
    thinking = framed(wanted, None, form, token_of, inside=True)
    for lead in ("", "<think>Hm</think>\n"):
        assert vocabulary.accepts(both, lead + right)
        assert vocabulary.accepts(both, lead + call)
    assert not vocabulary.accepts(both, wrong)
    assert vocabulary.accepts(thinking, f"Hm</think>{right}")
    assert not vocabulary.accepts(thinking, f"Hm</think>{wrong}")
    if kind != "tag":  # which is any text but for its parts
        assert not vocabulary.accepts(thinking, f"Hm</think>{call}")
        assert not vocabulary.accepts(thinking, right)
    assert framed(wanted, None, ReplyFormat("hermes", None), token_of, inside=False) == wanted


def test_harmony_answers_in_its_final_channel(vocabulary: Vocabulary) -> None:
    wanted = framed(FORMS["choice"][0], None, ReplyFormat("gpt_oss", None), vocabulary.ids.get, inside=False)
    assert vocabulary.accepts(wanted, "<|channel|>final<|message|>yes")
    assert vocabulary.accepts(
        wanted, "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>no"
    )
    assert not vocabulary.accepts(wanted, "yes")


@pytest.mark.parametrize("name", [*CALL_FORMATS, None])
def test_every_format_can_be_held_to_calls(name: str | None) -> None:
    held = writable(ReplyFormat(name, None))
    assert held.is_harmony or held.calls in WRITINGS
    assert (held.calls == name) is (name in WRITINGS)


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_every_kind_of_reasoning_is_let_through(vocabulary: Vocabulary, name: str) -> None:
    form = ReplyFormat(None, name)
    vocabulary.matcher(framed(FORMS["choice"][0], None, form, vocabulary.ids.get, inside=False))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "string"}, "type object"),
        ({"type": "object", "properties": {"a": {"uniqueItems": True}}}, "uniqueItems"),
    ],
)
def test_schemas_that_can_not_be_honoured_are_refused(schema: dict[str, Any], says: str) -> None:
    calls = Calls({"f": schema}, WRITINGS["hermes"], False)
    with pytest.raises(InvalidRequest, match=says) as refusal:
        demanded(calls, ReplyFormat("hermes", None), {}.get, inside=False)
    assert refusal.value.field == "tools"


def test_arguments_that_a_schema_does_not_name_are_not_written_unless_it_says_so(vocabulary: Vocabulary) -> None:
    def accepts(schema: dict[str, Any], arguments: str) -> bool:
        calls = Calls({"f": schema}, WRITINGS["llama3_json"], True)
        wanted = demanded(calls, ReplyFormat("llama3_json", None), vocabulary.ids.get, inside=False)
        return vocabulary.accepts(wanted, f'{{"name": "f", "parameters": {arguments}}}')

    named = {"properties": {"a": {"type": "integer"}}}
    assert accepts(named, '{"a": 3}')
    assert not accepts(named, '{"b": 3}')
    assert accepts({**named, "additionalProperties": True}, '{"b": 3}')
    assert accepts({"patternProperties": {"^b$": {"const": 3}}}, '{"b": 3}')
    assert accepts({}, '{"b": 3}')


def test_a_schema_that_looks_like_ebnf_is_none(vocabulary: Vocabulary) -> None:
    tools = {"f": {"properties": {"a": {"const": "x ::= y"}}, "required": ["a"], "additionalProperties": False}}
    wanted = demanded(
        Calls(tools, WRITINGS["hermes"], True), ReplyFormat("hermes", None), vocabulary.ids.get, inside=False
    )
    assert '"x ::= y"' in vocabulary.walk(wanted, random.Random(0))
