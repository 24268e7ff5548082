"""Past tool calls reach a template in the form that it reads, whichever form the client sent."""

from __future__ import annotations

import pytest

from octavo.core.base.errors import InvalidRequest
from octavo.core.text.chat import ChatTemplate

LOOP = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"
WALKS = f"{LOOP}{{% for k, v in c.function.arguments.items() %}}{{{{ k }}}}={{{{ v }}}};{{% endfor %}}{END}"
DUMPS = f"{LOOP}{{{{ c.function.arguments | tojson }}}}{END}"
JOINS = f"{LOOP}{{{{ c.function.name + c.function.arguments }}}}{END}"
PRINTS = f"{LOOP}{{{{ c.function.arguments }}}}{END}"


def history(arguments):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


def render(source, messages):
    return ChatTemplate(source, {}).render(messages)


@pytest.mark.parametrize("arguments", ['{"a":3}', {"a": 3}])
def test_both_forms_read_the_same(arguments):
    assert render(WALKS, history(arguments)) == "a=3;"
    assert render(DUMPS, history(arguments)) == '{"a": 3}'
    assert render(JOINS, history(arguments)).replace(" ", "") == 'f{"a":3}'
    assert render(PRINTS, history(arguments)).replace(" ", "") == '{"a":3}'


@pytest.mark.parametrize("arguments", ["", " ", None, {}, "{}"])
def test_no_arguments_are_an_empty_object(arguments):
    assert render(WALKS, history(arguments)) == ""
    assert render(DUMPS, history(arguments)) == "{}"
    assert render(JOINS, history(arguments)) == "f{}"


@pytest.mark.parametrize("arguments", ['{"a": "x', "[1]", [1], 3, '"x"', "[" * 100_000])
@pytest.mark.parametrize("source", [WALKS, JOINS])
def test_other_arguments_are_refused_by_name(source, arguments):
    """vllm#48922 and its kind."""
    with pytest.raises(InvalidRequest, match="JSON") as refusal:
        render(source, history(arguments))
    assert refusal.value.field == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("calls", ["x", [3], [{}], [{"function": {"name": 3}}]])
def test_malformed_calls_are_refused_by_name(calls):
    with pytest.raises(InvalidRequest) as refusal:
        render(WALKS, [{"role": "assistant", "content": "", "tool_calls": calls}])
    assert refusal.value.field.startswith("messages[0].tool_calls")


def test_a_list_without_calls_is_no_list_of_calls():
    source = "{% for m in messages %}{{ 'tool_calls' in m }}{% endfor %}"
    assert render(source, [{"role": "assistant", "content": "x", "tool_calls": []}]) == "False"
