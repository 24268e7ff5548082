"""Every parser of calls and reasoning: what it reads, what it gives back, and that no cut of the text matters."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.serve.tools.deltas import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta
from octavo.core.serve.tools.registry import CALL_FORMATS, REASONING_FORMATS, ReplyFormat

TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
    "get_time": {"type": "object"},
}


class Read(NamedTuple):
    """What deltas add up to."""

    text: str
    reasoning: str
    calls: list[tuple[str, str]]


def read(pieces: list[str], calls: str = "none", reasoning: str = "none", prompt_end: str = "") -> Read:
    parser = ReplyFormat.of(calls, reasoning, None).open_parser(TOOLS, prompt_end)
    assert parser is not None
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    return joined(deltas + parser.finish())


def joined(deltas: list[Delta]) -> Read:
    names: list[str] = []
    arguments: list[str] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert delta.index == len(names)
            names.append(delta.name)
            arguments.append("")
        elif isinstance(delta, CallArguments):
            arguments[delta.index] += delta.text
    return Read(
        "".join(each.text for each in deltas if isinstance(each, TextDelta)),
        "".join(each.text for each in deltas if isinstance(each, ReasoningDelta)),
        list(zip(names, arguments, strict=True)),
    )


V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"n": 3}\n```<｜tool▁call▁end｜>'
V31 = "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
ONE, TWO = [("f", '{"n": 3}')], [("f", '{"n": 3}'), ("get_time", "{}")]

WHOLE = [
    ("hermes", 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>', "Hm.", ONE),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"n": 3}}</tool_call>\n<tool_call>{"name": "get_time"}</tool_call>',
        "",
        TWO,
    ),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>', "", TWO[1:]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>{[\\""}}',
        "",
        [("f", '{"s": "</tool_call>{[\\""}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        "",
        TWO,
    ),
    ("qwen3_coder", "<function=f><parameter=s>\n3\n\n</parameter></function>", "", [("f", '{"s": "3\\n"}')]),
    ("llama3_json", '{"name": "f", "parameters": {"n": 3}}; {"name": "get_time", "parameters": {}}', "", TWO),
    ("llama3_json", 'So: <|python_tag|>{"name": "f", "parameters": {"n": 3}}', "So:", ONE),
    ("pythonic", "[f(n=3), get_time()]", "", TWO),
    ("pythonic", "<|python_start|>[f(s='it\\'s ]', n=-1)]<|python_end|>", "", [("f", '{"s": "it\'s ]", "n": -1}')]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 3}}, {"name": "get_time"}]', "", TWO),
    ("mistral", 'Ok[TOOL_CALLS]f[ARGS]{"n": 3}[TOOL_CALLS]get_time[CALL_ID]abcdefgh1[ARGS]{}', "Ok", TWO),
    ("deepseek_v3", f"Ok<｜tool▁calls▁begin｜>{V3}\n{V31}<｜tool▁calls▁end｜>", "Ok", TWO),
    ("gpt_oss", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 3}<|call|>', "", ONE),
    ("gpt_oss", ' to=functions.f<|channel|>commentary json<|message|>{"n": 3}', "", ONE),
    ("gemma", "Ok\n```tool_code\nprint(f(n=3))\nget_time()\n```\n", "Ok", TWO),
    ("gemma", '```json\n{"name": "f", "parameters": {"n": 3}}\n```', "", ONE),
]


@pytest.mark.parametrize(("name", "reply", "text", "calls"), WHOLE)
def test_calls_are_read(name: str, reply: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert read([reply], name) == Read(text, "", calls)
    assert read(list(reply), name) == Read(text, "", calls)


NO_CALLS = [
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call> x'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "cut'),
    ("hermes", "a < b <tool_ca"),
    ("hermes", "<tool_call>" + "[" * 5000),
    ("qwen3_coder", "<tool_call><function=f><parameter=n>3"),
    ("llama3_json", '{"name": "somebody", "parameters": {}}'),
    ("llama3_json", '{"name": "f"}'),
    ("pythonic", "[1, 2] is a list, it's so"),
    ("pythonic", "[f(3)]"),
    ("pythonic", "[f(n=__import__('os'))]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]"),
    ("gpt_oss", '<|channel|>commentary to=functions.f<|message|>{"n":'),
    ("gpt_oss", "plain words"),
    ("gemma", "```tool_code\nimport os\n```\nx"),
]


@pytest.mark.parametrize(("name", "reply"), NO_CALLS)
def test_what_is_no_call_comes_back_as_text(name: str, reply: str) -> None:
    assert read([reply], name) == Read(reply, "", [])


def test_harmony_splits_channels() -> None:
    reply = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"n": 3}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Three."
    )
    assert read([reply], "gpt_oss") == Read("I look.\nThree.", "Hm.\nSo.", ONE)
    assert read([reply], reasoning="gpt_oss") == read([reply], "gpt_oss")


@pytest.mark.parametrize(
    ("name", "prompt_end", "reply", "text", "reasoning"),
    [
        ("qwen3", "", "<think>\nHm.\n</think>\n\nFour.", "Four.", "Hm."),
        ("qwen3", "", "Four, not <think>.", "Four, not <think>.", ""),
        ("qwen3", "<think>\n", "Hm.</think>Four.", "Four.", "Hm."),
        ("qwen3", "<think>\n\n</think>\n\n", "Four.", "Four.", ""),
        ("deepseek_r1", "", "Hm.</think>Four.", "Four.", "Hm."),
        ("deepseek_r1", "<think>\n", "<think>Hm.", "", "Hm."),
        ("deepseek_r1", "</think>", "Four.", "Four.", ""),
        ("mistral", "", "A[THINK]b[/THINK]c[THINK]d", "Ac", "bd"),
        ("granite", "", "Here's my thought process: Hm.\nHere is my response: Four.", "Four.", "Hm."),
    ],
)
def test_reasoning_is_split(name: str, prompt_end: str, reply: str, text: str, reasoning: str) -> None:
    assert read([reply], reasoning=name, prompt_end=prompt_end) == Read(text, reasoning, [])
    assert read(list(reply), reasoning=name, prompt_end=prompt_end) == Read(text, reasoning, [])


def test_calls_behind_reasoning_are_read_and_those_in_it_are_not() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"n": 3}}</tool_call>'
    assert read([f"<think>{call}</think>{call}"], "hermes", "qwen3") == Read("", call, ONE)


def test_mistral_keeps_a_good_id_and_makes_one_otherwise() -> None:
    parser = ReplyFormat.of("mistral", "none", None).open_parser(TOOLS, "")
    deltas = parser.feed("[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{}[TOOL_CALLS]f[CALL_ID]no[ARGS]{}") + parser.finish()
    kept, made = (each.id for each in deltas if isinstance(each, CallStart))
    assert kept == "abcdefgh1"
    assert re.fullmatch("[A-Za-z0-9]{9}", made)


def test_half_surrogates_in_arguments_stay_escaped() -> None:
    ((_, arguments),) = read(['<tool_call>{"name": "f", "arguments": {"s": "\\ud800é"}}'], "hermes").calls
    assert arguments.encode()
    assert json.loads(arguments) == {"s": "\ud800é"}


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ '<tool_call>' }} {{ '</think>' }}", "hermes", "qwen3"),
        ("<tool_call> <function= <parameter=", "qwen3_coder", None),
        ("<|channel|> <|message|>", "gpt_oss", "gpt_oss"),
        ("<｜Assistant｜> </think> <｜tool▁call▁begin｜>", "deepseek_v3", "deepseek_r1"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<|start_header_id|> tools", "llama3_json", None),
        ("<start_of_turn>", None, None),
        (None, None, None),
    ],
)
def test_auto_goes_by_the_template(template: str | None, calls: str | None, reasoning: str | None) -> None:
    assert ReplyFormat.of("auto", "auto", template) == ReplyFormat(calls, reasoning)


# -- any cut, any text --------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(['"', "\\", "}", "</tool_call>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
MARKERS = sorted(
    {marker for form in CALL_FORMATS.values() for marker in form.markers}
    | {"<think>", "</think>", "[THINK]", "[/THINK]", "```tool_code", "```json", "```", "<function=f>", "</function>"}
    | {"<parameter=n>", "</parameter>", "[f(n=3", ")]", "analysis", " to=functions.f", "Here is my response:"}
)


@st.composite
def transcripts(draw: st.DrawFn) -> str:
    """Whole calls, whole and half markers, brackets, quotes and words, in any order."""
    half = st.builds(lambda marker, n: marker[:n], st.sampled_from(MARKERS), st.integers(1, 12))
    call = st.builds(lambda value: json.dumps({"name": "f", "arguments": value}), ARGUMENTS)
    tagged = call.map(lambda text: f"<tool_call>{text}</tool_call>")
    good = st.sampled_from([reply for _, reply, _, _ in WHOLE])
    words = st.text(max_size=6) | st.sampled_from([" ", "\n", "{", "}", '"', "'", "\\", "[", "]", "😀", "é"])
    parts = st.one_of(half, st.sampled_from(MARKERS), call, tagged, good, words)
    return "".join(draw(st.lists(parts, max_size=8)))


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("calls", [*CALL_FORMATS, "none"])
@given(text=transcripts(), places=st.lists(st.integers(0, 10_000), max_size=12), reasoning=st.sampled_from(
    [*REASONING_FORMATS, "none"]
), inside=st.booleans())  # fmt: skip
def test_no_cut_matters(calls: str, text: str, places: list[int], reasoning: str, inside: bool) -> None:
    if calls == reasoning == "none":
        return
    end = "<think>" if inside else ""
    whole = read([text], calls, reasoning, end)
    assert read(cut(text, places), calls, reasoning, end) == whole
    assert read(list(text), calls, reasoning, end) == whole
    for _, arguments in whole.calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("calls", ["hermes", "llama3_json", "pythonic", "mistral", "gemma"])
@given(text=transcripts())
def test_without_a_call_no_text_is_lost(calls: str, text: str) -> None:
    found = read([text], calls)
    if not found.calls:
        assert found.text == text


@given(value=ARGUMENTS)
def test_arguments_come_as_they_were_written(value: dict[str, Any]) -> None:
    text = json.dumps({"name": "f", "arguments": value})
    ((name, arguments),) = read(list(f"<tool_call>{text}</tool_call>"), "hermes").calls
    assert (name, json.loads(arguments)) == ("f", value)
