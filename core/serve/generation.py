"""A checked generating request is run, and answered as one body or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fastapi import Request, Response

from octavo.core.base.lora import LoRARequest
from octavo.core.base.params import SamplingParams
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.engine.prompts import Prompt, RequestOptions
from octavo.core.serve.answers import CLIENT_CLOSED_REQUEST, headers_of
from octavo.core.serve.failures import json_response
from octavo.core.serve.metrics.watch import report_of
from octavo.core.serve.replies import Reply, check_choices
from octavo.core.serve.streams import ClientGone, EventStream, open_stream, unless_gone


class GeneratingBody(Protocol):
    """What the bodies of all endpoints that generate tell about how to run."""

    stream: bool | None
    priority: int
    cache_salt: str | None

    def ignored_fields(self) -> list[str]:
        """Fields in the body that nobody reads."""


async def answer(
    engine: AsyncEngine,
    request: Request,
    body: GeneratingBody,
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
        "report": report_of(request),
    }
    try:
        if body.stream:
            pieces = engine.generate_many(prompts, params, **options)
            events = await open_stream(request.receive, pieces, reply)
            return EventStream(events, headers)
        outputs = await unless_gone(request.receive, engine.complete_many(prompts, params, **options))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    for output in outputs:
        check_choices(output)
    return json_response(reply.body(outputs), headers=headers)
