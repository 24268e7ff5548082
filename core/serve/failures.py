"""Errors as OpenAI shapes them: {"error": {"message", "type", "param", "code"}}, no traceback, no text of the input.

Paths of Anthropic's API get them in its own form (messages/errors.py), whoever refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from octavo.core.base.errors import EngineDead, ModelNotFound, OctavoError, UserError
from octavo.core.serve.messages.errors import messages_error, speaks_messages

MAX_MESSAGE_CHARS = 1000
MAX_FIELD_CHARS = 100

logger = logging.getLogger(__name__)


def error_body(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON body of an error."""
    shown = None if field is None else field[:MAX_FIELD_CHARS]
    return {"error": {"message": message[:MAX_MESSAGE_CHARS], "type": kind, "param": shown, "code": code}}


def body_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error. One that nobody meant is logged, with its traceback."""
    if isinstance(error, ModelNotFound):
        return 404, error_body(str(error), "invalid_request_error", "model", "model_not_found")
    if isinstance(error, UserError):
        return 400, error_body(str(error), "invalid_request_error", error.field)
    if isinstance(error, EngineDead):
        return 503, error_body(str(error), "service_unavailable")
    if isinstance(error, OctavoError):
        return 500, error_body(str(error), "server_error")
    logger.error("a request failed", exc_info=error)
    return 500, error_body("the server failed; its log has the cause", "server_error")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of strict JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(
    path: str, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    """An error's response, in the form of the API that the request's path belongs to.

    Args:
        body: in OpenAI's form.
    """
    return json_response(messages_error(status, body) if speaks_messages(path) else body, status, headers)


def install(app: FastAPI) -> None:
    """Make the app answer every error in this shape."""

    @app.exception_handler(OctavoError)
    async def on_octavo_error(request: Request, error: OctavoError) -> Response:
        return error_response(request.url.path, *body_of(error))

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(_declared(request, first["loc"]))
        message = f"{place or 'body'}: {first['msg']}"
        return error_response(request.url.path, 400, error_body(message, "invalid_request_error", place or None))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        kind = "rate_limit_exceeded" if error.status_code == 429 else "invalid_request_error"
        body = error_body(str(error.detail), kind)
        return error_response(request.url.path, error.status_code, body, error.headers)

    @app.exception_handler(Exception)
    async def on_any_error(request: Request, _: Exception) -> Response:  # whoever called it logs the traceback
        body = error_body("the server failed; its log has the cause", "server_error")
        return error_response(request.url.path, 500, body)


def _declared(request: Request, location: Sequence[int | str]) -> Iterator[str]:
    """The part of an error's location that the body's model declares; behind it may stand keys that a client wrote."""
    route = request.scope.get("route")
    body = route.body_field if isinstance(route, APIRoute) else None
    model: Any = None if body is None else body.field_info.annotation
    for part in location[1:]:  # behind "body"
        if isinstance(part, int):
            yield str(part)
        elif (field := getattr(model, "model_fields", {}).get(part)) is not None:
            yield part
            model = next((each for each in (field.annotation, *get_args(field.annotation)) if _is_model(each)), None)
        else:
            return


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
