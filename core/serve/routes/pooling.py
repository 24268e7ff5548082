"""The HTTP routes of models that give vectors.

POST /v1/embeddings     input -> one vector each, as numbers or as base64 of fp32, little-endian
POST /v1/classify       input -> the label's name and the probabilities
POST /v1/score          text_1, text_2 -> one score for each pair
POST /v1/rerank         query, documents -> the documents, best first
"""

from __future__ import annotations

import base64
import sys
import time
import uuid
from array import array
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from octavo.core.engine.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from octavo.core.serve.answers import CLIENT_CLOSED_REQUEST, headers_of
from octavo.core.serve.failures import json_response
from octavo.core.serve.metrics.watch import report_of
from octavo.core.serve.pooling_schema import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from octavo.core.serve.serving import Serving
from octavo.core.serve.streams import ClientGone, unless_gone

Json = dict[str, Any]


def install(app: FastAPI, serving: Serving) -> None:
    """Add the routes to an app."""
    engine = serving.engine

    def check(body: PoolingRequest) -> None:
        serving.check_model(body.model)
        serving.check_fields(body)
        body.refuse_unsupported()

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """One vector for each input."""
        check(body)
        work = engine.embed(
            body.input,
            dimensions=body.dimensions,
            normalize=body.normalize,
            prompt_name=body.prompt_name,
            priority=body.priority,
            report=report_of(request),
        )
        as_base64 = body.encoding_format == "base64"
        return await _answer(request, body, work, lambda outputs: _embeddings(outputs, body.model, as_base64))

    @app.post("/v1/classify")
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """The labels' probabilities for each input."""
        check(body)
        work = engine.classify(
            body.input, use_activation=body.use_activation, priority=body.priority, report=report_of(request)
        )
        return await _answer(request, body, work, lambda outputs: _classes(outputs, body.model))

    @app.post("/v1/score")
    async def score(body: ScoreRequest, request: Request) -> Response:
        """One score for each pair of texts."""
        check(body)
        work = engine.score(
            body.text_1,
            body.text_2,
            use_activation=body.use_activation,
            priority=body.priority,
            report=report_of(request),
        )
        return await _answer(request, body, work, lambda outputs: _scores(outputs, body.model))

    @app.post("/v1/rerank")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """The documents, best first."""
        check(body)
        work = engine.score(
            body.query,
            body.documents,
            use_activation=body.use_activation,
            priority=body.priority,
            report=report_of(request),
        )
        return await _answer(request, body, work, lambda outputs: _ranking(outputs, body.model, body))


async def _answer(
    request: Request,
    body: PoolingRequest,
    work: Coroutine[Any, Any, list[PoolingRequestOutput[Any]]],
    reply: Callable[[list[PoolingRequestOutput[Any]]], Json],
) -> Response:
    try:
        outputs = await unless_gone(request.receive, work)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return json_response(reply(outputs), headers=headers_of(body.ignored_fields()))


def _embeddings(outputs: Sequence[EmbeddingRequestOutput], model: str, as_base64: bool) -> Json:
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _base64(output.outputs.embedding) if as_base64 else output.outputs.embedding,
        }
        for index, output in enumerate(outputs)
    ]
    return {"object": "list", "data": data, "model": model, "usage": _usage(outputs)}


def _base64(vector: list[float]) -> str:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")


def _classes(outputs: Sequence[ClassificationRequestOutput], model: str) -> Json:
    data = []
    for index, output in enumerate(outputs):
        probs = output.outputs.probs
        best = max(range(len(probs)), key=probs.__getitem__)
        label = output.outputs.labels[best]
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
    return {**_head("classify", model), "data": data, "usage": _usage(outputs)}


def _scores(outputs: Sequence[ScoringRequestOutput], model: str) -> Json:
    data = [{"index": index, "object": "score", "score": output.outputs.score} for index, output in enumerate(outputs)]
    return {**_head("score", model), "data": data, "usage": _usage(outputs)}


def _ranking(outputs: Sequence[ScoringRequestOutput], model: str, body: RerankRequest) -> Json:
    """Ties keep the documents' order."""
    ranked = sorted(enumerate(outputs), key=lambda item: -item[1].outputs.score)
    results: list[Json] = []
    for index, output in ranked[: len(ranked) if body.top_n is None else body.top_n]:
        document = {"document": {"text": body.documents[index]}} if body.return_documents else {}
        results.append({"index": index, **document, "relevance_score": output.outputs.score})
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": model, "results": results, "usage": _usage(outputs)}


def _head(prefix: str, model: str) -> Json:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}


def _usage(outputs: Iterable[PoolingRequestOutput[Any]]) -> Json:
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
