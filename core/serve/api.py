"""The HTTP routes: bytes in, a checked request to the engine, JSON or server-sent events out.

POST /v1/completions        POST /v1/chat/completions
GET  /v1/models             GET  /health
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from octavo.core.base.errors import EngineDead, InvalidRequest, ModelNotFound
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.engine.prompts import Prompt
from octavo.core.serve import failures
from octavo.core.serve.replies import ChatReply, CompletionReply, ReplyHead
from octavo.core.serve.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from octavo.core.serve.streams import ClientGone, open_stream, run_to_end

CLIENT_CLOSED_REQUEST = 499
IGNORED_HEADER = "x-octavo-ignored-fields"


def create_app(engine: AsyncEngine, served_name: str, version: str) -> FastAPI:
    """The app that serves one started engine under one name."""
    app = FastAPI(title="Octavo", version=version)
    failures.install(app)
    started = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine serves."""
        if engine.died is not None:
            raise EngineDead(str(engine.died))
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model there is."""
        model = {
            "id": served_name,
            "object": "model",
            "created": started,
            "owned_by": "octavo",
            "max_model_len": engine.max_model_len,
        }
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        _check_model(body, served_name)
        body.refuse_unsupported(*CompletionRequest.UNSUPPORTED)
        params = body.sampling_params()
        reply = CompletionReply(ReplyHead("cmpl", served_name), engine.tokenizer, params.n, echo=body.echo)
        return await _answer(engine, request, body, body.prompts(), reply, CompletionRequest.UNSUPPORTED)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Reply to a conversation."""
        _check_model(body, served_name)
        body.refuse_unsupported(*ChatCompletionRequest.UNSUPPORTED)
        if engine.tokenizer is None:
            raise InvalidRequest("messages needs a tokenizer, and this model has none", field="messages")
        token_ids = await engine.read_chat(
            body.messages, add_generation_prompt=body.add_generation_prompt, variables=body.chat_template_kwargs
        )
        reply = ChatReply(ReplyHead("chatcmpl", served_name), engine.tokenizer, body.top_logprobs or 0)
        return await _answer(engine, request, body, [token_ids], reply, ChatCompletionRequest.UNSUPPORTED)

    return app


async def _answer(
    engine: AsyncEngine,
    request: Request,
    body: CompletionRequest | ChatCompletionRequest,
    prompts: Sequence[Prompt],
    reply: CompletionReply | ChatReply,
    known: Sequence[str],
) -> Response:
    """Run the prompts and answer as one body or as a stream."""
    ignored = body.ignored_fields(*known)
    headers = {IGNORED_HEADER: ",".join(ignored)[:1000].encode("ascii", "replace").decode()} if ignored else {}
    params = body.sampling_params()
    options: dict[str, Any] = {"priority": body.priority, "cache_salt": body.cache_salt}
    if body.stream:
        streams = [engine.generate(prompt, params, **options) for prompt in prompts]
        events = await open_stream(streams, reply, include_usage=body.includes_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    try:
        outputs = await run_to_end(request, [engine.complete(prompt, params, **options) for prompt in prompts])
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(reply.body(outputs), headers=headers)


def _check_model(body: GenerationRequest, served_name: str) -> None:
    if body.model != served_name:
        raise ModelNotFound(f"model {body.model[:100]!r} is not served here; ask for {served_name!r}", field="model")
