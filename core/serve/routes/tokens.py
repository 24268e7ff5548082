"""POST /tokenize, /detokenize; /v1/completions/render, /v1/chat/completions/render: requests as the engine sees them.

Nothing is run. A rendered request has gone through every check but those of the KV cache's size and of the room that
`max_tokens` needs, which only the engine knows.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from fastapi import FastAPI, Response

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.lora import LoRARequest
from octavo.core.base.params import SamplingParams
from octavo.core.base.structured import FIELD
from octavo.core.engine.prompts import RequestOptions
from octavo.core.engine.wire import EngineRequest
from octavo.core.serve.answers import headers_of
from octavo.core.serve.chat.schema import ChatCompletionRequest
from octavo.core.serve.chat.turn import read_turn, turn_of
from octavo.core.serve.completions.prompts import prompts_of
from octavo.core.serve.completions.schema import CompletionRequest
from octavo.core.serve.failures import json_response
from octavo.core.serve.schema import GenerationRequest
from octavo.core.serve.serving import Serving
from octavo.core.serve.token_schema import DetokenizeRequest, TokenizeRequest
from octavo.core.serve.wording import worded
from octavo.core.text.tokenizer import Tokenizer

Json = dict[str, Any]


def install(app: FastAPI, serving: Serving) -> None:
    """Add the routes to an app."""
    engine = serving.engine

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text or of a conversation."""
        _check_model(serving, body)
        body.check()
        token_ids = await _read(serving, body)
        told: Json = {"count": len(token_ids), "max_model_len": engine.max_model_len, "tokens": token_ids}
        tokenizer = _tokenizer(serving)
        told["token_strs"] = list(map(tokenizer.token_text, token_ids)) if body.return_token_strs else None
        return json_response(told, headers=headers_of(body.ignored_fields()))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        _check_model(serving, body)
        tokenizer = _tokenizer(serving)
        if body.tokens is None or any(not 0 <= token_id < tokenizer.vocab_size for token_id in body.tokens):
            raise InvalidRequest(f"tokens must be ids in the vocabulary 0..{tokenizer.vocab_size - 1}", field="tokens")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text}, headers=headers_of(body.ignored_fields()))

    @app.post("/v1/completions/render")
    async def render_completions(body: CompletionRequest) -> Response:
        """What a completion would ask of the engine, for each of its prompts."""
        adapter = serving.admit(body)
        body.refuse_unsupported()
        params, prompts = body.sampling_params(), await prompts_of(engine, body)
        with worded({FIELD: body.form_field}):
            requests = await engine.read_prompts(prompts, params, **_options(body, adapter))
        return json_response([_shown(body, each) for each in requests], headers=headers_of(body.ignored_fields()))

    @app.post("/v1/chat/completions/render")
    async def render_chat(body: ChatCompletionRequest) -> Response:
        """What a chat completion would ask of the engine."""
        adapter = serving.admit(body)
        turn = await turn_of(serving, body)
        (request,) = await engine.read_prompts([turn.token_ids], turn.params, **_options(body, adapter))
        return json_response(_shown(body, request), headers=headers_of(body.ignored_fields()))


def _check_model(serving: Serving, body: TokenizeRequest | DetokenizeRequest) -> None:
    """The model need not be named; an adapter has its model's tokens."""
    if body.model is not None:
        serving.adapter_of(body.model)
    serving.check_fields(body)


def _tokenizer(serving: Serving) -> Tokenizer:
    if serving.engine.tokenizer is None:
        raise InvalidRequest("this model has no tokenizer", field="model")
    return serving.engine.tokenizer


async def _read(serving: Serving, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        return await serving.engine.read_text(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    turn = await read_turn(
        serving,
        body.messages or [],
        SamplingParams(),
        tools=body.tools,
        add_generation_prompt=body.begins_turn,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        variables=body.chat_template_kwargs,
    )
    return turn.token_ids


def _options(body: GenerationRequest, adapter: LoRARequest | None) -> RequestOptions:
    return {"priority": body.priority, "cache_salt": body.cache_salt, "lora_request": adapter}


def _shown(body: GenerationRequest, request: EngineRequest) -> Json:
    params = {
        field.name: getattr(request.params, field.name)
        for field in dataclasses.fields(request.params)
        if field.name != "logits_processors"  # callables, which no request over HTTP has
    }
    return {
        "model": body.model,
        "token_ids": request.prompt_token_ids,
        "sampling_params": params,
        "eos_token_ids": request.eos_token_ids,
        "stream": bool(body.stream),
        "priority": request.priority,
        "cache_salt": request.cache_salt,
    }
