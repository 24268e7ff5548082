"""Errors as OpenAI shapes them: {"error": {"message", "type", "param", "code"}}, no traceback, no input in it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from octavo.core.base.errors import EngineDead, ModelNotFound, OctavoError, UserError

MAX_MESSAGE_CHARS = 1000


def error_body(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON body of an error."""
    return {"error": {"message": message[:MAX_MESSAGE_CHARS], "type": kind, "param": field, "code": code}}


def body_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error."""
    if isinstance(error, ModelNotFound):
        return 404, error_body(str(error), "invalid_request_error", "model", "model_not_found")
    if isinstance(error, UserError):
        return 400, error_body(str(error), "invalid_request_error", error.field)
    if isinstance(error, EngineDead):
        return 503, error_body(str(error), "service_unavailable")
    if isinstance(error, OctavoError):
        return 500, error_body(str(error), "server_error")
    return 500, error_body("the server failed; its log has the cause", "server_error")


def install(app: FastAPI) -> None:
    """Make the app answer every error in this shape."""

    @app.exception_handler(OctavoError)
    async def on_octavo_error(_: Request, error: OctavoError) -> JSONResponse:
        status, body = body_of(error)
        return JSONResponse(body, status)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse(
            error_body(f"{place or 'body'}: {first['msg']}", "invalid_request_error", place or None), 400
        )

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code)
