"""What /v1/chat/completions streams adds up to the whole reply, wherever its pieces are cut."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.outputs import CompletionOutput, RequestOutput
from octavo.core.serve.chat.reply import ChatReply
from octavo.core.serve.extras import Extras
from octavo.core.serve.tools.message import ChoiceMessage
from octavo.core.serve.tools.registry import ReplyFormat
from tests.serve.test_tool_parsers import TOOLS, cut, transcripts

ENDS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
FORMATS = [
    ("hermes", "qwen3"),
    ("gpt_oss", "gpt_oss"),
    ("llama3_json", "none"),
    ("mistral", "mistral"),
    ("none", "none"),
]


def reply_of(form: ReplyFormat, *, parallel: bool, echoed: str) -> ChatReply:
    tokenizer: Any = SimpleNamespace(special_ids=frozenset(), token_bytes=lambda token_id: b"")
    return ChatReply(
        "tiny",
        tokenizer,
        SamplingParams(n=2),
        lambda: ChoiceMessage(form.open_parser(TOOLS, ""), parallel=parallel),
        echoed=echoed,
        extras=Extras(usage=True),
    )


def output_of(choices: list[CompletionOutput]) -> RequestOutput:
    return RequestOutput("1", None, [1, 2], choices, finished=False)


def without_ids(calls: list[dict[str, Any]]) -> list[Any]:
    return [call["function"] for call in calls]


def joined(stream: bytes) -> tuple[dict[int, dict[str, Any]], Any]:
    """Choice index -> its message and finish_reason; the usage."""
    *blocks, done, rest = stream.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        so_far = choices.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": [], "end": None})
        assert so_far["end"] is None  # nothing comes behind the end
        for key in ("content", "reasoning"):
            so_far[key] += delta.get(key, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(so_far["calls"])
                so_far["calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            so_far["calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        so_far["end"] = choice["finish_reason"]
    return choices, chunks[-1]["usage"]


@pytest.mark.parametrize(("calls", "reasoning"), FORMATS)
@given(
    texts=st.tuples(transcripts(), transcripts()),
    ends=st.tuples(ENDS, ENDS),
    places=st.tuples(*[st.lists(st.integers(0, 10_000), max_size=8)] * 2),
    parallel=st.booleans(),
    echoed=st.sampled_from(["", "So: "]),
)
def test_no_cut_of_a_stream_changes_the_reply(
    calls: str, reasoning: str, texts: tuple[str, str], ends: Any, places: Any, parallel: bool, echoed: str
) -> None:
    form = ReplyFormat.of(calls, reasoning, None)
    whole = reply_of(form, parallel=parallel, echoed=echoed).body(
        [output_of([CompletionOutput(i, texts[i], [7], finish_reason=ends[i]) for i in (0, 1)])]
    )
    stream = reply_of(form, parallel=parallel, echoed=echoed)
    pieces = [cut(texts[i], places[i]) for i in (0, 1)]
    events = b""
    for step in itertools.count():
        gained = [
            CompletionOutput(i, pieces[i][step], [7], finish_reason=ends[i] if step == len(pieces[i]) - 1 else None)
            for i in (0, 1)
            if step < len(pieces[i])
        ]
        if not gained:
            break
        events += stream.events(0, output_of(gained))
    choices, usage = joined(events + stream.end())
    assert usage["completion_tokens"] == sum(map(len, pieces))
    for i, choice in enumerate(whole["choices"]):
        message = choice["message"]
        assert (message["content"] or "", message.get("reasoning", "")) == (
            choices[i]["content"],
            choices[i]["reasoning"],
        )
        assert without_ids(message.get("tool_calls", [])) == without_ids(choices[i]["calls"])
        assert choice["finish_reason"] == choices[i]["end"]
        called = bool(message.get("tool_calls")) and ends[i] is FinishReason.STOP
        assert choice["finish_reason"] == ("tool_calls" if called else ends[i])
        assert parallel or len(message.get("tool_calls", ())) <= 1
