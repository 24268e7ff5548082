"""Another engine in a process of its own, served the same workload in the same minutes.

    octavo bench          peer process (a script of tests/bench/peers, or any other that speaks so)
        │  COMMAND --resident --workloads FILE
        │ ◄────────────── READY
        │  workload name ─────────────►
        │ ◄────────────── RESULT {"seconds": …, "complete": true, …}      once per turn

Turns alternate, so that the drift of a shared machine hits both alike, and each ratio is taken within one turn.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, Self

from octavo.core.base.errors import ConfigError, RequestFailed

START_SECONDS, TURN_SECONDS = 600.0, 1800.0


def peer_command(text: str) -> tuple[str, list[str]]:
    """Split NAME=COMMAND, as given to --peer, into the name and the command's words.

    Raises:
        ConfigError: there is no name or no command.
    """
    name, _, command = text.partition("=")
    if not name or not command.strip():
        raise ConfigError(f"--peer {text!r}: give NAME=COMMAND", field="peer")
    return name, shlex.split(command)


class Peer:
    """One running peer. Use it as a context manager: leaving ends the process.

    Args:
        name: for reports and errors.
        command: the words that start it, without the two arguments above.
        workload_paths: the files that both sides serve.
        log: where its stderr goes; the caller's own by default.

    Raises:
        ConfigError: the command can't be started.
    """

    def __init__(
        self, name: str, command: Sequence[str], workload_paths: Sequence[str], log: IO[bytes] | None = None
    ) -> None:
        self.name = name
        words = [*command, "--resident", "--workloads", *workload_paths]
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )
        except OSError as error:
            raise ConfigError(f"peer {name}: {words[0]}: {error.strerror}", field="peer") from None
        self._unread = b""

    def __enter__(self) -> Self:
        try:
            self._wait("READY", START_SECONDS)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def serve(self, workload_name: str) -> dict[str, Any]:
        """One turn's result.

        Raises:
            RequestFailed: the peer is gone, silent for too long, or left tokens out.
        """
        pipe: IO[bytes] = self._process.stdin  # type: ignore[assignment]
        try:
            pipe.write(workload_name.encode() + b"\n")
        except BrokenPipeError:
            raise RequestFailed(f"peer {self.name} ended between two turns") from None
        result: dict[str, Any] = json.loads(self._wait("RESULT ", TURN_SECONDS))
        if not result.get("complete"):
            raise RequestFailed(f"peer {self.name} did not generate every token of {workload_name}; no ratio is due")
        return result

    def _wait(self, mark: str, limit_seconds: float) -> str:
        """The rest of the next line that begins with `mark`."""
        pipe: IO[bytes] = self._process.stdout  # type: ignore[assignment]
        deadline = time.monotonic() + limit_seconds
        while True:
            while b"\n" in self._unread:
                line, self._unread = self._unread.split(b"\n", 1)
                if line.startswith(mark.encode()):
                    return line[len(mark) :].decode()
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(pipe.fileno(), 65536) if ready else b""
            if not more:
                why = "ended" if ready else f"was silent for {limit_seconds:.0f} s"
                raise RequestFailed(f"peer {self.name} {why} before it said {mark.strip()}")
            self._unread += more
