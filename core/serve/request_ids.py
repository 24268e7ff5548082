"""x-request-id on every response: the one the client sent, or a new one. Inside, requests have ids of their own.

Anthropic's clients look for it under request-id, so its API's paths have it there too.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.serve.messages.errors import speaks_messages

HEADER = "x-request-id"
ANTHROPICS_HEADER = "request-id"
_SENT = re.compile(r"[!-~]{1,200}")


class RequestIds:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(HEADER, "")
        request_id = sent if _SENT.fullmatch(sent) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                if speaks_messages(scope["path"]):
                    headers[ANTHROPICS_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
