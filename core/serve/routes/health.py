"""What an orchestrator asks: GET /health (is it alive), /ready (send work here), /version.

/health turns red when the engine is gone, or when it has work and no step has ended for `stall_seconds`.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from octavo.core.base.errors import EngineDead
from octavo.core.serve.failures import json_response
from octavo.core.serve.serving import Serving


def install(app: FastAPI, serving: Serving) -> None:
    """Add the routes to an app."""

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine lives and, where it has work, makes progress; else 503."""
        _check(serving)
        return json_response({"status": "ok"})

    @app.get("/ready")
    async def ready(request: Request) -> Response:
        """200 while new requests are let in; 503 while the server drains."""
        if request.app.state.door.is_draining:
            raise EngineDead("the server is shutting down")
        _check(serving)
        return json_response({"status": "ready"})

    @app.get("/version")
    async def version() -> Response:
        """Octavo's version."""
        return json_response({"version": serving.version})


def _check(serving: Serving) -> None:
    """Raise EngineDead when the engine is gone or stands still."""
    engine = serving.engine
    if engine.cause_of_end is not None:
        raise EngineDead(engine.cause_of_end)
    stalled = engine.stalled_seconds()
    if stalled > serving.settings.stall_seconds:
        raise EngineDead(f"the engine has work and ended no step for {stalled:.0f} s")
