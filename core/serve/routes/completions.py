"""POST /v1/completions."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from octavo.core.base.structured import FIELD
from octavo.core.serve.completions.prompts import prompts_of
from octavo.core.serve.completions.reply import CompletionReply
from octavo.core.serve.completions.schema import CompletionRequest
from octavo.core.serve.generation import answer
from octavo.core.serve.serving import Serving
from octavo.core.serve.wording import worded


def install(app: FastAPI, serving: Serving) -> None:
    """Add the route to an app."""
    engine = serving.engine

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        adapter = serving.admit(body)
        body.refuse_unsupported()
        params = body.sampling_params()
        prompts = await prompts_of(engine, body)
        reply = CompletionReply(body.model, engine.tokenizer, body)
        with worded({FIELD: body.form_field}):
            return await answer(engine, request, body, prompts, params, reply, adapter)
