"""GET /v1/models: what may be asked for."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response

from octavo.core.serve.failures import json_response
from octavo.core.serve.serving import Serving


def install(app: FastAPI, serving: Serving) -> None:
    """Add the routes to an app."""

    @app.get("/v1/models")
    async def models() -> Response:
        """The model under each of its names, and its adapters."""
        cards = [_card(serving, name) for name in serving.names]
        adapters = [
            {**_card(serving, info.name), "root": info.path, "parent": serving.names[0]}
            for info in serving.engine.list_adapters()
        ]
        return json_response({"object": "list", "data": cards + adapters})


def _card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.started,
        "owned_by": "octavo",
        "max_model_len": serving.engine.max_model_len,
    }
