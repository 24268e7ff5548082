"""The HTTP routes: bytes in, a checked request to the engine, JSON or server-sent events out.

POST /v1/completions        POST /v1/chat/completions
GET  /v1/models             GET  /health
and those of models that give vectors: pooling_api.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from octavo.core.base.errors import EngineDead, ModelNotFound
from octavo.core.base.params import SamplingParams
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.engine.prompts import Prompt
from octavo.core.serve import failures, pooling_api
from octavo.core.serve.answers import CLIENT_CLOSED_REQUEST, headers_of
from octavo.core.serve.body import JsonRoute
from octavo.core.serve.failures import json_response
from octavo.core.serve.replies import ChatReply, CompletionReply, Reply, check_choices
from octavo.core.serve.request_ids import RequestIds
from octavo.core.serve.schema import ChatCompletionRequest, CheckedRequest, CompletionRequest, GenerationRequest
from octavo.core.serve.streams import ClientGone, EventStream, open_stream, unless_gone


def create_app(engine: AsyncEngine, served_name: str, version: str) -> FastAPI:
    """The app that serves one started engine under one name."""
    app = FastAPI(title="Octavo", version=version)
    app.router.route_class = JsonRoute
    app.add_middleware(RequestIds)
    failures.install(app)
    started = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine serves."""
        if engine.cause_of_end is not None:
            raise EngineDead(engine.cause_of_end)
        return json_response({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model there is."""
        model = {
            "id": served_name,
            "object": "model",
            "created": started,
            "owned_by": "octavo",
            "max_model_len": engine.max_model_len,
        }
        return json_response({"object": "list", "data": [model]})

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        _check(body, served_name)
        params = body.sampling_params()
        reply = CompletionReply(served_name, engine.tokenizer, params, echo=bool(body.echo))
        return await _answer(engine, request, body, body.prompt, params, reply)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Reply to a conversation."""
        _check(body, served_name)
        params = body.sampling_params()
        token_ids = await engine.read_chat(
            body.messages, add_generation_prompt=body.add_generation_prompt, variables=body.chat_template_kwargs
        )
        assert engine.tokenizer is not None  # it has just read the chat
        reply = ChatReply(served_name, engine.tokenizer, params)
        return await _answer(engine, request, body, [token_ids], params, reply)

    pooling_api.install(app, engine, served_name, lambda body: _check(body, served_name))
    return app


def _check(body: CheckedRequest, served_name: str) -> None:
    if body.model != served_name:
        raise ModelNotFound(f"model {body.model[:100]!r} is not served here; ask for {served_name!r}", field="model")
    body.refuse_unsupported()


async def _answer(
    engine: AsyncEngine,
    request: Request,
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    reply: Reply,
) -> Response:
    """Run the prompts and answer as one body or as a stream."""
    headers = headers_of(body.ignored_fields())
    options: dict[str, Any] = {"priority": body.priority, "cache_salt": body.cache_salt}
    try:
        if body.stream:
            pieces = engine.generate_many(prompts, params, **options)
            events = await open_stream(request.receive, pieces, reply, include_usage=body.includes_usage)
            return EventStream(events, headers)
        outputs = await unless_gone(request.receive, engine.complete_many(prompts, params, **options))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    for output in outputs:
        check_choices(output)
    return json_response(reply.body(outputs), headers=headers)
