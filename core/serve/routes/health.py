"""GET /health: whether the engine serves."""

from __future__ import annotations

from fastapi import FastAPI, Response

from octavo.core.base.errors import EngineDead
from octavo.core.serve.failures import json_response
from octavo.core.serve.serving import Serving


def install(app: FastAPI, serving: Serving) -> None:
    """Add the routes to an app."""

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine serves."""
        if serving.engine.cause_of_end is not None:
            raise EngineDead(serving.engine.cause_of_end)
        return json_response({"status": "ok"})
