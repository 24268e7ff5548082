"""Every request as it looks from outside: the outermost ASGI middleware.

    request ──► Watch ──► RequestIds ──► CORS ──► Door ──► routes
                  │         Exchange: what was asked, answered and computed, and how long that took
                  └── when it is over ──► counts, the access log, traces

The route that runs something hands `report_of(request)` to the engine, which fills it in. Watch owns the counts;
whoever else wants to hear of a request is a listener, and one that fails is logged and hurts no request.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.engine.observer import RequestReport
from octavo.core.serve.answers import CLIENT_CLOSED_REQUEST
from octavo.core.serve.door import OPEN_PATHS
from octavo.core.serve.page import PATHS as PAGE_PATHS
from octavo.core.serve.request_ids import HEADER

OTHER = "other"
"""The path that stands for all that no route has: strangers' paths must not become labels."""

LOOKS = OPEN_PATHS | PAGE_PATHS.keys() | {"/engine/state"}
"""Paths of probes, scrapes and the page: they come often, and nothing runs for them."""

_REPORT = "octavo.report"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Exchange:
    """One request and its answer.

    Attributes:
        method: GET, POST, or what else it says.
        path: of its route, or OTHER.
        headers: of the request, to be read in confidence: there are keys in them.
        began_ns, ended_ns: Unix times.
        status: of the answer; 499 when the client left before it had one.
        request_id: as the answer's header names it; empty where there is none.
        seconds: from its coming to the end of its answer.
        report: what the engine computed for it.
    """

    method: str
    path: str
    headers: Headers
    began_ns: int
    ended_ns: int = 0
    status: int = CLIENT_CLOSED_REQUEST
    request_id: str = ""
    seconds: float = 0.0
    report: RequestReport = field(default_factory=RequestReport)

    @property
    def only_looks(self) -> bool:
        """Whether nothing ran for it, and more of its kind come every few seconds."""
        return self.path in LOOKS


Listener = Callable[[Exchange], None]


class Watch:
    """ASGI middleware.

    Args:
        paths: of all routes, asked at each request.
        listeners: told of each request when it is over.

    Attributes:
        answered: (path, status) -> requests.
    """

    def __init__(self, app: ASGIApp, paths: Callable[[], frozenset[str]], listeners: Sequence[Listener]) -> None:
        self._app = app
        self._paths = paths
        self._listeners = listeners
        self.answered: Counter[tuple[str, str]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths() else OTHER
        exchange = Exchange(scope["method"], path, Headers(scope=scope), time.time_ns())
        scope[_REPORT] = exchange.report
        started = time.perf_counter()

        async def send_and_see(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                exchange.request_id = Headers(raw=message["headers"]).get(HEADER, "")
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        finally:
            if exchange.path == OTHER:  # or a route with a parameter, such as a model's name
                exchange.path = getattr(scope.get("route"), "path_format", OTHER)
            exchange.seconds = time.perf_counter() - started
            exchange.ended_ns = exchange.began_ns + int(exchange.seconds * 1e9)
            self._tell(exchange)

    def _tell(self, exchange: Exchange) -> None:
        self.answered[exchange.path, str(exchange.status)] += 1
        for listener in self._listeners:
            try:
                listener(exchange)
            except Exception:
                logger.exception("a request could not be noted down")


def report_of(request: Request) -> RequestReport | None:
    """Where the engine is to note what it computes for a request; None for an app that is not watched."""
    report: RequestReport | None = request.scope.get(_REPORT)
    return report
