"""What the API says of itself: GET /openapi.json, and GET /docs, a page of it that loads nothing from elsewhere.

    FastAPI's document    requests, from the models of the bodies
    + SUCCESSES           what a 200 holds, by path
    + errors              of every operation, in the form of its API; FastAPI's own 422 is never sent

tests/serve/test_openapi.py holds the server to it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

from octavo.core.serve.messages.errors import speaks_messages

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
LIST: Json = {"type": "array"}
MAYBE_TEXT: Json = {"type": ["string", "null"]}


def _object(**properties: Json) -> Json:
    """An object that has these fields, and maybe others."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


USAGE = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
POOLING_USAGE = _object(prompt_tokens=COUNT, total_tokens=COUNT)
CHOICE = {"index": COUNT, "logprobs": {"type": ["object", "null"]}, "finish_reason": MAYBE_TEXT}
MODEL = _object(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, max_model_len=COUNT)
RENDERED = _object(model=TEXT, token_ids=_list(COUNT), sampling_params={"type": "object"}, priority={"type": "integer"})
ADAPTER = _object(object={"const": "lora_adapter"}, id=TEXT)


def _reply(kind: str, choice: Json) -> Json:
    return _object(id=TEXT, object={"const": kind}, created=COUNT, model=TEXT, choices=_list(choice), usage=USAGE)


SUCCESSES: Mapping[str, Json] = {
    "/v1/completions": _reply("text_completion", _object(text=TEXT, **CHOICE)),
    "/v1/chat/completions": _reply(
        "chat.completion", _object(message=_object(role={"const": "assistant"}, content=MAYBE_TEXT), **CHOICE)
    ),
    "/v1/responses": _object(
        id=TEXT, object={"const": "response"}, status={"enum": ["completed", "incomplete", "failed"]}, model=TEXT,
        output=_list(_object(type=TEXT)),
    ),
    "/v1/messages": _object(
        id=TEXT, type={"const": "message"}, role={"const": "assistant"}, model=TEXT, content=_list(_object(type=TEXT)),
        stop_reason=MAYBE_TEXT, usage=_object(input_tokens=COUNT, output_tokens=COUNT),
    ),
    "/v1/messages/count_tokens": _object(input_tokens=COUNT),
    "/v1/completions/render": _list(RENDERED),
    "/v1/chat/completions/render": RENDERED,
    "/tokenize": _object(count=COUNT, max_model_len=COUNT, tokens=_list(COUNT), token_strs={"type": ["array", "null"]}),
    "/detokenize": _object(prompt=TEXT),
    "/v1/embeddings": _object(
        object={"const": "list"}, model=TEXT, usage=POOLING_USAGE,
        data=_list(_object(index=COUNT, object={"const": "embedding"}, embedding={"type": ["array", "string"]})),
    ),
    "/v1/classify": _object(data=_list(_object(index=COUNT, label=TEXT, probs=LIST)), usage=POOLING_USAGE),
    "/v1/score": _object(data=_list(_object(index=COUNT, score={"type": "number"})), usage=POOLING_USAGE),
    "/v1/rerank": _object(
        results=_list(_object(index=COUNT, relevance_score={"type": "number"})), usage=POOLING_USAGE
    ),
    "/v1/models": _object(object={"const": "list"}, data=_list(MODEL)),
    "/v1/models/{model_id}": MODEL,
    "/v1/load_lora_adapter": ADAPTER,
    "/v1/unload_lora_adapter": ADAPTER,
    "/health": _object(status=TEXT),
    "/ready": _object(status=TEXT),
    "/version": _object(version=TEXT),
    "/engine/state": _object(num_running=COUNT, num_waiting=COUNT, kv={"type": "object"}),
}  # fmt: skip
"""Path -> what a 200 holds; what is not here is no JSON."""

PLAIN: Mapping[str, str] = {"/metrics": "text/plain", "/": "text/html"}

ERROR = _object(error=_object(message=TEXT, type=TEXT, param=MAYBE_TEXT, code=MAYBE_TEXT))
MESSAGES_ERROR = _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT))

ERRORS: Mapping[str, str] = {
    "400": "the request is wrong, or asks for what can't be done; the message names the field",
    "401": "no valid key",
    "404": "no such model or path",
    "408": "the request came too slowly",
    "413": "the body is too large",
    "415": "the body is compressed",
    "429": "too many requests wait; Retry-After says when to come back",
    "500": "the request or the server failed",
    "503": "the engine is gone, or the server shuts down",
}
_ONLY_WITH_A_BODY = ("400", "408", "413", "415", "429")


def install(app: FastAPI) -> None:
    """Make an app, which has all its routes, describe itself so."""
    written: list[Json] = []

    def document() -> Json:
        if not written:
            written.append(_document(app))
        return written[0]

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI's documentation has it

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """The document as a page."""
        return Response(_page(document()), media_type="text/html", headers={"Content-Security-Policy": POLICY})


def _document(app: FastAPI) -> Json:
    described = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {"Error": ERROR, "MessagesError": MESSAGES_ERROR}
    for path, operations in described["paths"].items():
        error = {"$ref": f"#/components/schemas/{'MessagesError' if speaks_messages(path) else 'Error'}"}
        for operation in operations.values():
            has_body = "requestBody" in operation
            operation["responses"] = {
                "200": {"description": "the reply", "content": _success(path, _streams(operation, schemas))},
                **{
                    status: {"description": words, "content": {"application/json": {"schema": error}}}
                    for status, words in ERRORS.items()
                    if has_body or status not in _ONLY_WITH_A_BODY
                },
            }
    return described


def _success(path: str, streams: bool) -> Json:
    if path not in SUCCESSES:
        return {PLAIN.get(path, "text/plain"): {"schema": TEXT}}
    content: Json = {"application/json": {"schema": SUCCESSES[path]}}
    return content | ({"text/event-stream": {"schema": {}}} if streams else {})


def _streams(operation: Json, schemas: Mapping[str, Json]) -> bool:
    return "stream" in _body(operation, schemas).get("properties", {})


def _body(operation: Json, schemas: Mapping[str, Json]) -> Json:
    """The schema of an operation's body; empty where it has none."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return schemas.get(name, {})


_STYLE = """
:root{color-scheme:light dark;font:16px/1.5 system-ui,sans-serif}body{max-width:60rem;margin:2rem auto;padding:0 1rem}
code{font-family:ui-monospace,monospace}summary{cursor:pointer;padding:.3rem 0}
td{padding:.1rem 1rem .1rem 0;vertical-align:top}
"""
_HEAD = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Octavo's API</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>
<h1>Octavo's API</h1><p>The whole description is <a href="openapi.json">openapi.json</a>.</p>"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src 'sha256-{_STYLE_HASH}'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""What the page of the document may do: look as it does."""


def _page(document: Json) -> str:
    return _HEAD + "".join(_sections(document)) + "</html>"


def _sections(document: Json) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<details><summary><code>{method.upper()} {escape(path)}</code> "
            yield f"{escape(operation.get('description', ''))}</summary><table>"
            body = _body(operation, schemas)
            for name, schema in body.get("properties", {}).items():
                needed = " (required)" if name in body.get("required", ()) else ""
                yield f"<tr><td><code>{escape(name)}</code>{needed}<td>{escape(_type_of(schema))}"
            yield "</table><p>Answers: "
            yield ", ".join(
                f"{status} {escape(each['description'])}" for status, each in operation["responses"].items()
            )
            yield "</p></details>"


def _type_of(schema: Json) -> str:
    """A schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(map(_type_of, schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "items" in schema:
        return f"list of {_type_of(schema['items'])}"
    return str(schema.get("type", "any"))
