"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while the server runs.

They read any path that the server can, so they are there only under --allow-lora-updates. What the engine says of an
adapter quotes its name and path, for those who call it from Python; a reply names the field in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fastapi import FastAPI, Response
from pydantic import Field

from octavo.core.base.errors import InvalidRequest, UserError
from octavo.core.lora.adapter import directory_of
from octavo.core.serve.answers import headers_of
from octavo.core.serve.failures import json_response
from octavo.core.serve.schema import CheckedBody
from octavo.core.serve.serving import Serving


class UnloadAdapter(CheckedBody):
    """POST /v1/unload_lora_adapter."""

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
        serving.check_fields(body)
        if body.lora_name in serving.names:
            raise InvalidRequest("lora_name is the model's own name; give another", field="lora_name")
        with _naming({str(directory_of(body.lora_path)): "lora_path"}):
            info = await engine.load_adapter(body.lora_name, body.lora_path)
        told = {"object": "lora_adapter", "id": info.name, "rank": info.rank, "digest": info.adapter_id}
        return json_response(told, headers=headers_of(body.ignored_fields()))

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapter) -> Response:
        """Take an adapter's name away."""
        serving.check_fields(body)
        with _naming({repr(body.lora_name[:100]): "of this lora_name"}):
            await engine.unload_adapter(body.lora_name)
        told = {"object": "lora_adapter", "id": body.lora_name, "deleted": True}
        return json_response(told, headers=headers_of(body.ignored_fields()))


@contextmanager
def _naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Raise what is raised inside with a field's name for each text of the client."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for text, field in fields.items():
            message = message.replace(text, field) if len(text) > 1 else message  # "/" is in every path
        raise type(error)(message, field=error.field) from None
