"""GET /v1/models and /v1/models/{id}: what may be asked for."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response

from octavo.core.base.errors import ModelNotFound
from octavo.core.serve.failures import json_response
from octavo.core.serve.serving import Serving


def install(app: FastAPI, serving: Serving) -> None:
    """Add the routes to an app."""

    @app.get("/v1/models")
    async def models() -> Response:
        """The model under each of its names, and its adapters."""
        return json_response({"object": "list", "data": _cards(serving)})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """One of them."""
        found = next((card for card in _cards(serving) if card["id"] == model_id), None)
        if found is None:
            raise ModelNotFound("this model is not served here; GET /v1/models lists those that are", field="model")
        return json_response(found)


def _cards(serving: Serving) -> list[dict[str, Any]]:
    adapters = [
        {**_card(serving, info.name), "root": info.path, "parent": serving.names[0]}
        for info in serving.engine.list_adapters()
    ]
    return [_card(serving, name) for name in serving.names] + adapters


def _card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.started,
        "owned_by": "octavo",
        "max_model_len": serving.engine.max_model_len,
    }
