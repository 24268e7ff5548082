"""A request that fails in the middle of its stream: each API ends the stream in its own way, and says why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import tokenizers
from tokenizers.models import WordLevel

from octavo.core.base.errors import EngineDead, InvalidRequest
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.outputs import CompletionOutput, RequestOutput
from octavo.core.serve.blocks import BlockReader
from octavo.core.serve.completions.reply import CompletionReply
from octavo.core.serve.completions.schema import CompletionRequest
from octavo.core.serve.messages.reply import MessagesReply
from octavo.core.serve.replies import Reply
from octavo.core.serve.responses.reply import ResponsesReply
from octavo.core.serve.streams import open_stream
from octavo.core.serve.tools.deltas import PlainText
from octavo.core.text.tokenizer import Tokenizer

CAUSE = "the engine ended: out of luck"


def piece(**choice: Any) -> RequestOutput:
    return RequestOutput("0", None, [1, 2], [CompletionOutput(0, **choice)], finished="finish_reason" in choice)


def reply(api: str) -> Reply:
    if api == "completions":
        return CompletionReply(
            "m", None, CompletionRequest(model="m", prompt="x", stream_options={"include_usage": True})
        )
    reader = BlockReader(PlainText())
    if api == "messages":
        return MessagesReply("m", reader, 16)
    vocabulary = tokenizers.Tokenizer(WordLevel({"a": 0, "Hi": 1}, unk_token="a"))
    tokenizer = Tokenizer(vocabulary, special_tokens={}, eos_token_ids=())
    return ResponsesReply("m", {}, reader, tokenizer, SamplingParams())


async def died() -> AsyncGenerator[tuple[int, RequestOutput], None]:
    yield 0, piece(text="Hi", token_ids=[1])
    raise EngineDead(CAUSE)


async def failed() -> AsyncGenerator[tuple[int, RequestOutput], None]:
    yield 0, piece(text="Hi", token_ids=[1])
    yield 0, piece(finish_reason=FinishReason.ERROR, error=CAUSE)


async def refused() -> AsyncGenerator[tuple[int, RequestOutput], None]:
    raise InvalidRequest("too long", field="prompt")
    yield 0, piece()


async def stays() -> Any:
    await asyncio.Event().wait()


def events_of(pieces: AsyncGenerator[tuple[int, RequestOutput], None], reply: Reply) -> list[str]:
    async def read() -> bytes:
        return b"".join([event async for event in await open_stream(stays, pieces, reply)])

    return asyncio.run(read()).decode().removesuffix("\n\n").split("\n\n")


def data_of(event: str) -> Any:
    return json.loads(event.rpartition("data: ")[2])


@pytest.mark.parametrize("pieces", [died, failed])
def test_completions_end_with_an_error_and_done(pieces: Any) -> None:
    *_, error, done = events_of(pieces(), reply("completions"))
    assert data_of(error)["error"]["message"] == CAUSE
    assert done == "data: [DONE]"


@pytest.mark.parametrize("pieces", [died, failed])
def test_responses_end_as_failed(pieces: Any) -> None:
    events = [data_of(event) for event in events_of(pieces(), reply("responses"))]
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.failed"
    assert (response["status"], response["error"]) == ("failed", {"code": "server_error", "message": CAUSE})
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "Hi"
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert "response.output_item.done" not in {event["type"] for event in events}


@pytest.mark.parametrize("pieces", [died, failed])
def test_messages_end_with_an_error(pieces: Any) -> None:
    *before, last = events_of(pieces(), reply("messages"))
    assert last.startswith("event: error\n")
    assert data_of(last) == {"type": "error", "error": {"type": "api_error", "message": CAUSE}}
    kinds = [data_of(event)["type"] for event in before]
    assert kinds == ["message_start", "content_block_start", "content_block_delta"]


@pytest.mark.parametrize("api", ["completions", "responses", "messages"])
def test_what_is_refused_is_no_stream(api: str) -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        events_of(refused(), reply(api))
