"""Request bodies: bounded, and strict JSON. NaN, a lone surrogate, or bytes that are not UTF-8 go no further."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from octavo.core.serve.answers import CLIENT_CLOSED_REQUEST

MAX_DEPTH = 128
"""Of arrays and objects in each other: far from where code that follows them down would run out of stack."""

MAX_CONTAINERS = 1 << 20
"""Arrays and objects in one body. Each takes some 100 bytes and its share of the event loop's time: 32 MiB of `{}`
would take a gigabyte, and stop every other request for seconds."""

ALL_BYTES = 512 << 20
"""Of the bodies that are on their way together: a thousand clients that never end theirs must not fill the memory."""

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def _check_structure(data: bytes) -> None:
    """Raise HTTPException for too many arrays and objects, or too deep ones. Every long loop is one of C's."""
    if _num_containers(data) <= MAX_DEPTH:
        return  # whatever stands where
    brackets = _STRINGS.sub(b"", data).translate(None, _OTHERS)
    if _num_containers(brackets) > MAX_CONTAINERS:
        raise HTTPException(400, f"the body has more than {MAX_CONTAINERS} arrays and objects; send fewer")
    depth = max(itertools.accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)
    if depth > MAX_DEPTH:
        raise HTTPException(400, f"the body is nested deeper than {MAX_DEPTH} levels; flatten it")


def _num_containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


class Bodies:
    """Reads an app's bodies, and knows how much of them is on its way.

    Args:
        max_bytes: of one body.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._on_their_way = 0

    async def read(self, request: Request) -> bytes:
        """A request's body. Raises HTTPException 413, 429 when too much is on its way, 499 where its client left."""
        self._check(int(request.headers.get("content-length", 0)))  # a number: the connection's parser saw to that
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async for part in request.stream():
                parts.append(part)
                num_bytes += len(part)
                self._on_their_way += len(part)
                self._check(num_bytes)
        except ClientDisconnect as error:
            raise HTTPException(CLIENT_CLOSED_REQUEST, "the client left in the middle of its body") from error
        finally:
            self._on_their_way -= num_bytes
        return b"".join(parts)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise HTTPException(413, f"the body has more than {self._max_bytes} bytes; send less")
        if self._on_their_way > max(ALL_BYTES, self._max_bytes):
            raise HTTPException(429, "too many bodies are on their way; come back later", {"Retry-After": "1"})


class _JsonRequest(Request):
    """A request whose body is read as this module says."""

    async def body(self) -> bytes:
        """The bytes of the body. Raises HTTPException as `Bodies` does."""
        if not hasattr(self, "_body"):
            bodies: Bodies = self.app.state.bodies
            self._body = await bodies.read(self)
        return self._body

    async def json(self) -> Any:
        """The value in the body. Raises HTTPException 400."""
        data = await self.body()
        _check_structure(data)
        try:
            return msgspec.json.decode(data)
        except RecursionError as error:
            raise HTTPException(400, "the body is nested too deeply") from error
        except msgspec.MsgspecError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error


class JsonRoute(APIRoute):
    """A route whose body is read as this module says."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
            if request.method == "POST" and kind != "application/json" and not kind.endswith("+json"):
                raise HTTPException(400, "the body's Content-Type is missing or another; send application/json")
            if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
                raise HTTPException(415, "the body has a Content-Encoding; send it as it is, uncompressed")
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json
