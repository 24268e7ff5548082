"""HEAD is answered as GET, without its body, which uvicorn leaves out: monitors and load balancers ask so."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class Heads:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
