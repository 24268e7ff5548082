"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from octavo.core.serve.chat.reply import ChatReply
from octavo.core.serve.chat.schema import ChatCompletionRequest
from octavo.core.serve.generation import answer
from octavo.core.serve.serving import Serving


def install(app: FastAPI, serving: Serving) -> None:
    """Add the route to an app."""
    engine = serving.engine

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Reply to a conversation."""
        adapter = serving.adapter_of(body.model)
        body.refuse_unsupported()
        params = body.sampling_params()
        token_ids = await engine.read_chat(
            body.messages, add_generation_prompt=body.add_generation_prompt, variables=body.chat_template_kwargs
        )
        assert engine.tokenizer is not None  # it has just read the chat
        reply = ChatReply(body.model, engine.tokenizer, params, include_usage=body.includes_usage)
        return await answer(engine, request, body, [token_ids], params, reply, adapter)
