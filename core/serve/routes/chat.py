"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from octavo.core.serve.chat.reply import ChatReply
from octavo.core.serve.chat.schema import ChatCompletionRequest
from octavo.core.serve.chat.turn import turn_of
from octavo.core.serve.generation import answer
from octavo.core.serve.serving import Serving
from octavo.core.serve.tools.message import ChoiceMessage


def install(app: FastAPI, serving: Serving) -> None:
    """Add the route to an app."""
    engine = serving.engine

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Reply to a conversation."""
        adapter = serving.admit(body)
        turn = await turn_of(serving, body)

        def open_message() -> ChoiceMessage:
            parser = turn.open_parser()
            return ChoiceMessage(parser, parallel=body.allows_several_calls, reasoning=body.shows_reasoning)

        assert engine.tokenizer is not None  # it has just read the chat
        reply = ChatReply(
            body.model,
            engine.tokenizer,
            turn.params,
            open_message,
            echoed=body.echoed(),
            extras=body.extras,
        )
        return await answer(engine, request, body, [turn.token_ids], turn.params, reply, adapter)
