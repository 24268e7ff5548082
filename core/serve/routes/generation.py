"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request, Response

from octavo.core.base.lora import LoRARequest
from octavo.core.base.params import SamplingParams
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.engine.prompts import Prompt, RequestOptions
from octavo.core.serve.answers import CLIENT_CLOSED_REQUEST, headers_of
from octavo.core.serve.failures import json_response
from octavo.core.serve.replies import ChatReply, CompletionReply, Reply, check_choices
from octavo.core.serve.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from octavo.core.serve.serving import Serving
from octavo.core.serve.streams import ClientGone, EventStream, open_stream, unless_gone


def install(app: FastAPI, serving: Serving) -> None:
    """Add the routes to an app."""
    engine = serving.engine

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        adapter = serving.adapter_of(body.model)
        body.refuse_unsupported()
        params = body.sampling_params()
        reply = CompletionReply(body.model, engine.tokenizer, params, echo=bool(body.echo))
        return await _answer(engine, request, body, body.prompt, params, reply, adapter)

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
        reply = ChatReply(body.model, engine.tokenizer, params)
        return await _answer(engine, request, body, [token_ids], params, reply, adapter)


async def _answer(
    engine: AsyncEngine,
    request: Request,
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    reply: Reply,
    adapter: LoRARequest | None,
) -> Response:
    """Run the prompts and answer as one body or as a stream."""
    headers = headers_of(body.ignored_fields())
    options: RequestOptions = {
        "priority": body.priority,
        "cache_salt": body.cache_salt,
        "lora_request": adapter,
    }
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
