"""A bench in a process of its own, which may end: by an error that the device does not get over, a crash, or a hang.

    Sandbox ──(method, arguments)──► serve ──► Bench ──► device
       ▲  └── no answer: Lost; the next question starts a new process ─┘
       └──────────(answer)─────────────┘

A CUDA or HIP context is of no more use after an illegal access, and nothing but the end of its process gives it back.
The asking process opens no device, so that it has nothing to lose.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

from octavo.backends.common.tune_bench import Bench, Subject
from octavo.backends.common.tuning import Entry
from octavo.core.base.errors import BackendUnavailable, OctavoError

ANSWER_S = 600.0
"""Compiling a dozen kernels takes a minute; what takes longer than this has got stuck."""

ENDED = 70
"""Exit code of a process whose device was lost."""


class Lost(Exception):
    """The process that measured has ended without an answer."""


class Sandbox:
    """A Bench (see Measures), asked in another process. To be closed."""

    def __init__(self, make_bench: Callable[[], Bench], *, answer_s: float = ANSWER_S) -> None:
        """make_bench: called in each process; what pickle can send. Raises OctavoError where no bench can be made."""
        self._make_bench = make_bench
        self._answer_s = answer_s
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self.starts = 0
        self.subject = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def served(self, workload: int) -> Sequence[int]:
        answer: Sequence[int] = self._ask("served", workload)
        return answer

    def seconds(self, entry: int, candidate: Entry, workloads: Sequence[int]) -> float:
        answer: float = self._ask("seconds", entry, candidate, workloads)
        return answer

    def close(self) -> None:
        """End the process. Idempotent."""
        self._end()

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send((method, arguments))
            return self._answer()
        except (EOFError, ConnectionError, TimeoutError) as error:
            reason = f"{error}; {self._end(wait_s=0)}" if isinstance(error, TimeoutError) else self._end()
            raise Lost(reason) from None

    def _answer(self) -> Any:
        assert self._connection is not None
        if not self._connection.poll(self._answer_s):
            raise TimeoutError(f"no answer within {self._answer_s:g} s")
        return self._connection.recv()

    def _start(self) -> Subject:
        context = multiprocessing.get_context("spawn")  # a forked process can't use a device
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._make_bench), daemon=True)
        self._process.start()
        theirs.close()
        self.starts += 1
        try:
            hello = self._answer()
        except (EOFError, ConnectionError, TimeoutError):
            raise BackendUnavailable(f"the process that measures did not start: {self._end()}") from None
        if isinstance(hello, Subject):
            return hello
        self._end()
        raise hello

    def _end(self, *, wait_s: float = 5.0) -> str:
        """How the process ended, in words; it is killed if it has not by then."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is None or connection is None:
            return "it has ended"
        connection.close()
        process.join(wait_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            return "its process was killed"
        return "the device was lost" if process.exitcode == ENDED else f"its process ended with {process.exitcode}"


def serve(connection: Connection, make_bench: Callable[[], Bench]) -> None:
    """The whole life of the process that measures."""
    try:
        bench = make_bench()
    except OctavoError as error:
        connection.send(error)
        return
    connection.send(bench.subject)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(bench, method)(*arguments)
        except Exception:
            traceback.print_exc()
            connection.close()
            os._exit(ENDED)  # tidying up would touch the device that is lost
        connection.send(answer)
