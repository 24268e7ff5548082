"""Who may come in, before a body is read: the server's door, as ASGI middleware.

    draining?   503, Retry-After      new requests only; those inside go on
    key?        401                   on every path but OPEN_PATHS and the page's files, whose calls bring the key
    queue full? 429, Retry-After      for requests that would wait for the engine

The door owns one thing that changes: whether the server is draining. Who has a key, Keys knows (keys.py).
"""

from __future__ import annotations

from fastapi import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.core.base.config import ServeConfig
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.serve.failures import error_body, error_response
from octavo.core.serve.keys import Keys
from octavo.core.serve.page import PATHS as PAGE_PATHS

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Paths that need no key and stay open while the server drains, so that an orchestrator can probe and scrape them.

Scrapers send no key by default, and what /metrics tells (load, names of model and adapters) is meant for whoever
reaches the port; a proxy in front can hide it.
"""

RETRY_SECONDS = 1


class Door:
    """Lets requests in or answers them at once.

    Args:
        app: what stands behind it.
        engine: whose queue is watched.
        settings: keys and limits.

    Raises:
        ConfigError: see Keys.
    """

    def __init__(self, app: ASGIApp, engine: AsyncEngine, settings: ServeConfig) -> None:
        self._app = app
        self._engine = engine
        self._max_queued = settings.max_queued_requests
        self._open_paths = OPEN_PATHS | (PAGE_PATHS.keys() if settings.page else frozenset())
        self._keys = Keys(settings)
        self.is_draining = False

    def drain(self) -> None:
        """Let no new request in from now on."""
        self.is_draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        path = scope["path"]
        if path in self._open_paths:
            return None
        if self.is_draining:
            message = "the server is shutting down; ask another one"
            return _refuse(path, 503, message, "service_unavailable", retry=True)
        if not self._keys.open_for(Headers(scope=scope)):
            message = "give a valid API key in the header Authorization: Bearer KEY"
            return _refuse(path, 401, message, "invalid_request_error", code="invalid_api_key")
        is_work = scope["method"] == "POST" and path.startswith("/v1/")
        if is_work and self._engine.num_waiting >= self._max_queued:
            message = "too many requests are waiting; come back later"
            return _refuse(path, 429, message, "rate_limit_exceeded", retry=True)
        return None


def _refuse(
    path: str, status: int, message: str, kind: str, *, code: str | None = None, retry: bool = False
) -> Response:
    headers = {"Retry-After": str(RETRY_SECONDS)} if retry else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return error_response(path, status, error_body(message, kind, code=code), headers)
