"""POST /v1/responses."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from octavo.core.serve.blocks import BlockReader
from octavo.core.serve.chat.turn import read_turn
from octavo.core.serve.generation import answer
from octavo.core.serve.responses.input import read_input
from octavo.core.serve.responses.reply import ResponsesReply
from octavo.core.serve.responses.schema import ResponsesRequest
from octavo.core.serve.responses.tools import chat_tools
from octavo.core.serve.serving import Serving
from octavo.core.serve.wording import worded

WORDS = {
    ".function.": ".",
    "tool_choice.allowed_tools": "tool_choice",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
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
        adapter = serving.adapter_of(body.model)
        body.check()
        tools, choice = chat_tools(body.tools, body.tool_choice)
        chat = read_input(body.instructions, body.input)
        parallel = body.parallel_tool_calls is not False
        with worded(WORDS):
            turn = await read_turn(
                serving,
                chat,
                body.sampling_params(),
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=parallel,
                variables=body.template_variables(),
            )
            assert engine.tokenizer is not None  # it has just read the chat
            reader = BlockReader(turn.open_parser(), parallel=parallel)
            reply = ResponsesReply(body.model, body.echo(), reader, engine.tokenizer, turn.params)
            return await answer(engine, request, body, [turn.token_ids], turn.params, reply, adapter)
