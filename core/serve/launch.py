"""`octavo serve`: the port first, then the engine process, then the app, until a signal or the engine's end.

bind the port ── fails at once if it is taken
AsyncEngine   ── its own process; a wrong model or flag ends here, with one line
uvicorn       ── SIGINT or SIGTERM ends it after the replies in flight; so does the engine's death
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import socket
import sys
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from octavo.core.base.config import EngineConfig, ServeConfig
from octavo.core.base.errors import ConfigError, EngineDead
from octavo.core.engine.async_engine import AsyncEngine

if TYPE_CHECKING:
    import uvicorn

GRACE_SECONDS = 10
"""How long replies in flight may take after a signal."""

WATCH_SECONDS = 0.2


def serve(config: EngineConfig, server: ServeConfig) -> int:
    """Serve until told to end. Returns the exit code.

    Raises:
        UserError: the port, the model, the backend or an option is at fault.
        EngineDead: the engine ended by itself.
    """
    try:
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError("octavo serve needs its extra; pip install 'octavo[serve]'") from error
    with _bind(server) as listener:
        try:
            asyncio.run(_serve(config, server, listener))
        except asyncio.CancelledError:
            sys.stderr.write("octavo: ended before the model was loaded\n")
            return 1
    return 0


def _bind(server: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {server.host}:{server.port} ({error.strerror}); choose another --host or --port",
            field="port",
        ) from error
    return listener


async def _serve(config: EngineConfig, server: ServeConfig, listener: socket.socket) -> None:
    import uvicorn

    from octavo.core.serve.api import create_app

    signals = _Signals(asyncio.get_running_loop())
    name = server.served_model_name or config.model
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    async with AsyncEngine(**options) as engine:
        app = create_app(engine, name, _version())
        web = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS)
        )
        web.capture_signals = nullcontext  # type: ignore[assignment,method-assign]  # ours: see _Signals
        signals.hand_to(web)
        host, port = listener.getsockname()[:2]
        sys.stderr.write(f"octavo: serving {name} on http://{host}:{port}\n")
        watcher = asyncio.create_task(_end_with(engine, web))
        await web.serve(sockets=[listener])
        watcher.cancel()
        await asyncio.wait([watcher])
        if engine.died is not None:
            raise EngineDead(str(engine.died)) from engine.died


class _Signals:
    """SIGINT and SIGTERM: while the model loads they cancel that, afterwards they end the web server, gracefully at
    first and at once when repeated. Made in the task that loads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._web: uvicorn.Server | None = None
        self._loading = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def hand_to(self, web: uvicorn.Server) -> None:
        """From now on the web server is what a signal ends."""
        self._web = web

    def _on_signal(self) -> None:
        if self._web is not None:
            self._web.force_exit = self._web.should_exit
            self._web.should_exit = True
        elif self._loading is not None:
            self._loading.cancel()


async def _end_with(engine: AsyncEngine, web: uvicorn.Server) -> None:
    """Tell the web server to end when the engine has."""
    while engine.died is None:
        await asyncio.sleep(WATCH_SECONDS)
    web.should_exit = True


def _version() -> str:
    try:
        return version("octavo")
    except PackageNotFoundError:  # a source tree that is not installed
        import octavo

        return octavo.__version__
