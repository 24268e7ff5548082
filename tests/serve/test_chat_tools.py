"""Tools and reasoning in /v1/chat/completions by OpenAI's client: whole and streamed, they are one and the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.core.base.config import ServeConfig
from tests.fakes.scripted_chat import TEMPLATE, save_scripted_chat
from tests.serve.conftest import Server

SCRIPTS = {
    "plain": ["Hello", " world", "!"],
    "think": ["<think>", "Hm", ", four?", "</think>", "\n\nFour", "."],
    "call": [
        "Looking.", "\n", "<tool_call>", '\n{"name": "', 'time", "arguments": {"zone": "CET"}}\n', "</tool_call>",
        '\n<tool_call>{"name": "city"', ', "arguments": {}}</tool_call', ">",
    ],
    "bare": ['<tool_call>{"name": "city"}', "\n</tool_call>"],
    "null": ['<tool_call>{"name": "city", "argu', 'ments": null}</tool_call>'],
    "json": ['{"b"', ": 3}"],
    "high": ["Deep."],
    "shallow": ["Flat."],
    "novel": ["I read it."],
    "go": [" on", " then"],
    "other": ["seen", "<|other|>", ", unseen"],
}  # fmt: skip
"""The last word of a conversation, and the pieces of the reply to it."""

SPECIAL = ["<tool_call>", "</tool_call>", "<think>", "<|other|>"]

ENDING = """\
{%- if documents %}{{ documents[0].text }}{% endif %}{{ reasoning_effort or '' }}\
{% if enable_thinking is false %} shallow{% endif %}{% if begin_thinking %}<think>{% endif -%}"""
"""The words that variables of the template add to a conversation's end."""

ZONE: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"enum": ["CET", "UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Tells it.", "parameters": schema}}


TOOLS: Any = [tool("time", ZONE), tool("city", NOTHING)]


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


class Said(NamedTuple):
    """What a choice comes to."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    finish: str


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Marks are special tokens; requests may bring templates."""
    model = save_scripted_chat(tmp_path_factory.mktemp("talker"), SCRIPTS, template=TEMPLATE + ENDING, special=SPECIAL)
    yield from running(Server(str(model), ServeConfig(trust_request_chat_template=True), max_num_seqs=4))


@pytest.fixture(scope="module")
def unread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same model, whose replies are not read."""
    model = save_scripted_chat(tmp_path_factory.mktemp("unread"), SCRIPTS, special=SPECIAL)
    yield from running(Server(str(model), ServeConfig(tool_call_parser="none", reasoning_parser="none")))


def running(made: Server) -> Iterator[Server]:
    with made:
        yield made


def both(server: Server, content: Any, **fields: Any) -> Said:
    """The first choice of a reply, after checking that every choice is the same streamed."""
    fields = {"temperature": 0, **fields}
    whole = [said(choice) for choice in server.chat(content, **fields).choices]
    assert streamed(server, content, **fields) == whole
    return whole[0]


def said(choice: Any) -> Said:
    message = choice.message
    assert message.role == "assistant"
    for call in message.tool_calls or ():
        assert call.type == "function"
        assert call.id.startswith("call_")
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert message.content is not None or calls
    reasoning = getattr(message, "reasoning", None)
    assert reasoning == getattr(message, "reasoning_content", None)
    return Said(message.content or "", reasoning or "", calls, choice.finish_reason)


def streamed(server: Server, content: Any, **fields: Any) -> list[Said]:
    """The choices of a stream, whose chunks are as OpenAI's API has them."""
    parts: dict[int, list[Any]] = {}
    for chunk in server.chat(content, stream=True, **fields):
        (choice,) = chunk.choices
        if choice.index not in parts:
            assert choice.delta.role == "assistant"
            assert (choice.delta.tool_calls, choice.finish_reason, choice.logprobs) == (None, None, None)
        else:
            assert choice.delta.role is None
        parts.setdefault(choice.index, []).append(choice)
    return [_joined(parts[index]) for index in sorted(parts)]


def _joined(pieces: list[Any]) -> Said:
    assert [piece.finish_reason is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    calls: list[list[str]] = []
    for call in [call for piece in pieces for call in piece.delta.tool_calls or ()]:
        if call.index == len(calls):
            assert (call.type, call.id.startswith("call_")) == ("function", True)
            calls.append([call.function.name, ""])
        else:
            assert (call.index, call.id, call.function.name) == (len(calls) - 1, None, None)
        calls[-1][1] += call.function.arguments
    texts = ["".join(getattr(p.delta, key, None) or "" for p in pieces) for key in ("content", "reasoning")]
    return Said(*texts, [(name, arguments) for name, arguments in calls], pieces[-1].finish_reason)


TWO = [("time", '{"zone": "CET"}'), ("city", "{}")]
RAW = "".join(SCRIPTS["call"])


# -- calls ------------------------------------------------------------------------------------------------------------


def test_calls_come_as_calls_and_words_as_words(talker: Server) -> None:
    assert both(talker, "Say call", tools=TOOLS) == Said("Looking.", "", TWO, "tool_calls")
    assert both(talker, "Say plain", tools=TOOLS) == Said("Hello world!", "", [], "stop")
    assert both(talker, "Say call", tools=TOOLS, parallel_tool_calls=False).calls == TWO[:1]


@pytest.mark.parametrize("word", ["bare", "null"])
def test_a_call_without_arguments_has_an_empty_object(talker: Server, word: str) -> None:
    """vllm#11392: never null or nothing, alone and beside one that has some."""
    assert both(talker, f"Say {word}", tools=TOOLS) == Said("", "", [("city", "{}")], "tool_calls")


def test_without_tools_nothing_is_a_call(talker: Server, scripted: Server) -> None:
    hidden = RAW.replace("<tool_call>\n{", "\n{", 1).replace("\n</tool_call>", "\n", 1)
    assert both(talker, "Say call") == Said(hidden, "", [], "stop")  # the marks are special tokens
    assert both(talker, "Say call", tools=TOOLS, tool_choice="none").content == hidden
    assert "<tool_call>" in both(scripted, "Say call").content  # here they are texts like others


def test_tools_that_may_not_be_called_are_not_in_the_prompt(talker: Server) -> None:
    def prompt_tokens(**fields: Any) -> int:
        return talker.chat("Say plain", temperature=0, **fields).usage.prompt_tokens

    assert prompt_tokens(tools=TOOLS, tool_choice="none") == prompt_tokens() < prompt_tokens(tools=TOOLS[:1])
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("time")]}}
    assert prompt_tokens(tools=TOOLS, tool_choice=only) == prompt_tokens(tools=TOOLS[:1])


CHOICES = ["none", "auto", "required", named("time")]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("word", ["plain", "call"])
def test_finish_reason_goes_by_one_rule(talker: Server, choice: Any, word: str) -> None:
    """vllm#53255, #25054: tool_calls only when a call was given."""
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 300, "parallel_tool_calls": False}
    reply = both(talker, f"Say {word}", **fields)
    must_call = choice not in ("none", "auto")
    assert bool(reply.calls) is (must_call or (choice == "auto" and word == "call"))
    assert reply.finish == ("tool_calls" if reply.calls else "stop")
    if must_call:
        ((name, arguments),) = reply.calls
        assert name in (["time", "city"] if choice == "required" else ["time"])
        assert json.loads(arguments).get("zone") in (["CET", "UTC"] if name == "time" else [None])
        assert reply.content == ""


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("limit", [1, 4, 6, 7])
def test_what_max_tokens_cut_ends_by_length(talker: Server, choice: Any, limit: int) -> None:
    """The same reports: with and without a call that was whole before the cut."""
    reply = both(talker, "Say call", tools=TOOLS, tool_choice=choice, max_tokens=limit)
    assert reply.finish == "length"
    if choice == "auto":
        assert reply.calls == (TWO[:1] if limit >= 5 else [])


def test_required_lets_a_model_call_several_times(talker: Server) -> None:
    end = talker.engine.tokenizer.token_id("</s>")  # type: ignore[union-attr]  # it has one
    fields: Any = {"tools": TOOLS[1:], "tool_choice": "required", "logit_bias": {str(end): -100}, "max_tokens": 200}
    several = both(talker, "Say call", **fields)
    assert several.calls == [("city", "{}")] * len(several.calls)
    assert len(several.calls) > 1
    assert several.finish == "length"
    assert both(talker, "Say call", **fields, parallel_tool_calls=False) == Said("", "", [("city", "{}")], "tool_calls")


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_comes_only_when_asked(talker: Server, options: Any) -> None:
    """vllm#36379, #7262: with tools, for all choices, in one last chunk before [DONE]."""
    more = {} if options is None else {"stream_options": options}
    body = {"messages": [{"role": "user", "content": "Say call"}], "tools": TOOLS, "temperature": 0, "n": 2}
    lines = talker.post("chat/completions", **body, stream=True, **more).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    with_usage = [chunk for chunk in chunks if chunk.get("usage") is not None]
    if options != {"include_usage": True}:
        assert with_usage == []
        return
    assert with_usage == [chunks[-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * (len(SCRIPTS["call"]) + 1)
    whole = talker.post("chat/completions", **body).json()["usage"]
    assert {k: chunks[-1]["usage"][k] for k in ("prompt_tokens", "total_tokens")} == {
        k: whole[k] for k in ("prompt_tokens", "total_tokens")
    }


def test_every_choice_has_its_own_parser(talker: Server) -> None:
    reply = talker.chat("Say call", tools=TOOLS, n=3, temperature=0)
    assert [said(choice) for choice in reply.choices] == [Said("Looking.", "", TWO, "tool_calls")] * 3
    assert len({call.id for choice in reply.choices for call in choice.message.tool_calls}) == 6
    both(talker, "Say call", tools=TOOLS, n=3)


def test_logprobs_tell_of_all_tokens(talker: Server) -> None:
    """Those of calls and marks too; a piece that is held back brings them at its own time."""
    fields: Any = {"tools": TOOLS, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    reply = talker.chat("Say call", **fields)
    whole = [entry.model_dump() for entry in reply.choices[0].logprobs.content]
    assert [entry["token"] for entry in whole] == [*SCRIPTS["call"], "</s>"]
    assert b"".join(bytes(entry["bytes"] or ()) for entry in whole).decode() == RAW
    chunks = [chunk.choices[0] for chunk in talker.chat("Say call", stream=True, **fields)]
    assert [entry.model_dump() for c in chunks if c.logprobs for entry in c.logprobs.content] == whole


def test_strict_tools_hold_calls_and_leave_words_free(talker: Server) -> None:
    """By the client's own helper, which takes strict tools alone and reads the arguments."""
    tools: Any = [{"type": "function", "function": {**each["function"], "strict": True}} for each in TOOLS]
    fields: Any = {"tools": tools, "parallel_tool_calls": False}
    assert both(talker, "Say call", **fields) == Said("Looking.", "", TWO[:1], "tool_calls")
    assert both(talker, "Say plain", **fields) == Said("Hello world!", "", [], "stop")
    with talker.client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "Say call"}], temperature=0, **fields
    ) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    assert {"content.delta", "tool_calls.function.arguments.done"} <= kinds
    assert [call.function.parsed_arguments for call in choice.message.tool_calls or ()] == [{"zone": "CET"}]


def test_a_strict_tool_is_held_to_its_schema(talker: Server) -> None:
    def calls(**more: Any) -> list[tuple[str, str]]:
        tools = [{"type": "function", "function": {"name": "time", "parameters": NOTHING, **more}}]
        return both(talker, "Say call", tools=tools, parallel_tool_calls=False, max_tokens=60).calls

    assert calls(strict=False) == calls() == TWO[:1]  # as the script has it
    assert calls(strict=True) == [("time", "{}")]


def test_a_form_leaves_room_for_calls(talker: Server) -> None:
    schema = {"type": "object", "properties": {"b": {"const": 3}}, "required": ["b"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "b", "schema": schema}}
    fields: Any = {"tools": TOOLS, "response_format": form, "max_tokens": 100}
    assert both(talker, "Say json", **fields) == Said('{"b": 3}', "", [], "stop")
    del fields["tools"]
    reply = both(talker, "Say think", **fields)
    assert reply.reasoning == "Hm, four?"
    assert json.loads(reply.content) == {"b": 3}
    refusal = talker.refusal(
        "chat/completions", messages=[{"role": "user", "content": "x"}], tools=TOOLS, tool_choice="required",
        response_format=form,
    )  # fmt: skip
    assert refusal["param"] == "tool_choice"


# -- reasoning --------------------------------------------------------------------------------------------------------


def test_reasoning_is_split_from_the_answer(talker: Server) -> None:
    assert both(talker, "Say think") == Said("Four.", "Hm, four?", [], "stop")
    assert both(talker, "Say think", include_reasoning=False) == Said("Four.", "", [], "stop")
    assert both(talker, "Say think", tools=TOOLS).reasoning == "Hm, four?"
    assert both(talker, "Say think", max_tokens=3) == Said("", "Hm, four?", [], "length")


def test_usage_tells_the_tokens_of_reasoning(talker: Server) -> None:
    def counted(word: str, **fields: Any) -> list[int]:
        fields = {"temperature": 0, **fields}
        whole = talker.chat(f"Say {word}", **fields).usage
        *_, last = talker.chat(f"Say {word}", stream=True, stream_options={"include_usage": True}, **fields)
        return [usage.completion_tokens_details.reasoning_tokens for usage in (whole, last.usage)]

    assert counted("think") == [2, 2]  # "Hm" and ", four?"
    assert counted("think", n=2) == [4, 4]
    assert counted("think", include_reasoning=False) == [2, 2]
    assert counted("think", max_tokens=2) == [1, 1]
    assert counted("plain") == counted("call", tools=TOOLS) == [0, 0]


def test_a_reply_may_begin_inside_reasoning(talker: Server) -> None:
    variables = {"begin_thinking": True}
    assert both(talker, "Say", chat_template_kwargs=variables) == Said("Four.", "Hm, four?", [], "stop")
    reply = both(talker, "Say", chat_template_kwargs=variables, tools=TOOLS, tool_choice=named("city"), max_tokens=300)
    assert (reply.reasoning, reply.calls, reply.finish) == ("Hm, four?", [("city", "{}")], "tool_calls")


def test_other_special_tokens_stay_hidden(talker: Server) -> None:
    assert both(talker, "Say other", tools=TOOLS).content == "seen, unseen"
    assert both(talker, "Say other", tools=TOOLS, skip_special_tokens=False).content == "seen<|other|>, unseen"


def test_a_server_may_leave_replies_as_they_are(unread: Server) -> None:
    assert both(unread, "Say think").content == "Hm, four?</think>\n\nFour."
    reply = both(unread, "Say bare", tools=TOOLS)
    assert (reply.content, reply.calls) == ("".join(SCRIPTS["bare"]), [])


# -- history and templates --------------------------------------------------------------------------------------------


def history(arguments: Any, **more: Any) -> list[Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": arguments}}
    return [
        {"role": "user", "content": [{"type": "text", "text": "When?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], **more},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Noon. plain"}]},
    ]


def test_calls_of_the_past_come_in_both_forms(talker: Server) -> None:
    replies = [
        talker.post("chat/completions", messages=history(given), tools=TOOLS, temperature=0).json()
        for given in ({"zone": "CET"}, '{"zone": "CET"}')
    ]
    assert [reply["choices"][0]["message"]["content"] for reply in replies] == ["Hello world!"] * 2
    assert replies[0]["usage"]["prompt_tokens"] == replies[1]["usage"]["prompt_tokens"]
    for nothing in ("", None):
        reply = talker.post("chat/completions", messages=history(nothing), temperature=0).json()
        assert reply["choices"][0]["message"]["content"] == "Hello world!"


@pytest.mark.parametrize("wrong", ['{"zone": "C', "[1]", [1]])
def test_wrong_arguments_of_the_past_are_refused(talker: Server, wrong: Any) -> None:
    error = talker.refusal("chat/completions", messages=history(wrong))
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


def test_a_reply_can_go_on_with_the_last_message(talker: Server) -> None:
    open_end: list[Any] = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "I will go"}]
    assert both(talker, open_end, continue_final_message=True).content == " on then"
    body: dict[str, Any] = {"messages": open_end, "continue_final_message": True, "temperature": 0}
    whole = talker.post("chat/completions", **body, echo=True).json()["choices"][0]["message"]
    assert whole["content"] == "I will go on then"
    lines = talker.post("chat/completions", **body, echo=True, stream=True).text.split("\n\n")[:-2]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I will go on then"
    parts = [{**open_end[1], "content": [{"type": "text", "text": "I will go"}]}]
    assert both(talker, [open_end[0], *parts], continue_final_message=True).content == " on then"


def test_an_unclosed_thought_goes_on_as_reasoning(talker: Server) -> None:
    begun: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>"}]
    assert both(talker, begun, continue_final_message=True) == Said("Four.", "Hm, four?", [], "stop")


def test_the_template_hears_of_effort_documents_and_thinking(talker: Server) -> None:
    assert both(talker, "Say", reasoning_effort="high").content == "Deep."
    assert both(talker, "Say", reasoning_effort="none").content == "Flat."
    assert both(talker, "Say", documents=[{"title": "A", "text": "novel"}]).content == "I read it."


def test_a_request_may_bring_its_template_where_the_server_allows_it(talker: Server, scripted: Server) -> None:
    own = "{% for message in messages %}{{ message.content }} {% endfor %} plain"
    assert both(talker, "Say think", chat_template=own).content == "Hello world!"
    user = [{"role": "user", "content": "x"}]
    error = scripted.refusal("chat/completions", messages=user, chat_template=own)
    assert "--trust-request-chat-template" in error["message"]
    for evil in ("{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}x{% endfor %}", "{{"):
        assert talker.refusal("chat/completions", messages=user, chat_template=evil)["param"] in (
            "messages", "chat_template",
        )  # fmt: skip


@pytest.fixture(scope="module")
def coder(scripted_model: Path) -> Iterator[Server]:
    """A server that reads calls which nothing but their content tells from words."""
    yield from running(Server(str(scripted_model), ServeConfig(tool_call_parser="qwen3_coder")))


def test_strict_is_refused_where_nothing_can_hold_it(coder: Server) -> None:
    tools = [tool("f", ZONE), {"type": "function", "function": {**tool("g", ZONE)["function"], "strict": True}}]
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "Say plain"}], "max_tokens": 3}
    error = coder.refusal("chat/completions", tools=tools, **given)
    assert error["param"] == "tools[1].function.strict"
    assert "tool_choice required" in error["message"]
    assert coder.post("chat/completions", tools=tools[:1], **given).status_code == 200
    assert coder.post("chat/completions", tools=tools, tool_choice="required", **given).status_code == 200


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tools": [3]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": named("other")}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("f", {"type": "string"})], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0]"),
        ({"messages": history("{}", function_call={"name": "f", "arguments": "{}"})}, "messages[1]"),
        ({"messages": history("{}")[:2], "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_wrong_requests_are_refused_by_name(talker: Server, fields: dict[str, Any], field: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    assert talker.refusal("chat/completions", **body)["param"] == field


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_what_a_template_would_pass_over_is_refused(server: Server, name: str) -> None:
    given = {"tools": TOOLS, "documents": [{"text": "x"}]}[name]
    error = server.refusal("chat/completions", messages=[{"role": "user", "content": "x"}], **{name: given})
    assert error["param"] == name
    assert server.chat(tools=TOOLS, tool_choice="none", temperature=0).choices[0].message.content == " Hello!"
