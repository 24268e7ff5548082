"""The cases of a run on several runners at once, each a process with a backend of its own on the same device.

    cases ──► a line per family ──► runner 1 ─┐   a thread each, which asks its runner and judges what it answers
                                ├─► runner 2 ─┼─► results, as they end ──► in the order of the cases
                                └─► runner …  ─┘
          └─► what needs the device for itself: afterwards, on the first runner

A family stays with one runner as long as there are others to begin: it runs the same kernels over and over, and they
are compiled once. What a case gives does not depend on its neighbours, so neither does the report on how many runners
there are. Ctrl-C, or whatever else ends the run, ends the cases under way.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from octavo.conformance.case import Case
from octavo.conformance.gaps import Gap
from octavo.conformance.harness.result import CaseResult
from octavo.conformance.harness.worker import Runner, left_out

OVERTIME_S = 10.0
"""What cases under way at the deadline have to end; then they count as not run."""

SIZES = ("tiny", "smoke", "tiny-full")
"""Profiles of small cases, the smallest first; what is in none of them comes last."""


@dataclass(frozen=True)
class Shared:
    """What became of the cases, each list in their order.

    Attributes:
        inapplicable: name -> reason of those that were left out.
        not_run: names of those that there was no time for.
    """

    results: list[CaseResult]
    inapplicable: dict[str, str]
    not_run: list[str]


def run_together(
    runners: Sequence[Runner],
    cases: Sequence[Case],
    seed: int,
    *,
    gaps: Mapping[str, Gap] | None = None,
    on_result: Callable[[CaseResult], None] | None = None,
    deadline: float = math.inf,
) -> Shared:
    """Run cases on all runners.

    Args:
        on_result: called in the caller's thread.
        deadline: of time.monotonic, after which no case is begun; the small ones are run first then.
    """
    first = runners[0]
    inapplicable = {case.name: why for case in cases if (why := left_out(case, first)) is not None}
    todo = [case for case in cases if case.name not in inapplicable]
    ordered = todo if deadline == math.inf else sorted(todo, key=_size)
    shared = [case for case in ordered if not case.needs_device_alone] if len(runners) > 1 else []
    alone = [case for case in ordered if case.needs_device_alone] if shared else ordered

    def run(runner: Runner, case: Case) -> CaseResult:
        return runner.run(case, seed, (gaps or {}).get(case.name))

    results = {}
    for result in itertools.chain(
        _side_by_side(runners, Lines(shared, deadline), run, deadline) if shared else (),
        (run(first, case) for case in alone)
        if deadline == math.inf
        else _side_by_side([first], Lines(alone, deadline), run, deadline),
    ):
        results[result.name] = result
        if on_result is not None:
            on_result(result)
    return Shared(
        [results[case.name] for case in todo if case.name in results],
        inapplicable,
        [case.name for case in todo if case.name not in results],
    )


def _size(case: Case) -> int:
    return next((size for size, profile in enumerate(SIZES) if profile in case.profiles), len(SIZES))


class Lines:
    """Cases in lines, one per run of a family, from which runners take. Any thread may call."""

    def __init__(self, cases: Sequence[Case], deadline: float = math.inf) -> None:
        lines = (deque(line) for _, line in itertools.groupby(cases, key=lambda case: case.family))
        self._fresh = deque(lines)
        self._begun: dict[int, deque[Case]] = {}
        self._deadline = deadline
        self._lock = threading.Lock()

    def take(self, runner: int) -> Case | None:
        """The next case of the runner's line; of a new line at its end; without one, of the longest. None: no more."""
        with self._lock:
            if time.monotonic() >= self._deadline:
                return None
            line = self._begun.get(runner)
            if not line:
                if self._fresh:
                    line = self._fresh.popleft()
                else:
                    line = max(self._begun.values(), key=len, default=None)
                if line is not None:
                    self._begun[runner] = line
            return line.popleft() if line else None

    def close(self) -> None:
        """No more cases."""
        with self._lock:
            self._fresh.clear()
            self._begun.clear()


def _side_by_side(
    runners: Sequence[Runner], lines: Lines, run: Callable[[Runner, Case], CaseResult], deadline: float
) -> Iterator[CaseResult]:
    """A result per case, as they end, soon after the deadline at the latest. Raises what a thread raised."""
    ended: queue.SimpleQueue[CaseResult | BaseException | None] = queue.SimpleQueue()

    def work(number: int, runner: Runner) -> None:
        try:
            while (case := lines.take(number)) is not None:
                ended.put(run(runner, case))
        except BaseException as error:  # The caller's thread raises it.
            ended.put(error)
        finally:
            ended.put(None)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(runners)]
    for thread in threads:
        thread.start()
    working = len(threads)
    try:
        while working:
            left = None if deadline == math.inf else max(deadline + OVERTIME_S - time.monotonic(), 0.0)
            try:
                answer = ended.get(timeout=left)
            except queue.Empty:
                return
            if isinstance(answer, BaseException):
                raise answer
            if answer is None:
                working -= 1
            else:
                yield answer
    finally:
        if working:  # Something ends the run: nobody waits for what the cases under way would give.
            lines.close()
            for runner in runners:
                runner.interrupt()
        for thread in threads:
            thread.join()
