"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while the server runs.

They read any path that the server can, so they are there only under --allow-lora-updates.
"""

from __future__ import annotations

from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field

from octavo.core.base.errors import InvalidRequest
from octavo.core.serve.failures import json_response
from octavo.core.serve.serving import Serving


class UnloadAdapter(BaseModel):
    """POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True)

    lora_name: str = Field(min_length=1, max_length=256)


class LoadAdapter(UnloadAdapter):
    """POST /v1/load_lora_adapter. A name that is in use gets the new content."""

    lora_path: str = Field(min_length=1, max_length=4096)


def install(app: FastAPI, serving: Serving) -> None:
    """Add the routes to an app."""
    if not serving.settings.allow_lora_updates:
        return
    engine = serving.engine

    @app.post("/v1/load_lora_adapter")
    async def load(body: LoadAdapter) -> Response:
        """Serve an adapter under a name."""
        if body.lora_name in serving.names:
            raise InvalidRequest("lora_name is the model's own name; give another", field="lora_name")
        info = await engine.load_adapter(body.lora_name, body.lora_path)
        return json_response({"object": "lora_adapter", "id": info.name, "rank": info.rank, "digest": info.adapter_id})

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapter) -> Response:
        """Take an adapter's name away."""
        await engine.unload_adapter(body.lora_name)
        return json_response({"object": "lora_adapter", "id": body.lora_name, "deleted": True})
