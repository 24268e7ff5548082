"""The HTTP app: one module of routes for each part of the API, all over one `Serving`.

    routes/completions.py  POST /v1/completions
    routes/chat.py         POST /v1/chat/completions
    routes/responses.py    POST /v1/responses
    routes/messages.py     POST /v1/messages, /v1/messages/count_tokens
    routes/pooling.py      POST /v1/embeddings, /v1/classify, /v1/score, /v1/rerank
    routes/adapters.py     POST /v1/load_lora_adapter, /v1/unload_lora_adapter
    routes/models.py       GET  /v1/models, /v1/models/{id}
    routes/tokens.py       POST /tokenize, /detokenize, /v1/completions/render, /v1/chat/completions/render
    routes/health.py       GET  /health, /ready, /version
    routes/state.py        GET  /engine/state
    routes/page.py         GET  /, the page and its files
    routes/metrics.py      GET  /metrics

Bytes come in, a checked request goes to the engine, JSON or server-sent events go out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from octavo.core.base.config import ServeConfig
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.serve import description, failures
from octavo.core.serve.answers import IGNORED_HEADER
from octavo.core.serve.body import Bodies, JsonRoute
from octavo.core.serve.door import Door
from octavo.core.serve.heads import Heads
from octavo.core.serve.metrics.watch import Listener, Watch
from octavo.core.serve.request_ids import ANTHROPICS_HEADER, HEADER, RequestIds
from octavo.core.serve.routes import (
    adapters,
    chat,
    completions,
    health,
    messages,
    metrics,
    models,
    page,
    pooling,
    responses,
    state,
    tokens,
)
from octavo.core.serve.serving import Serving

ROUTES: Sequence[Callable[[FastAPI, Serving], None]] = (
    completions.install,
    chat.install,
    responses.install,
    messages.install,
    pooling.install,
    adapters.install,
    models.install,
    tokens.install,
    health.install,
    state.install,
    page.install,
    metrics.install,
)
"""Each adds its routes to an app."""

EXPOSED_HEADERS = (HEADER, ANTHROPICS_HEADER, IGNORED_HEADER, "retry-after")
"""What pages of other origins may read of an answer; browsers keep all other headers of ours from them."""


def create_app(
    engine: AsyncEngine,
    names: Sequence[str],
    version: str,
    settings: ServeConfig | None = None,
    listeners: Sequence[Listener] = (),
) -> FastAPI:
    """The app that serves one started engine.

    Args:
        names: that clients may ask for.
        settings: of the server; None: the defaults.
        listeners: hear of each request when it is over.
    """
    app = FastAPI(title="Octavo", version=version, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    failures.install(app)
    settings = settings or ServeConfig()
    app.state.bodies = Bodies(settings.max_body_bytes)
    _surround(app, engine, settings, listeners)
    serving = Serving(engine, tuple(names), settings, version, int(time.time()))
    for install in ROUTES:
        install(app, serving)
    description.install(app)
    app.state.paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    return app


def _surround(app: FastAPI, engine: AsyncEngine, settings: ServeConfig, listeners: Sequence[Listener]) -> None:
    """What every request passes, from the outside in: the watch, its id, CORS, the door, HEAD as GET."""

    def paths() -> frozenset[str]:
        """Of all routes; they are added after this."""
        return app.state.paths  # type: ignore[no-any-return]

    def door(inner: ASGIApp) -> Door:
        made = app.state.door = Door(inner, engine, settings)
        return made

    app.add_middleware(Heads)
    app.add_middleware(door)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestIds)

    def watch(inner: ASGIApp) -> Watch:
        made = app.state.watch = Watch(inner, paths, listeners)
        return made

    app.add_middleware(watch)
    # Built now: what is wrong with the keys is told before the first request, and the door can be closed at any time.
    app.middleware_stack = app.build_middleware_stack()
