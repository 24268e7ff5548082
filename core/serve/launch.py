"""`octavo serve`: the port first, then the engine process, then the app, until a signal or the engine's end.

    bind the port ── fails at once if it is taken
    AsyncEngine   ── its own process; a wrong model or flag ends here, with one line
    web server    ── until SIGINT, SIGTERM, SIGHUP or the engine's end
    the door closes: new requests get 503
    replies in flight: drain_seconds to finish, none after a second signal; what is left ends with an error event

Whatever ends first takes the rest with it, and the cause is the last thing printed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import resource
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from octavo import __version__
from octavo.core.base.config import EngineConfig, ServeConfig
from octavo.core.base.errors import ConfigError, EngineDead
from octavo.core.base.logs import announce, log_to_stderr
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.serve.keys import read_keys
from octavo.core.serve.tls import check_certificate, renew_certificate

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from octavo.core.serve.metrics.watch import Listener
    from octavo.core.text.tokenizer import Tokenizer

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open: longer than clients and load balancers keep theirs (5 to 60 s), so that it
is they who close and no request meets a closing connection."""

BACKLOG = 1024
"""Connections that wait while the model loads."""

CLOSE_SECONDS = 1.0
"""How long a client may take to read the end of its reply once there is no more to come."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends the server in order. SIGHUP comes when its terminal closes; under nohup it is ignored."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")

POLL_SECONDS = 0.02
"""How often a draining server looks whether it is done."""

INTERRUPTED = 130
"""Exit code for a signal that came before there was anything to serve."""


def serve(config: EngineConfig, server: ServeConfig) -> int:
    """Serve until told to end. Returns the exit code.

    Raises:
        UserError: the port, the model, the backend or an option is at fault.
        EngineDead: the engine ended by itself.
    """
    _check_extra()
    log_to_stderr(getattr(logging, server.log_level.upper()), server.log_format)
    check_certificate(server)
    read_keys(server)
    _warn_of_strangers(server)
    _allow_connections()
    with listen(server) as listener:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(_serve(config, server, listener))
        finally:
            _ignore_signals()


def _warn_of_strangers(server: ServeConfig) -> None:
    if server.host not in LOOPBACK and not server.api_key and server.api_key_file is None:
        announce(f"anyone who reaches {server.host} may use this server; see --api-key")


def _check_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError("octavo serve needs its extra; pip install 'octavo[serve]'") from error


def _allow_connections() -> None:
    """As many open files as this machine lets a process have; the usual 1,024 are for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems take no number as large as their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    return new_event_loop


def listen(server: ServeConfig) -> socket.socket:
    """A socket that listens from now on, so that the port is ours while the model loads; clients wait that long.

    Raises:
        ConfigError: the address can't be had.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    # asyncio switches Nagle's algorithm off, which would hold answers back by 40 ms, only where TCP is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {_address(server.host, server.port)} ({error.strerror}); "
            "choose another --host or --port",
            field="port",
        ) from error
    return listener


async def _serve(config: EngineConfig, server: ServeConfig, listener: socket.socket) -> int:
    signals = _Signals()
    names = server.served_model_name or (config.model,)
    engine = AsyncEngine(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})
    listeners = ExitStack()
    try:
        app = await _or_signal(_start(engine, names, server, listeners), signals)
        if app is None:
            announce("ended before the model was loaded")
            return INTERRUPTED
        _tell_format(engine.tokenizer, server)
        host, port = listener.getsockname()[:2]
        scheme = "http" if server.ssl_certfile is None else "https"
        announce(f"serving {names[0]} on {scheme}://{_address(host, port)}")
        web = web_server(app, server)
        async with renewing(web, server):
            await _serve_app(web, app, engine, listener, signals, server)
    finally:
        await engine.close()
        listeners.close()
    return 0


def _tell_format(tokenizer: Tokenizer | None, server: ServeConfig) -> None:
    """Say how replies to chats are read, which a chat template may have decided."""
    if tokenizer is None or tokenizer.chat_template is None:
        return
    from octavo.core.serve.tools.registry import ReplyFormat

    template = tokenizer.tool_chat_template or tokenizer.chat_template
    announce(f"{ReplyFormat.of(server.tool_call_parser, server.reasoning_parser, template)}")


async def _start(engine: AsyncEngine, names: Sequence[str], server: ServeConfig, listeners: ExitStack) -> FastAPI:
    """Import the app while the engine loads. Who listens to it is closed with `listeners`."""
    starting = asyncio.create_task(engine.start())
    try:
        create_app, listening = await asyncio.to_thread(_import_app)
        told = listeners.enter_context(listening(server, names[0]))
        await starting
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    return create_app(engine, names, __version__, server, told)


def _import_app() -> tuple[Callable[..., FastAPI], Callable[..., AbstractContextManager[Sequence[Listener]]]]:
    from octavo.core.serve.api import create_app
    from octavo.core.serve.metrics.listeners import listening

    return create_app, listening


async def _or_signal(work: Coroutine[Any, Any, FastAPI], signals: _Signals) -> FastAPI | None:
    """The work's result, or None when a signal came first; the work has then been cancelled and has ended."""
    working = asyncio.create_task(work)
    signalled = asyncio.create_task(signals.first.wait())
    try:
        await asyncio.wait({working, signalled}, return_when=asyncio.FIRST_COMPLETED)
        return None if signals.first.is_set() else working.result()
    finally:
        working.cancel()
        signalled.cancel()
        await asyncio.gather(working, signalled, return_exceptions=True)


async def _serve_app(
    web: uvicorn.Server,
    app: FastAPI,
    engine: AsyncEngine,
    listener: socket.socket,
    signals: _Signals,
    server: ServeConfig,
) -> None:
    """Answer until a signal or the engine's end, then end as gently as can be.

    Raises:
        EngineDead: the engine ended by itself.
    """
    serving = asyncio.create_task(web.serve(sockets=[listener]))
    first, second = asyncio.create_task(signals.first.wait()), asyncio.create_task(signals.second.wait())
    engine_ended = asyncio.create_task(engine.wait_ended())
    try:
        await asyncio.wait({serving, first, engine_ended}, return_when=asyncio.FIRST_COMPLETED)
        app.state.door.drain()
        idle = asyncio.create_task(_wait_idle(engine))
        ends = {serving, second, engine_ended, idle}
        await asyncio.wait(ends, timeout=server.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        web.should_exit = True
        cause = engine.cause_of_end
        await engine.close()  # every open stream ends with an error event now
        await asyncio.wait({serving}, timeout=CLOSE_SECONDS)
        _cut_connections(web)
        await serving
    finally:
        for task in (first, second, engine_ended):
            task.cancel()
    if cause is not None:
        raise EngineDead(cause)


async def _wait_idle(engine: AsyncEngine) -> None:
    """Return when no request is left."""
    while engine.num_unfinished:
        await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def renewing(web: uvicorn.Server, server: ServeConfig) -> AsyncGenerator[None]:
    """While this is open, new connections get the certificate in the files as they are."""
    web.config.load()
    if web.config.ssl is None:
        yield
        return
    watching = asyncio.create_task(renew_certificate(web.config.ssl, server))
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


def web_server(app: FastAPI, server: ServeConfig) -> uvicorn.Server:
    """What speaks HTTP for an app, once it is told to serve."""
    import uvicorn

    from octavo.core.serve.connection import Connection

    class Server(uvicorn.Server):
        """Leaves the signals to us."""

        @contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            yield

    config = uvicorn.Config(
        app,
        http=cast(Any, partial(Connection, read_timeout_seconds=server.read_timeout_seconds)),
        ws="none",
        log_config=None,  # it says what it has to say through our handler, in our form
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
    )
    return Server(config)


def _cut_connections(web: uvicorn.Server) -> None:
    """End what is still open: clients that don't read."""
    web.force_exit = True
    for connection in list(web.server_state.connections):
        if connection.transport is not None:
            connection.transport.abort()


class _Signals:
    """SIGNALS of this process. Made inside its event loop, which they outlive.

    A loop's own handlers would go when it closes, and one more signal then kill a server that has ended in order.

    Attributes:
        first, second: set by the first signal, and by the second; further ones change nothing.
    """

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _ignore_signals() -> None:
    """The process ends now; its exit code and its last words stand. (Python's end would take handlers away.)"""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
