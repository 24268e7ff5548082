"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request, Response

from octavo.core.serve.answers import headers_of
from octavo.core.serve.blocks import BlockReader
from octavo.core.serve.chat.turn import ChatTurn, read_turn
from octavo.core.serve.failures import json_response
from octavo.core.serve.generation import answer
from octavo.core.serve.messages.input import read_messages
from octavo.core.serve.messages.reply import MessagesReply
from octavo.core.serve.messages.schema import CountTokensRequest, MessagesRequest
from octavo.core.serve.messages.tools import chat_tools
from octavo.core.serve.serving import Serving
from octavo.core.serve.wording import worded

WORDS = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "structured_outputs.json": "output_config.format.schema",
    "structured_outputs": "output_config.format",
    "continue_final_message": "going on with the assistant's message",
}
"""Chat completions' names -> those of this API."""


def install(app: FastAPI, serving: Serving) -> None:
    """Add the routes to an app."""

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Reply to a conversation."""
        adapter = serving.admit(body)
        turn = await _read(serving, body)
        reader = BlockReader(turn.open_parser(), parallel=body.parallel_tool_calls, reasoning=body.shows_thinking)
        reply = MessagesReply(body.model, reader, body.max_tokens)
        room = serving.engine.max_model_len - len(turn.token_ids)
        # It has to be given, so clients give the most they ever want; stop_reason tells when the room ran out first.
        params = turn.params.with_(max_tokens=min(body.max_tokens, max(room, 1)))
        return await answer(serving.engine, request, body, [turn.token_ids], params, reply, adapter)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> Response:
        """How many tokens a conversation has."""
        serving.admit(body)
        turn = await _read(serving, body)
        return json_response({"input_tokens": len(turn.token_ids)}, headers=headers_of(body.ignored_fields()))


async def _read(serving: Serving, body: CountTokensRequest) -> ChatTurn:
    body.refuse_unsupported()
    chat = await asyncio.to_thread(read_messages, body.system, body.messages)
    tools, choice = chat_tools(body.tools, body.tool_choice)
    goes_on = chat[-1]["role"] == "assistant"
    with worded(WORDS):
        return await read_turn(
            serving,
            chat,
            body.sampling_params(),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            variables=body.template_variables(),
        )
