"""Where cases run: in a process of their own, which may crash, hang or exit at the cost of one case.

    judge's process                                    workers: python -m octavo.conformance.harness.worker FD
      WorkerPool ──── Request(case, seed, rank) ──────►  make the backend once, answer Hello(facts)
                 ◄─── Outcome of each Request ─────────   run execute(case), one at a time

One worker lives until it dies or outlasts a case's time; then the next case starts another one. A case of a group has a
worker per rank, of which rank 0 is that one; the others start when they are first needed, and whichever of them dies or
hangs, all are started anew. `InProcess` has the same methods without a process, for mutants and quick runs.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from octavo.core.base.child import ChildProcess, ends_with, how_it_ended, receive, send
from octavo.core.base.errors import BackendUnavailable, OctavoError
from octavo.core.parallel.meeting import meeting_point

START_TIMEOUT_S = 300.0
"""A backend's first start may build kernels."""

GRACE_S = 10.0
"""What the other ranks have to answer after one of them has failed."""

MODULE = "octavo.conformance.harness.worker"


class BackendChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker makes its backend, and which cases it knows.

    Attributes:
        name: a backend's, "reference" (the reference ops as a device) or "none" (a device without ops).
        options: of `--backend-option`.
        strict: no fallback to the reference ops.
        families: modules of cases.
        rank, world_size: whose device it takes, where it works in a group.
    """

    name: str
    options: dict[str, str] = {}
    num_threads: int | None = None
    deterministic: bool = False
    strict: bool = False
    families: tuple[str, ...] = suite.FAMILIES
    rank: int = 0
    world_size: int = 1


class Hello(msgspec.Struct, tag=True):
    """A worker's first frame."""

    facts: Facts


class Refused(msgspec.Struct, tag=True):
    """A worker's first frame when the backend can't be made."""

    message: str


class Request(msgspec.Struct):
    """One case to run, as this rank of its group, which meets at `address`."""

    case: str
    seed: int
    rank: int = 0
    address: str = ""


class Runner(Protocol):
    """Runs cases one after the other."""

    @property
    def facts(self) -> Facts:
        """What the backend declares."""

    def unable(self, case: Case) -> str | None:
        """Why it can't run a case, whatever the backend."""

    def run(self, case: Case, seed: int, gap: Gap | None = None) -> CaseResult:
        """One case, judged. Never raises for what the backend does."""

    def interrupt(self) -> None:
        """End what runs now, and run nothing more. Any thread may call; the result of what ran is of no use."""

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
        rank=choice.rank,
        world_size=choice.world_size,
    )


class InProcess:
    """A Runner over a live backend in this process; a crash ends it all."""

    def __init__(self, backend: DeviceBackend, *, strict: bool = False, options: dict[str, str] | None = None) -> None:
        self._backend = backend
        self._strict = strict
        self._options = options
        self.facts = Facts.of(backend.capabilities)

    def unable(self, case: Case) -> str | None:
        return None if case.world == 1 else f"a group of {case.world} needs a process per rank; leave out --in-process"

    def run(self, case: Case, seed: int, gap: Gap | None = None) -> CaseResult:
        outcome = execute(case, self._backend, seed, strict=self._strict, options=self._options)
        return assess(case, self.facts, [outcome], seed, backend_name=self._backend.name, gap=gap)

    def interrupt(self) -> None:
        """A case in this process can't be ended."""

    def close(self) -> None:
        self._backend.close()


class WorkerPool:
    """A Runner over persistent worker processes: rank r of a group is the r-th."""

    def __init__(self, choice: BackendChoice) -> None:
        """Starts a worker. Raises BackendUnavailable when the backend can't be made."""
        self._choice = choice
        self._workers: list[ChildProcess] = []
        self._is_interrupted = False
        self.facts = self._start(1)

    def unable(self, case: Case) -> str | None:
        return None

    def run(self, case: Case, seed: int, gap: Gap | None = None) -> CaseResult:
        started = time.monotonic()
        try:
            self._start(case.world)
            outcomes = self._ask(case, seed)
        except _Lost as lost:
            result = describe(case, lost.status, str(lost), seed, self._choice.name)
        except BackendUnavailable as error:
            result = describe(case, Status.CRASH, str(error), seed, self._choice.name)
        else:
            return assess(case, self.facts, outcomes, seed, backend_name=self._choice.name, gap=gap)
        result.seconds = time.monotonic() - started
        return apply_gap(result, gap)

    def interrupt(self) -> None:
        self._is_interrupted = True  # Before the processes end: none is started in their place.
        for worker in list(self._workers):
            worker.end()

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.hang_up()
        for worker in workers:
            worker.stop()

    def _ask(self, case: Case, seed: int) -> list[Outcome]:
        """Every rank's outcome. Raises _Lost when one crashes or does not answer; then no worker is left."""
        deadline = time.monotonic() + case.timeout_s
        outcomes: dict[int, Outcome] = {}
        with meeting_point() if case.world > 1 else nullcontext("") as address:
            for rank in range(case.world):
                with self._watched(case, rank):
                    self._workers[rank].send(msgspec.msgpack.encode(Request(case.name, seed, rank, address)))
            while len(outcomes) < case.world:
                for rank in self._answering(case, outcomes.keys(), deadline):
                    with self._watched(case, rank):
                        frame = self._workers[rank].receive(deadline)
                        outcomes[rank] = msgspec.msgpack.decode(frame, type=Outcome)
                    if outcomes[rank].error:  # The others are told by the group; who isn't has got stuck.
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        return [outcomes[rank] for rank in range(case.world)]

    def _answering(self, case: Case, answered: Collection[int], deadline: float) -> list[int]:
        """Ranks that have something to say, at least one; those that are gone among them."""
        waiting = [rank for rank in range(case.world) if rank not in answered]
        left = max(deadline - time.monotonic(), 0.0)
        ready, _, _ = select.select([self._workers[rank] for rank in waiting], [], [], left)
        if not ready:
            raise self._timeout(case, waiting)
        return [rank for rank in waiting if self._workers[rank] in ready]

    @contextmanager
    def _watched(self, case: Case, rank: int) -> Iterator[None]:
        """What goes wrong with a worker, as _Lost."""
        try:
            yield
        except TimeoutError:
            raise self._timeout(case, [rank]) from None
        except ConnectionError as error:
            ended = f"the worker {how_it_ended(self._workers.pop(rank).stop())}"
            self._kill()
            raise _Lost(Status.CRASH, f"{_place(case, [rank])}{ended}: {error}") from error

    def _timeout(self, case: Case, waiting: Sequence[int]) -> _Lost:
        self._kill()
        ended = "worker killed" if case.world == 1 else "workers killed"
        return _Lost(Status.TIMEOUT, f"{_place(case, waiting)}no answer within {case.timeout_s:g} s; {ended}")

    def _kill(self) -> None:
        """No worker is left. Those of a group are of no use without each other."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()

    def _start(self, count: int) -> Facts:
        """Have at least `count` workers, and rank 0's facts."""
        there = len(self._workers)
        new = [ChildProcess(MODULE) for _ in range(count - there)]
        self._workers += new
        if self._is_interrupted:
            self._kill()
            raise BackendUnavailable(f"backend {self._choice.name}: the run was interrupted", field="backend")
        facts = [self._greet(worker, rank, count) for rank, worker in enumerate(new, there)]
        return facts[0] if facts else self.facts

    def _greet(self, worker: ChildProcess, rank: int, world_size: int) -> Facts:
        choice = msgspec.structs.replace(self._choice, rank=rank, world_size=world_size)
        try:
            worker.send(msgspec.msgpack.encode(choice))
            hello = worker.receive(time.monotonic() + START_TIMEOUT_S)
        except (ConnectionError, TimeoutError) as error:
            self._workers.remove(worker)
            ended = f"the worker {how_it_ended(worker.stop())}"
            self._kill()
            raise BackendUnavailable(
                f"backend {self._choice.name} did not start: {ended}: {error}", field="backend"
            ) from error
        answer: Hello | Refused = msgspec.msgpack.decode(hello, type=Hello | Refused)
        if isinstance(answer, Refused):
            self._kill()
            raise BackendUnavailable(answer.message, field="backend")
        return answer.facts


class _Lost(Exception):
    """A case that has no outcome."""

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def _place(case: Case, ranks: Sequence[int]) -> str:
    """Whose fault it is, where there are several."""
    if case.world == 1:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {case.world}: "


def serve(connection: socket.socket) -> None:
    """The worker's whole life."""
    ends_with(connection)
    choice = msgspec.msgpack.decode(receive(connection), type=BackendChoice)
    torch.set_num_threads(1)  # The backend brings its own threads; drawing small tensors needs none.
    logging.getLogger("octavo").setLevel(logging.ERROR)  # What falls back is in every result.
    try:
        backend = make_backend(choice)
    except OctavoError as error:
        send(connection, msgspec.msgpack.encode(Refused(str(error))))
        return
    send(connection, msgspec.msgpack.encode(Hello(Facts.of(backend.capabilities))))
    cases = suite.families(choice.families)
    try:
        while True:
            request = msgspec.msgpack.decode(receive(connection), type=Request)
            outcome = execute(
                cases[request.case],
                backend,
                request.seed,
                strict=choice.strict,
                options=choice.options,
                rank=request.rank,
                address=request.address,
            )
            send(connection, msgspec.msgpack.encode(outcome))
    except ConnectionError:
        backend.close()


def left_out(case: Case, runner: Runner) -> str | None:
    """Why a case is not run: it does not concern the backend, or this runner can't run it."""
    return case.requires(runner.facts) or runner.unable(case)


def run_cases(
    runner: Runner,
    cases: Sequence[Case],
    seed: int,
    *,
    gaps: dict[str, Gap] | None = None,
    on_result: Callable[[CaseResult], None] | None = None,
) -> tuple[list[CaseResult], dict[str, str]]:
    """Run cases in order: results, and name -> reason of those that were left out."""
    results, inapplicable = [], {}
    for case in cases:
        reason = left_out(case, runner)
        if reason is not None:
            inapplicable[case.name] = reason
            continue
        result = runner.run(case, seed, (gaps or {}).get(case.name))
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results, inapplicable


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the pool ends its workers.
    # Whoever started it may be gone before the device is there: nobody is left to be told.
    with socket.socket(fileno=int(sys.argv[1])) as _connection, contextlib.suppress(ConnectionError):
        serve(_connection)
