"""POST /v1/responses. What OpenAI has below that path needs responses that are kept, and is answered with 404."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import FastAPI, HTTPException, Request, Response

from octavo.core.serve.blocks import BlockReader
from octavo.core.serve.chat.turn import ChatTurn, read_turn
from octavo.core.serve.generation import answer
from octavo.core.serve.responses.input import read_input
from octavo.core.serve.responses.reply import ResponsesReply
from octavo.core.serve.responses.schema import ResponsesRequest
from octavo.core.serve.responses.tools import chat_tools
from octavo.core.serve.responses.truncation import read_newest
from octavo.core.serve.serving import Serving
from octavo.core.serve.wording import worded

WORDS = {
    ".function.": ".",
    "tool_choice.allowed_tools": "tool_choice",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
"""Chat completions' names -> those of this API."""


def install(app: FastAPI, serving: Serving) -> None:
    """Add the route to an app."""
    engine = serving.engine

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Reply to a conversation of items. Nothing is kept."""
        adapter = serving.admit(body)
        body.check()
        with worded(WORDS):
            turn = await _read(serving, body)
            assert engine.tokenizer is not None  # it has just read the chat
            reader = BlockReader(turn.open_parser(), parallel=body.allows_several_calls)
            reply = ResponsesReply(body.model, body.echo(), reader, engine.tokenizer, turn.params)
            return await answer(engine, request, body, [turn.token_ids], turn.params, reply, adapter)

    @app.api_route("/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def kept() -> Response:
        """Nothing is kept that could be fetched, continued, cancelled or deleted."""
        raise HTTPException(404, "no response is kept here, whatever its request said of store")


async def _read(serving: Serving, body: ResponsesRequest) -> ChatTurn:
    tools, choice = chat_tools(body.tools, body.tool_choice)
    chat = await asyncio.to_thread(read_input, body.instructions, body.input)
    read = partial(
        read_turn,
        serving,
        params=body.sampling_params(),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.allows_several_calls,
        variables=body.template_variables(),
    )
    if body.truncation != "auto":
        return await read(chat)
    return await read_newest(read, chat, serving.engine.max_model_len - (body.max_output_tokens or 1))
