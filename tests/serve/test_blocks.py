"""Replies as blocks, the tokens that parts of them came from, and other APIs' turns as chat messages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.serve.blocks import BlockReader, Closed, Gained, Kind, Opened, Step
from octavo.core.serve.conversation import Conversation
from octavo.core.serve.token_track import TokenTrack
from octavo.core.serve.tools.deltas import ToolParser
from octavo.core.serve.tools.registry import ReplyFormat

TOOLS = {"time": {}, "city": {}}
CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>'
REPLY = f"<think>\nLet me see.\n</think>\nI'll look.\n{CALL}\n{CALL.replace('time', 'city')}"


def parser() -> ToolParser:
    opened = ReplyFormat("hermes", "qwen3").open_parser(TOOLS, "")
    assert opened is not None
    return opened


def steps_of(reader: BlockReader, pieces: Sequence[str]) -> list[Step]:
    return [step for i, piece in enumerate(pieces) for step in reader.feed(piece, ended=i == len(pieces) - 1)]


def seen(reader: BlockReader) -> list[tuple[Kind, str, str]]:
    return [(block.kind, block.name, block.text) for block in reader.blocks]


WHOLE = [
    (Kind.REASONING, "", "Let me see."),
    (Kind.TEXT, "", "I'll look."),
    (Kind.CALL, "time", '{"zone": "CET"}'),
    (Kind.CALL, "city", '{"zone": "CET"}'),
]


@given(st.lists(st.integers(0, len(REPLY)), max_size=8))
def test_any_cut_gives_the_same_blocks_one_open_at_a_time(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(REPLY)]
    reader = BlockReader(parser())
    steps = steps_of(reader, [REPLY[a:b] for a, b in itertools.pairwise(places)])
    assert seen(reader) == WHOLE
    assert reader.has_calls
    at, gained = -1, ""
    is_open = False
    for step in steps:
        if isinstance(step, Opened):
            assert not is_open
            at, gained, is_open = at + 1, "", True
            assert step.block.index == at
        elif isinstance(step, Gained):
            assert (is_open, step.block.index) == (True, at)
            gained += step.text
        else:
            assert isinstance(step, Closed)
            assert (is_open, step.block.index, step.block.text) == (True, at, gained)
            is_open = False
    assert (at, is_open) == (3, False)


def test_calls_and_reasoning_that_nobody_wants_are_left_out() -> None:
    reader = BlockReader(parser(), parallel=False, reasoning=False)
    steps_of(reader, [REPLY])
    assert seen(reader) == WHOLE[1:3]


def test_a_reply_that_says_nothing_has_no_blocks() -> None:
    reader = BlockReader(parser())
    assert steps_of(reader, ["", ""]) == []
    assert not reader.has_calls


def track_of(*tokens: str | bytes) -> TokenTrack:
    track = TokenTrack()
    for token in tokens:
        track.add(token if isinstance(token, bytes) else token.encode())
    return track


def test_parts_know_their_tokens() -> None:
    track = track_of("<think>", "Hm", ", 4", "</think>", "The", " answer")
    assert track.take("Hm, 4") == range(1, 3)
    assert track.take("The") == range(4, 5)
    assert track.take(" answer") == range(5, 6)
    assert track.take("") == range(6, 6)


def test_tokens_come_while_parts_are_taken() -> None:
    track = TokenTrack()
    for i, token in enumerate([" a", " b", " c"]):
        track.add(token.encode())
        assert track.take(token) == range(i, i + 1)


def test_a_token_of_two_parts_is_the_first_ones() -> None:
    track = track_of("Hm</th", "ink>Yes", " sir")
    assert track.take("Hm") == range(1)
    assert track.take("Yes sir") == range(1, 3)
    shared = track_of("ab", "cd")
    assert shared.take("abc") == range(2)
    assert shared.take("d") == range(2, 2)


def test_a_part_that_is_not_found_has_all_tokens_since_the_last() -> None:
    """Half a character becomes U+FFFD in the text."""
    track = track_of("ok", b"\xf0\x9f", "!")
    assert track.take("ok") == range(1)
    assert track.take("\ufffd!") == range(1, 3)
    assert track.take("more") == range(3, 3)


@given(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=20), st.data())
def test_parts_that_join_to_the_text_share_out_all_its_tokens(tokens: list[str], data: st.DataObject) -> None:
    text = "".join(tokens)
    cut = data.draw(st.integers(0, len(text)))
    track = track_of(*tokens)
    first, second = track.take(text[:cut]), track.take(text[cut:])
    assert [*first, *second] == [*range(len(tokens))]


def test_leading_words_of_the_system_are_one_message() -> None:
    talk = Conversation()
    talk.system("Be kind.")
    talk.system("Be brief.")
    talk.user(["Hi"])
    talk.system("Be loud.")
    roles = [(message["role"], message["content"]) for message in talk.messages()]
    assert roles == [("system", "Be kind.\n\nBe brief."), ("user", "Hi"), ("system", "Be loud.")]


def test_what_the_assistant_did_in_a_row_is_one_message() -> None:
    talk = Conversation()
    talk.user(["What", "time?"])
    talk.reasoning("Hm")
    talk.reasoning("so")
    talk.said("Look:")
    talk.call("c1", "time", "{}")
    talk.call("c2", "city", '{"a": 1}')
    talk.result("c2", ["Oslo"])
    talk.result("c1", ["12", "30"])
    talk.said("Half past.")
    asked, turn, *results, said = talk.messages()
    assert asked["content"] == [{"type": "text", "text": "What"}, {"type": "text", "text": "time?"}]
    assert (turn["content"], turn["reasoning_content"]) == ("Look:", "Hm\nso")
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["time", "city"]
    assert [(each["tool_call_id"], each["name"]) for each in results] == [("c2", "city"), ("c1", "time")]
    assert said == {"role": "assistant", "content": "Half past."}


@pytest.mark.parametrize(("call_id", "known"), [("c1", True), ("c2", False)])
def test_calls_that_were_made_are_known(call_id: str, known: bool) -> None:
    talk = Conversation()
    talk.call("c1", "time", "{}")
    assert talk.knows(call_id) is known
