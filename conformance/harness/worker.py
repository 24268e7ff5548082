"""Where cases run: in a process of their own, which may crash, hang or exit at the cost of one case.

    judge's process                                    worker: python -m octavo.conformance.harness.worker FD
      WorkerPool ──── frame: [length u32][msgpack] ────►  makes the backend once, answers Hello(facts)
                 ◄─── Outcome of each Request ─────────   runs execute(case), one at a time

The worker lives until it dies or outlasts a case's time; then the next case starts another one. Frames go over a
socket of their own, so that whatever a kernel prints can't be mistaken for an answer. `InProcess` has the same two
methods without a process, for mutants and quick runs.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch

from octavo.conformance import suite
from octavo.conformance.case import Case
from octavo.conformance.facts import Facts
from octavo.conformance.gaps import Gap
from octavo.conformance.harness.attempt import execute
from octavo.conformance.harness.host import HostBackend, NoOps
from octavo.conformance.harness.judge import apply_gap, assess, describe
from octavo.conformance.harness.result import CaseResult, Outcome, Status
from octavo.core.backend import BackendRegistry, DeviceBackend
from octavo.core.base.errors import BackendUnavailable, OctavoError

START_TIMEOUT_S = 300.0
"""A backend's first start may build kernels."""

_HEADER = struct.Struct("<I")


class BackendChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker makes its backend, and which cases it knows.

    Attributes:
        name: a backend's, "reference" (the reference ops as a device) or "none" (a device without ops).
        options: of `--backend-option`.
        strict: no fallback to the reference ops.
        families: modules of cases.
    """

    name: str
    options: dict[str, str] = {}
    num_threads: int | None = None
    deterministic: bool = False
    strict: bool = False
    families: tuple[str, ...] = suite.FAMILIES


class Hello(msgspec.Struct, tag=True):
    """A worker's first frame."""

    facts: Facts


class Refused(msgspec.Struct, tag=True):
    """A worker's first frame when the backend can't be made."""

    message: str


class Request(msgspec.Struct):
    """One case to run."""

    case: str
    seed: int


class Runner(Protocol):
    """Runs cases one after the other."""

    @property
    def facts(self) -> Facts:
        """What the backend declares."""

    def run(self, case: Case, seed: int, gap: Gap | None = None) -> CaseResult:
        """One case, judged. Never raises for what the backend does."""

    def close(self) -> None:
        """End processes and devices. Idempotent."""


def make_backend(choice: BackendChoice) -> DeviceBackend:
    """The device. Raises OctavoError when it can't be had."""
    if choice.name == "reference":
        return HostBackend()
    if choice.name == "none":
        return HostBackend(NoOps(), name="none")
    registry = BackendRegistry.discover()
    return registry.create(
        registry.choose(choice.name),
        choice.options,
        num_threads=choice.num_threads,
        deterministic=choice.deterministic,
    )


class InProcess:
    """A Runner over a live backend in this process; a crash ends it all."""

    def __init__(self, backend: DeviceBackend, *, strict: bool = False, options: dict[str, str] | None = None) -> None:
        self._backend = backend
        self._strict = strict
        self._options = options
        self.facts = Facts.of(backend.capabilities)

    def run(self, case: Case, seed: int, gap: Gap | None = None) -> CaseResult:
        outcome = execute(case, self._backend, seed, strict=self._strict, options=self._options)
        return assess(case, self.facts, outcome, seed, backend_name=self._backend.name, gap=gap)

    def close(self) -> None:
        self._backend.close()


class WorkerPool:
    """A Runner over one persistent worker process."""

    def __init__(self, choice: BackendChoice) -> None:
        """Starts the worker. Raises BackendUnavailable when the backend can't be made."""
        self._choice = choice
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.facts = self._start()

    def run(self, case: Case, seed: int, gap: Gap | None = None) -> CaseResult:
        started = time.monotonic()
        try:
            if self._process is None:
                self._start()
            outcome = self._ask(case, seed)
        except TimeoutError:
            self._stop()
            result = self._lost(case, seed, Status.TIMEOUT, f"no answer within {case.timeout_s:g} s; worker killed")
        except (ConnectionError, BackendUnavailable) as error:
            result = self._lost(case, seed, Status.CRASH, f"{self._stop()}: {error}")
        else:
            return assess(case, self.facts, outcome, seed, backend_name=self._choice.name, gap=gap)
        result.seconds = time.monotonic() - started
        return apply_gap(result, gap)

    def close(self) -> None:
        self._stop()

    def _ask(self, case: Case, seed: int) -> Outcome:
        connection = self._connection()
        deadline = time.monotonic() + case.timeout_s
        _send(connection, msgspec.msgpack.encode(Request(case.name, seed)))
        return msgspec.msgpack.decode(_receive(connection, deadline), type=Outcome)

    def _lost(self, case: Case, seed: int, status: Status, detail: str) -> CaseResult:
        return describe(case, status, detail, seed, self._choice.name)

    def _connection(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("the worker is not running")
        return self._socket

    def _start(self) -> Facts:
        ours, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "octavo.conformance.harness.worker", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment
            )
        self._socket = ours
        try:
            _send(ours, msgspec.msgpack.encode(self._choice))
            hello = _receive(ours, time.monotonic() + START_TIMEOUT_S)
        except (ConnectionError, TimeoutError) as error:
            raise BackendUnavailable(
                f"backend {self._choice.name} did not start: {self._stop()}: {error}", field="backend"
            ) from error
        answer: Hello | Refused = msgspec.msgpack.decode(hello, type=Hello | Refused)
        if isinstance(answer, Refused):
            self._stop()
            raise BackendUnavailable(answer.message, field="backend")
        return answer.facts

    def _stop(self) -> str:
        """End the worker and say how it ended."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        process, self._process = self._process, None
        if process is None:
            return "the worker was not running"
        try:
            code = process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return f"the worker was ended by signal {-code}" if code < 0 else f"the worker ended with exit code {code}"


def _send(connection: socket.socket, data: bytes) -> None:
    connection.settimeout(None)
    connection.sendall(_HEADER.pack(len(data)) + data)


def _receive(connection: socket.socket, deadline: float | None = None) -> bytes:
    """One frame. Raises TimeoutError at the deadline, ConnectionError when the other side is gone."""
    (length,) = _HEADER.unpack(_exactly(connection, _HEADER.size, deadline))
    return _exactly(connection, length, deadline)


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


def serve(connection: socket.socket) -> None:
    """The worker's whole life."""
    choice = msgspec.msgpack.decode(_receive(connection), type=BackendChoice)
    torch.set_num_threads(1)  # The backend brings its own threads; drawing small tensors needs none.
    logging.getLogger("octavo").setLevel(logging.ERROR)  # What falls back is in every result.
    try:
        backend = make_backend(choice)
    except OctavoError as error:
        _send(connection, msgspec.msgpack.encode(Refused(str(error))))
        return
    _send(connection, msgspec.msgpack.encode(Hello(Facts.of(backend.capabilities))))
    cases = suite.families(choice.families)
    try:
        while True:
            request = msgspec.msgpack.decode(_receive(connection), type=Request)
            case = cases[request.case]
            outcome = execute(case, backend, request.seed, strict=choice.strict, options=choice.options)
            _send(connection, msgspec.msgpack.encode(outcome))
    except ConnectionError:
        backend.close()


def run_cases(
    runner: Runner,
    cases: Sequence[Case],
    seed: int,
    *,
    gaps: dict[str, Gap] | None = None,
    on_result: Callable[[CaseResult], None] | None = None,
) -> tuple[list[CaseResult], dict[str, str]]:
    """Run cases in order: results, and name -> reason of those that do not concern this backend."""
    results, inapplicable = [], {}
    for case in cases:
        reason = case.requires(runner.facts)
        if reason is not None:
            inapplicable[case.name] = reason
            continue
        result = runner.run(case, seed, (gaps or {}).get(case.name))
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results, inapplicable


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _connection:
        serve(_connection)
