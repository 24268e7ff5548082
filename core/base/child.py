"""A child process and the frames that go to and from it.

    this process                                        python -P -m MODULE FD
      ChildProcess ── [length u32][bytes] ──► socket ──►  receive(…)
                   ◄─ [length u32][bytes] ─────────────── send(…)
                   ◄─ lines ───────────────── pipe ◄───── stdout, stderr      where its log is kept

Frames have a socket of their own, so that whatever a library prints can't be mistaken for an answer. When this process
ends, however it ends, the socket closes, and `ends_with` on the other side ends the child. A deadline is one of
time.monotonic; None waits as long as the other side lives.

A terminal and a service manager send SIGINT, SIGTERM and SIGHUP to parent and children alike, at any moment. Where the
parent alone decides what becomes of the children, it starts them inside `signals_held`, and they call
`leave_signals_to_parent`: so no signal ends them, not even in the first instructions of their interpreter.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import IO

_HEADER = struct.Struct("<I")
_ENDING_S = 1.0
"""What a child has, after its connection closed, to give back its device."""

_TO_THE_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_held() -> Iterator[None]:
    """Round the start of a process by subprocess: these signals wait until it calls `leave_signals_to_parent`.

    They wait here too meanwhile, and are lost nowhere. (asyncio's way to start a process would not do: uvloop gives the
    process an empty mask.)
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_THE_GROUP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """In a child, first of all: ignore these signals, also those that were held back since its start."""
    for number in _TO_THE_GROUP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_THE_GROUP)


class ChildProcess:
    """One child. Its owner stops it.

    Args:
        module: run as `python -m module FD`; not waited for.
        keeps_log: pass on, line by line, what the child prints, and remember the last line.
        holds_signals: start it inside `signals_held`.
    """

    def __init__(self, module: str, *, keeps_log: bool = False, holds_signals: bool = False) -> None:
        self._socket, theirs = socket.socketpair()
        # The child must find the very packages that are found here, also from a source tree that is not installed.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        with theirs, signals_held() if holds_signals else nullcontext():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if keeps_log else sys.stderr,
                stderr=subprocess.STDOUT if keeps_log else None,
                env=environment,
            )
        self._log = _Log(self._process.stdout) if self._process.stdout is not None else None

    @property
    def pid(self) -> int:
        """The child's."""
        return self._process.pid

    @property
    def last_line(self) -> str:
        """What it printed last; empty where its log is not kept."""
        return self._log.last_line if self._log is not None else ""

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Raises ConnectionError when the child is gone, TimeoutError at the deadline."""
        send(self._socket, data, deadline)

    def receive(self, deadline: float | None = None) -> bytes:
        """One frame. Raises TimeoutError at the deadline, ConnectionError when the child is gone."""
        return receive(self._socket, deadline)

    def hang_up(self) -> None:
        """Tell the child to end. Idempotent."""
        self._socket.close()

    def stop(self) -> int:
        """End the child, by force after a second; returns its exit code, below 0 where a signal ended it."""
        self.hang_up()
        try:
            code = self._process.wait(timeout=_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._log is not None:
            self._log.close()
        return code

    def end(self) -> None:
        """Have the child end now; whoever waits for its answer gets a ConnectionError. Any thread may call."""
        self._process.kill()

    def kill(self) -> None:
        """End the child now."""
        self.end()
        self.stop()


class _Log:
    """Passes a child's lines on to stderr, in a thread of its own: a full pipe would stop the child."""

    def __init__(self, lines: IO[bytes]) -> None:
        self._lines = lines
        self.last_line = ""
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The child has ended: wait for its last lines, unless somebody whom it started still writes."""
        self._thread.join(_ENDING_S)
        if not self._thread.is_alive():
            self._lines.close()

    def _pass_on(self) -> None:
        for line in self._lines:
            text = line.decode(errors="replace").rstrip()
            self.last_line = text.strip() or self.last_line
            sys.stderr.write(text + "\n")


def how_it_ended(code: int) -> str:
    """An exit code in words that follow the process's name."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"was killed by {name}" + ("; perhaps memory ran out" if name == "SIGKILL" else "")


def send(connection: socket.socket, data: bytes, deadline: float | None = None) -> None:
    """One frame. Raises ConnectionError when the other side is gone, TimeoutError at the deadline."""
    connection.settimeout(None if deadline is None else _left(deadline))
    connection.sendall(_HEADER.pack(len(data)) + data)


def receive(connection: socket.socket, deadline: float | None = None) -> bytes:
    """One frame. Raises TimeoutError at the deadline, ConnectionError when the other side is gone."""
    (length,) = _HEADER.unpack(_exactly(connection, _HEADER.size, deadline))
    return _exactly(connection, length, deadline)


def ends_with(connection: socket.socket) -> None:
    """End this process soon after the other side of the connection is gone, even if its work hangs."""

    def watch() -> None:
        poll = select.poll()
        poll.register(connection, 0)  # a hang-up is reported unasked
        poll.poll()
        time.sleep(_ENDING_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(None if deadline is None else _left(deadline))
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("it closed its connection")
        data += piece
    return bytes(data)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)
