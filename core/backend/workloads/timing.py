"""How long a call takes on a device: queued back to back, for long enough to be measured, the median of several.

Where the device's cache would hold what a call reads, there are several of them with tensors of their own (see
Workload.prepare_all), made in turn.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from octavo.core.backend.device import DeviceBackend, StepBuffers

MEASURE_S = 0.05
"""Least time of a measurement: long beside the clock and the queue."""

REPEATS = 5

CALLS_RECORDED = 16
"""Of one recording, at least: its start by the host then weighs little beside kernels of a few microseconds."""


def seconds_of(backend: DeviceBackend, *calls: Callable[[], object]) -> float:
    """Seconds of one call, made in turn with the others; on a device that records steps, of its own work alone."""
    if backend.capabilities.graphs:
        rounds = math.ceil(CALLS_RECORDED / len(calls))
        return _seconds_of(backend, _recorded(backend, calls, rounds)) / (rounds * len(calls))
    turn = itertools.cycle(calls)
    return _seconds_of(backend, lambda: next(turn)())


def _recorded(backend: DeviceBackend, calls: Sequence[Callable[[], object]], rounds: int) -> Callable[[], None]:
    nothing = backend.empty(1, dtype=torch.int64)
    buffers = StepBuffers(nothing, nothing, (), nothing, backend.empty(1, 1, dtype=torch.float32))

    def step(_: StepBuffers) -> None:
        for _round in range(rounds):
            for call in calls:
                call()

    program = backend.compile(step, 1, buffers)
    return lambda: program.run(buffers)


def _seconds_of(backend: DeviceBackend, call: Callable[[], object]) -> float:
    call()
    backend.synchronize()
    count = 1
    while (spent := _timed(backend, call, count)) < MEASURE_S and count < 1 << 16:
        count = max(count * 2, int(count * MEASURE_S / max(spent, 1e-9)))
    return statistics.median(_timed(backend, call, count) for _ in range(REPEATS)) / count


def _timed(backend: DeviceBackend, call: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    backend.synchronize()
    return time.perf_counter() - started
