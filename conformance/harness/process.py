"""A worker process and the frames that go to and from it.

    this process                                       python -m MODULE FD
      WorkerProcess ── [length u32][bytes] ──► socket ──►  receive(…)
                    ◄─ [length u32][bytes] ───────────── send(…)

Frames have a socket of their own, so that whatever a kernel prints can't be mistaken for an answer. When this process
ends, however it ends, the socket closes, and `ends_with` on the other side ends the worker.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time

_HEADER = struct.Struct("<I")
_ENDING_S = 1.0
"""What a worker has, after its connection closed, to give back its device."""


class WorkerProcess:
    """One child. Its owner stops it."""

    def __init__(self, module: str) -> None:
        """Start `python -m module FD`; does not wait for anything."""
        self._socket, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env=environment,
            )

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Raises ConnectionError when the child is gone."""
        send(self._socket, data)

    def receive(self, deadline: float) -> bytes:
        """One frame. deadline: of time.monotonic. Raises TimeoutError then, ConnectionError when the child is gone."""
        return receive(self._socket, deadline)

    def hang_up(self) -> None:
        """Tell the child to end."""
        self._socket.close()

    def stop(self) -> str:
        """End the child, by force after a second, and say how it ended."""
        self.hang_up()
        try:
            code = self._process.wait(timeout=_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"the worker was ended by signal {-code}" if code < 0 else f"the worker ended with exit code {code}"

    def end(self) -> None:
        """Have the child end now; whoever waits for its answer gets a ConnectionError. Any thread may call."""
        self._process.kill()

    def kill(self) -> None:
        """End the child now."""
        self.hang_up()
        self._process.kill()
        self._process.wait()


def send(connection: socket.socket, data: bytes) -> None:
    """One frame."""
    connection.settimeout(None)
    connection.sendall(_HEADER.pack(len(data)) + data)


def receive(connection: socket.socket, deadline: float | None = None) -> bytes:
    """One frame. Raises TimeoutError at the deadline, ConnectionError when the other side is gone."""
    (length,) = _HEADER.unpack(_exactly(connection, _HEADER.size, deadline))
    return _exactly(connection, length, deadline)


def ends_with(connection: socket.socket) -> None:
    """End this process soon after the other side of the connection is gone, even if a case hangs."""

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
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("it closed its connection")
        data += piece
    return bytes(data)
