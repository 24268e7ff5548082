"""The engine process as its front holds it: started, spoken with, watched, ended.

    folder/to     PUSH ── bound here ──> engine process
    folder/from   PULL <── bound here ── engine process
    stdin         a Start; while it is open, the process knows that its front lives; a FAREWELL before it is closed

The folder may be entered by this user alone, and is removed as soon as both sockets are connected, before the model is
loaded. It is made after the process, which knows its name and removes it when this one dies: so nothing is left behind
whichever of the two is killed, and when; if both are at one instant, from then on. Sending never waits: the sockets
have no limit, since what is under way is bounded by the requests that are open, and a front that waited for an engine
that waits for its front would hang both.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from octavo.core.base.child import how_it_ended, signals_held
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError, EngineDead
from octavo.core.base.logs import form_in_use
from octavo.core.engine import messages

MODULE = "octavo.core.engine.process"

STOP_SECONDS = 5.0
"""How long the process may take to end when asked: it finishes the step it is in."""

KILL_SECONDS = 2.0
"""How long it may take to notice that its stdin has ended, before it is killed."""

LAST_WORDS_SECONDS = 0.5
"""How long its last message may be under way after it has ended."""


class EngineChannel:
    """The engine process and the two sockets to it. Made by `open`, ended by `close`."""

    def __init__(self, folder: Path) -> None:
        import zmq
        import zmq.asyncio

        self._zmq = zmq
        self._folder = folder
        self._context = zmq.Context()
        self._inbox = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[int] | None = None

    @classmethod
    async def open(cls, config: EngineConfig) -> Self:
        """Bind the sockets and start a process that loads config.model, which must be a path.

        Raises:
            ConfigError: pyzmq is missing, or there is no place for the sockets.
        """
        channel = cls(_name_folder())
        try:
            channel._start_process()
            channel._bind()
            await asyncio.to_thread(channel._tell, config)
        except BaseException:
            await channel.close(ask=False)
            raise
        return channel

    def _start_process(self) -> None:
        # The child must find the very packages that are found here, also from a source tree that is not installed.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with signals_held():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(self._folder)],
                stdin=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        self._ended = _end_of(self._process)

    def _bind(self) -> None:
        try:
            self._folder.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"cannot make a folder for the engine's sockets ({error.strerror}); "
                "set TMPDIR to one that can be written",
                field="TMPDIR",
            ) from error
        try:
            self._inbox.bind(f"ipc://{self._folder}/from")
            self._outbox.bind(f"ipc://{self._folder}/to")
        except self._zmq.ZMQError as error:
            raise ConfigError(
                f"cannot make a socket in {self._folder} ({error.strerror}); set TMPDIR to another, short folder",
                field="TMPDIR",
            ) from error

    def _tell(self, config: EngineConfig) -> None:
        level = logging.getLogger("octavo").getEffectiveLevel()
        self._write(messages.encode_start(messages.Start(config, level, form_in_use())) + b"\n")

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended already: receive() will tell
            self._process.stdin.write(data)
            self._process.stdin.flush()

    async def receive_first(self) -> messages.FromEngine:
        """The first message, which comes once the model is loaded or has failed to; afterwards one may send.

        Raises:
            EngineDead: the process ended without a word.
        """
        connected = await self.receive()
        assert isinstance(connected, messages.Connected)
        assert self._ended is not None
        while not self._outbox.poll(0, self._zmq.POLLOUT) and not self._ended.done():
            await asyncio.sleep(0.001)  # its socket is connected, and in a moment attached
        shutil.rmtree(self._folder, ignore_errors=True)
        return await self.receive()

    async def receive(self) -> messages.FromEngine:
        """The next message.

        Raises:
            EngineDead: the process has ended and left none.
        """
        assert self._ended is not None
        arriving = asyncio.ensure_future(self._inbox.recv())
        either: set[asyncio.Future[Any]] = {arriving, self._ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                await asyncio.wait({arriving}, timeout=LAST_WORDS_SECONDS)
            if arriving.done() and not arriving.cancelled():
                return messages.decode_from_engine(arriving.result())
            raise EngineDead(f"the engine process {how_it_ended(await self._ended)}")
        finally:
            arriving.cancel()

    def send(self, message: messages.ToEngine) -> None:
        """Queue a message for the process; never waits.

        Raises:
            EngineDead: the process is gone.
        """
        try:
            self._outbox.send(messages.encode(message), self._zmq.NOBLOCK)
        except self._zmq.Again as error:  # nobody is at the other end
            raise EngineDead("the engine process is gone") from error

    async def close(self, *, ask: bool) -> None:
        """End the process and remove the sockets; with `ask`, give it time to end by itself."""
        try:
            if self._process is not None:
                await self._end_process(self._process, ask=ask)
        finally:
            self._inbox.close(linger=0)
            self._outbox.close(linger=0)
            self._context.term()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_process(self, process: subprocess.Popen[bytes], *, ask: bool) -> None:
        try:
            self._write(messages.FAREWELL)
            if ask:
                with suppress(EngineDead):
                    self.send(messages.Stop())
                    await self._wait_ended(STOP_SECONDS)
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()  # the process ends with its stdin, also while it loads or computes
            await self._wait_ended(KILL_SECONDS)
        finally:
            process.kill()  # nothing happens if it has ended
            await self._wait_ended(KILL_SECONDS)

    async def _wait_ended(self, seconds: float) -> None:
        if self._ended is not None:
            await asyncio.wait({self._ended}, timeout=seconds)


def _end_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """The exit code, once there is one; watched by a thread, which every platform and event loop can do."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def take(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def watch() -> None:
        code = process.wait()
        with suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(take, code)

    threading.Thread(target=watch, daemon=True, name="octavo-engine-end").start()
    return ended


def _name_folder() -> Path:
    """Where no folder is yet."""
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError("AsyncEngine and octavo serve need pyzmq; pip install 'octavo[serve]'") from error
    try:
        return Path(tempfile.gettempdir()) / f"octavo-{secrets.token_hex(6)}"
    except OSError as error:
        raise ConfigError(
            f"there is no folder for the engine's sockets ({error.strerror}); set TMPDIR to one that can be written",
            field="TMPDIR",
        ) from error
